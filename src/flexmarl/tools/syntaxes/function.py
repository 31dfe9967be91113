"""Calls look like `calc(12*34)`: few tokens, so that small models learn them."""

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from flexmarl.tools.syntax import Found, Incomplete, SyntaxBase, ToolCall


class FunctionSyntax(SyntaxBase):
    """Calls look like `calc(12*34)`: few tokens, so small models learn them.

    A `)` of ordinary text stops the engine too; then `parse` finds no call, and the caller continues the generation if
    the agent has not ended its turn. The role prompt is not told of the tools: it is the user's own to the last token.

    >>> FunctionSyntax().parse("6 times 7 is calc(6*7)")[0].arguments
    '6*7'
    """

    type: Literal["function"] = "function"
    names: Mapping[str, str] = Field(default={"calc": "calculator"}, min_length=1)
    """Word in the text -> name of the tool."""

    @field_validator("names")
    @classmethod
    def _words_are_identifiers(cls, names: Mapping[str, str]) -> Mapping[str, str]:
        for word in names:
            if not word.isidentifier():
                raise ValueError(f"names: {word!r} is no identifier; use letters, digits and _, e.g. 'calc'")
        return names

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing parenthesis."""
        return (")",)

    def parse(self, text: str) -> tuple[Found, ...]:
        """The calls in the text; each ends where its parentheses balance."""
        words = "|".join(re.escape(word) for word in self.names)
        opening = re.compile(rf"(?<!\w)({words})\(")
        found: list[Found] = []
        place = 0
        while (opened := opening.search(text, place)) is not None:
            depth = 1
            for place in range(opened.end(), len(text)):
                depth += {"(": 1, ")": -1}.get(text[place], 0)
                if depth == 0:
                    break
            if depth:
                found.append(Incomplete(f"{depth} of the parentheses of {opened[1]}( not closed"))
                break
            argument = text[opened.end() : place]
            found.append(ToolCall(self.names[opened[1]], argument, start=opened.start()))
        return tuple(found)

    def render(self, *calls: ToolCall) -> str:
        """E.g. `calc(6*7)`. Raises KeyError for a tool that `names` lacks, ValueError for several arguments."""
        words = {tool: word for word, tool in self.names.items()}
        return " ".join(f"{words[call.name]}({only_argument(call)})" for call in calls)


def only_argument(call: ToolCall) -> str:
    """The text of a call's only argument. Raises ValueError if it has several, or one that is no text."""
    values = [call.arguments] if isinstance(call.arguments, str) else [*call.arguments.values()]
    if len(values) != 1 or not isinstance(values[0], str):
        raise ValueError(f"the syntax has a place for one text, got {call.arguments!r}; use another syntax")
    return values[0]
