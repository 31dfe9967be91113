"""Decides whether an agent's text calls tools. A syntax says how calls look in text; there is one per family of models.

    function   calc(12*(3+4))                                                     small models of one's own
    tag        <tool_call>{"name": "calculator", "arguments": {...}}</tool_call>  Qwen, Hermes
    xml        <tool_call><function=calculator><parameter=expression>...          Qwen3-Coder
    llama      {"name": "calculator", "parameters": {...}}                        Llama 3
    mistral    [TOOL_CALLS][{"name": "calculator", "arguments": {...}}]           Mistral
    fenced     ```python ... ```                                                  code, for any model

The caller gives `stop` to the engine. It decodes the agent's message with the `markers` that are special tokens of the
tokenizer, and `parse`s the text, with all continuations joined:

    ToolCall      run it; the result is an observation
    Malformed     a call that cannot be read: the agent reads the reason
    Incomplete    the beginning of a call, always the last. If the engine stopped at one of `stop`, generate more. An
                  agent that ended its turn cannot go on: it reads the reason
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from flexmarl.errors import is_unicode
from flexmarl.events.safe_json import parse_json
from flexmarl.plugins import SettingsTable
from flexmarl.settings import Settings


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call."""

    name: str
    """Name of the tool."""
    arguments: Mapping[str, Any] | str
    """Arguments by name, or a text: the only argument."""
    call_id: str = field(default="", compare=False)
    """Id that the model gave to the call; empty if its syntax has none."""
    start: int = field(default=0, compare=False)
    """Place of the call in the text; the text before it is the agent's message."""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """The beginning of a call."""

    reason: str
    """Reason for an agent that ended its turn here."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be read."""

    reason: str


Found = ToolCall | Malformed | Incomplete


class Syntax(Protocol):
    """How calls look in text. `parse` is total: no text makes it raise."""

    @property
    def type(self) -> str:
        """Its name in a config."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings at which the engine must stop, because a call may end there; empty if the message ends with calls."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that `parse` reads and that a tokenizer may have as special tokens, which plain decoding leaves out."""
        ...

    @property
    def optional_end(self) -> str:
        """Text at the end of a rendered call without which it is a whole call too; mostly empty. A call that is cut
        before it never reads as a call."""
        ...

    def parse(self, text: str) -> tuple[Found, ...]:
        """All calls in the text, in order; only the last may be Incomplete."""
        ...

    def render(self, *calls: ToolCall) -> str:
        """Calls as a model would write them: for role prompts and demonstrations. `parse` reads them back."""
        ...


class SyntaxBase(Settings):
    """Base of syntaxes: the message ends with its calls, no marker is a special token, and a call is whole or none."""

    @property
    def stop(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def optional_end(self) -> str:
        """Nothing."""
        return ""


def call_of_json(value: Any, *, arguments: str, call_id: str = "", start: int = 0) -> ToolCall | Malformed:
    """The call that a JSON value stands for. `arguments`: the key that the family uses; others are read as well."""
    key = next((key for key in (arguments, "arguments", "parameters") if isinstance(value, dict) and key in value), "")
    if not key or not isinstance(value.get("name"), str):
        return Malformed(f'write a tool call as {{"name": ..., "{arguments}": {{...}}}}')
    given = value[key]
    if not is_unicode(json.dumps([value["name"], given], ensure_ascii=False)):
        return Malformed("the tool call holds half a surrogate pair, which is no character")
    if isinstance(given, dict | str):
        return ToolCall(value["name"], given, call_id, start)
    return ToolCall(value["name"], json.dumps(given, ensure_ascii=False), call_id, start)


def json_at(text: str, place: int) -> tuple[Any, int] | str:
    """The JSON value that begins at this place, and the place behind it; or what is wrong with it."""
    try:
        _, end = _DECODER.raw_decode(text, place)
        return parse_json(text[place:end]), end
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos - place}"
    except RecursionError:
        return "too many levels of nesting"
    except ValueError as error:
        return str(error)


_DECODER = json.JSONDecoder()

SYNTAXES: SettingsTable[Syntax] = SettingsTable(
    "syntax",
    setting="team.agents.NAME.syntax.type",
    group="syntaxes",
    interface=[Syntax],
    built_in={
        "function": "flexmarl.tools.syntaxes.function:FunctionSyntax",
        "tag": "flexmarl.tools.syntaxes.tag:TagSyntax",
        "xml": "flexmarl.tools.syntaxes.xml:XmlSyntax",
        "llama": "flexmarl.tools.syntaxes.llama:LlamaSyntax",
        "mistral": "flexmarl.tools.syntaxes.mistral:MistralSyntax",
        "fenced": "flexmarl.tools.syntaxes.fenced:FencedSyntax",
    },
)
"""Syntaxes of tool calls by `type`; the settings class is the syntax."""
syntax = SYNTAXES.register
"""Decorator that makes a settings class the syntax of its `type`: `@syntax`."""

AnySyntax = Annotated[Syntax, SYNTAXES]
"""Settings field of a syntax, chosen by its `type`."""
