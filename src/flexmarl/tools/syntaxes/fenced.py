"""Calls are fenced blocks of code, which any model writes."""

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from flexmarl.tools.syntax import Found, Incomplete, SyntaxBase, ToolCall
from flexmarl.tools.syntaxes.function import only_argument

FENCE = "```"
_OPENING = re.compile(r"(?<!\S)```([^\s`]*)[^\n`]*\n")
_CLOSING = re.compile(r"^```[ \t]*$", re.MULTILINE)


class FencedSyntax(SyntaxBase):
    """A block of code is a call: of the tool for its language, with the code as the only argument.

    Generation stops behind the closing fence. Blocks in other languages are ordinary text.

    >>> FencedSyntax().parse("```python\\nprint(6*7)\\n```")[0].arguments
    'print(6*7)'
    """

    type: Literal["fenced"] = "fenced"
    languages: Mapping[str, str] = Field(default={"python": "python"}, min_length=1)
    """Word behind the opening fence -> name of the tool."""

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing fence and the end of its line."""
        return (f"{FENCE}\n",)

    @property
    def optional_end(self) -> str:
        """The end of the closing fence's line: a model may end its turn at the fence."""
        return "\n"

    def parse(self, text: str) -> tuple[Found, ...]:
        """The blocks in one of the languages."""
        found: list[Found] = []
        place = 0
        while (opened := _OPENING.search(text, place)) is not None:
            closed = _CLOSING.search(text, opened.end())
            tool = self.languages.get(opened[1])
            if closed is None:
                if tool is not None:
                    found.append(Incomplete(f"{FENCE}{opened[1]} without {FENCE} on a line of its own"))
                break
            if tool is not None:
                code = text[opened.end() : closed.start()].removesuffix("\n")
                found.append(ToolCall(tool, code, start=opened.start()))
            place = closed.end()
        return tuple(found)

    def render(self, *calls: ToolCall) -> str:
        """The code of each call between fences. Raises KeyError for a tool without a language."""
        words = {tool: word for word, tool in self.languages.items()}
        return "".join(f"{FENCE}{words[call.name]}\n{only_argument(call)}\n{FENCE}\n" for call in calls)
