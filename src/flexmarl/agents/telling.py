"""Decides how a model learns of an agent's tools, and in which syntax its calls are read.

| template writes calls | template lists tools | syntax `auto` is       | the model learns of its tools from     |
|-----------------------|----------------------|------------------------|----------------------------------------|
| yes                   | yes                  | the one that reads it  | the template, e.g. Qwen, Llama, Mistral |
| no                    | no                   | `tag`                  | the role prompt, e.g. SmolLM2, Gemma 2 |
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from flexmarl.agents.chat import ChatOptions, ChatRenderer
from flexmarl.agents.extension import PROBE
from flexmarl.agents.settings import AgentSettings
from flexmarl.errors import ConfigError
from flexmarl.tools import FunctionSyntax, LlamaSyntax, MistralSyntax, Syntax, TagSyntax, Tool, ToolCall, XmlSyntax
from flexmarl.tools.arguments import check_schema, described_tools, example_of
from flexmarl.tools.interface import specification

FAMILIES: tuple[Syntax, ...] = (XmlSyntax(), TagSyntax(), MistralSyntax(), LlamaSyntax())
"""Syntaxes in which chat templates write calls; the one without marks of its own comes last."""
MOST_TOLD = 256
"""Most sets of tools whose wording an agent keeps."""
PROBE_CALL = ToolCall(PROBE.name, json.loads(PROBE.arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An agent's renderer, role prompt and syntax."""

    renderer: ChatRenderer
    system: str
    syntax: Syntax | None = None
    note: str = ""
    """The decisions in words; empty for an agent without tools."""


class Teller:
    """An agent's settings and its policy's renderer, with which a program may offer it tools of its own."""

    def __init__(self, settings: AgentSettings, base: ChatRenderer) -> None:
        self._settings, self._base = settings, base
        self._told: dict[str, Told] = {}
        """By the tools in words: every episode offers the same, and schemas take long to check."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has what was told of its own."""
        return Teller, (self._settings, self._base)

    def told(self, tools: tuple[Tool, ...]) -> Told:
        """The agent's renderer, role prompt and syntax with these tools. Raises ConfigError that names the fault."""
        key = repr(tools)
        if key not in self._told:
            if len(self._told) >= MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._told[key] = told_of_tools(self._settings, self._base, tools)
        return self._told[key]


def told_of_tools(settings: AgentSettings, base: ChatRenderer, offered: tuple[Tool, ...] | None = None) -> Told:
    """Joins an agent's settings with its policy's renderer. Raises ConfigError that begins with the key at fault.

    `offered`: tools in place of those of the settings.
    """
    plain = base.with_options(ChatOptions(arguments=settings.chat_template_kwargs))
    tools = settings.offered() if offered is None else offered
    if not tools:
        return Told(renderer=plain, system=settings.system)
    for tool in tools:
        check_schema(tool)
    written = plain.written(PROBE)
    syntax, because = (settings.syntax, "set") if settings.syntax != "auto" else _read_by(written)
    native = syntax.parse(written) == (PROBE_CALL,)
    tells, why = _tells(settings, tools, syntax, plain)
    specifications = tuple(map(specification, tools)) if tells == "template" else ()
    options = ChatOptions(tools=specifications, arguments=settings.chat_template_kwargs, native=native)
    system = settings.system
    if tells == "prompt":
        listed = described_tools(tools, _example(syntax, tools[0]))
        system = f"{system}\n\n{listed}" if system else listed
    note = f"calls are read as `{syntax.type}` ({because}); tools are told by {why}"
    return Told(renderer=base.with_options(options), system=system, syntax=syntax, note=note)


def _read_by(written: str) -> tuple[Syntax, str]:
    """The syntax that reads what a chat template writes for a call, with the reason."""
    if not written:
        return TagSyntax(), "auto: the chat template knows no calls"
    for syntax in FAMILIES:
        if syntax.parse(written) == (PROBE_CALL,):
            return syntax, "auto: the chat template writes calls so"
    raise ConfigError(
        f"syntax: the chat template writes a call as {written[:120]!r}, which no syntax reads; set `syntax` to one "
        f"with `tell_tools: prompt`, or register your own with @syntax"
    )


def _tells(settings: AgentSettings, tools: tuple[Tool, ...], syntax: Syntax, renderer: ChatRenderer) -> tuple[str, str]:
    """How the model learns of its tools: `template`, `prompt` or `none`, and this in words."""
    asked = settings.tell_tools
    by_template = asked in ("auto", "template") and renderer.tells([*map(specification, tools)])
    if asked == "auto" and isinstance(syntax, FunctionSyntax):
        asked = "none"
    if asked == "template" and not (by_template or renderer.stands_in):
        raise ConfigError("tell_tools: the chat template does not use `tools`; use auto or prompt")
    if asked == "none":
        return "none", "nobody but `system`"
    if by_template:
        return "template", "the chat template"
    return "prompt", "the role prompt" + ("" if settings.tell_tools == "prompt" else ": the chat template has no place")


def _example(syntax: Syntax, tool: Tool) -> str:
    """A call of the tool, with a value of its type for each argument: small models copy what they see."""
    values = {name: example_of(one) for name, one in tool.parameters.get("properties", {}).items()}
    for arguments in (values, dict.fromkeys(values, "...")):
        with suppress(KeyError, ValueError):  # A syntax may have a place for one text, or for some tools only.
            return syntax.render(ToolCall(tool.name, arguments))
    raise ConfigError(f"syntax: a call of the tool {tool.name!r} cannot be written in it; use `auto`, `tag` or `xml`")
