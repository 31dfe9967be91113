"""Conformance checks of tools, and of syntaxes of tool calls.

    check_tool(MyTool(), good=["2+2"])
    check_syntax(MySyntax(), call=ToolCall("calculator", "2+2"))

Both run without a test framework.
"""

import asyncio
from collections.abc import Sequence

from flexmarl.tools import Incomplete, Malformed, Tool, ToolCall
from flexmarl.tools.syntax import Syntax

HOSTILE = (
    "",
    " ",
    "\x00",
    "(" * 10_000,
    "9" * 10_000,
    "9**9**9**9",
    "__import__('os')",
    "{}",
    "☃",
    "\n" * 100,
)


def check_tool(tool: Tool, *, good: Sequence[str]) -> None:
    """Raises AssertionError naming the law that the tool breaks; `good` are arguments that it must understand."""
    assert tool.name.isidentifier(), f"an agent calls a tool by an identifier, not {tool.name!r}"
    assert tool.description.strip(), "a tool says what it does"
    answers = asyncio.run(_call_at_once(tool, [*good, *HOSTILE]))
    for argument, answer in zip([*good, *HOSTILE], answers, strict=True):
        assert isinstance(answer, str), f"an observation is text, not {answer!r}, also for {argument[:40]!r}"
    for argument, answer in zip(good, answers, strict=False):
        assert not answer.startswith("error: "), f"{argument!r} is understood, but the tool said {answer!r}"


async def _call_at_once(tool: Tool, arguments: Sequence[str]) -> list[str]:
    return await asyncio.gather(*(tool(argument) for argument in arguments))


def check_syntax(syntax: Syntax, *, call: ToolCall) -> None:
    """Raises AssertionError naming the law that the syntax breaks; `call` is any call that it can express."""
    text = syntax.render(call)
    assert syntax.parse(f"Let me see. {text}") == call, "what is rendered is parsed back"
    assert text.endswith(syntax.stop), "the engine stops at the end of a call"
    for end in range(len(text)):
        begun = syntax.parse(text[:end])
        assert not isinstance(begun, ToolCall), f"{text[:end]!r} is no complete call"
        assert begun is None or begun.observation.startswith("error: "), "an agent can tell an error from a result"
    for nonsense in HOSTILE:
        for around in (nonsense, text[: len(text) // 2] + nonsense, nonsense + text):
            parsed = syntax.parse(around)
            assert parsed is None or isinstance(parsed, ToolCall | Incomplete | Malformed), "any text has an answer"
