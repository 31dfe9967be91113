"""Decides whether an agent's text calls a tool, and how calls look in text.

    FunctionSyntax    calc(12*(3+4))
    TagSyntax         <tool_call>{"name": "calculator", "arguments": "12*(3+4)"}</tool_call>

The caller gives `stop` to the engine. It `parse`s the text that the agent wrote since its last observation, with all
continuations joined:

    ToolCall      run it; the result is the observation
    Incomplete    the engine stopped too early, at the first `)` of calc((1+2)*3): generate more. If the agent ended its
                  turn by itself, it cannot continue: give it `.observation`
    Malformed     give it `.observation`
    None          no call
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import Field, field_validator

from flexmarl.events.safe_json import parse_json
from flexmarl.plugins import SettingsTable
from flexmarl.settings import Settings


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call."""

    name: str
    """Name of the tool."""
    argument: str


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The beginning of a call."""

    observation: str
    """Text for an agent that ended its turn here."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be understood."""

    observation: str


Parsed = ToolCall | Incomplete | Malformed | None


class Syntax(Protocol):
    """How calls look in text. `parse` is total: no text makes it raise."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings at which the engine must stop, because a call may end there."""
        ...

    def parse(self, text: str) -> Parsed:
        """The first call in the text."""
        ...

    def render(self, call: ToolCall) -> str:
        """The call as a model would write it: for role prompts and demonstrations. `parse` reads it back."""
        ...


class FunctionSyntax(Settings):
    """Calls look like `calc(12*34)`: few tokens, so small models learn them.

    A `)` of ordinary text stops the engine too; then `parse` returns None, and the caller continues the generation if
    the agent has not ended its turn.

    >>> FunctionSyntax().parse("6 times 7 is calc(6*7)")
    ToolCall(name='calculator', argument='6*7')
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

    def parse(self, text: str) -> Parsed:
        """The first call in the text; it ends where its parentheses balance."""
        words = "|".join(re.escape(word) for word in self.names)
        opening = re.search(rf"(?<!\w)({words})\(", text)
        if opening is None:
            return None
        depth = 1
        for position in range(opening.end(), len(text)):
            depth += {"(": 1, ")": -1}.get(text[position], 0)
            if depth == 0:
                return ToolCall(self.names[opening[1]], text[opening.end() : position])
        return Incomplete(f"error: {depth} of the parentheses of {opening[1]}( not closed")

    def render(self, call: ToolCall) -> str:
        """E.g. `calc(6*7)`. Raises KeyError for a tool that `names` lacks."""
        words = {tool: word for word, tool in self.names.items()}
        return f"{words[call.name]}({call.argument})"


class TagSyntax(Settings):
    """Calls as Hermes and Qwen models write them: JSON between tags.

    A tool takes one text. `arguments` may be that text, or a mapping with one entry, whose value is taken; any other
    value reaches the tool as JSON.

    >>> TagSyntax().parse('<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>')
    ToolCall(name='calculator', argument='6*7')
    """

    type: Literal["tag"] = "tag"
    opening: str = Field(default="<tool_call>", min_length=1)
    """Text before the JSON."""
    closing: str = Field(default="</tool_call>", min_length=1)
    """Text behind the JSON; generation stops there."""

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tag."""
        return (self.closing,)

    def parse(self, text: str) -> Parsed:
        """The first call in the text."""
        _, opened, rest = text.partition(self.opening)
        body, closed, _ = rest.partition(self.closing)
        if not opened:
            return None
        if not closed:
            return Incomplete(f"error: {self.opening} without {self.closing}")
        try:
            call = parse_json(body)
        except ValueError as error:
            return Malformed(f"error: the tool call is not JSON: {error}")
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or "arguments" not in call:
            return Malformed('error: write a tool call as {"name": ..., "arguments": ...}')
        return ToolCall(call["name"], _as_text(call["arguments"]))

    def render(self, call: ToolCall) -> str:
        """E.g. `<tool_call>{"name": "calculator", "arguments": "6*7"}</tool_call>`."""
        body = json.dumps({"name": call.name, "arguments": call.argument}, ensure_ascii=False)
        return f"{self.opening}{body}{self.closing}"


def _as_text(arguments: object) -> str:
    if isinstance(arguments, dict) and len(arguments) == 1:
        (arguments,) = arguments.values()
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


SYNTAXES: SettingsTable[Syntax] = SettingsTable(
    "syntax",
    setting="team.agents.NAME.syntax.type",
    group="syntaxes",
    interface=[Syntax],
    built_in={"function": "flexmarl.tools.syntax:FunctionSyntax", "tag": "flexmarl.tools.syntax:TagSyntax"},
)
"""Syntaxes of tool calls by `type`; the settings class is the syntax."""
syntax = SYNTAXES.register
"""Decorator that makes a settings class the syntax of its `type`: `@syntax`."""

AnySyntax = Annotated[Syntax, SYNTAXES]
"""Settings field of a syntax, chosen by its `type`."""
