"""Runs the tool calls of one message.

consumes     the calls found in one message
waits for    the tools, and for places among the run's calls; all calls of a message run at once
produces     one ToolUse for each call, in the order of the calls
unblocked by the end of the slowest call, and of those before it in the line; a cancelled act cancels its calls
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flexmarl.agents.context import EpisodeContext, call_seed
from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import EpisodeError, boundary, cause_of, is_unicode
from flexmarl.tools import Found, Observation, Tool, ToolCall, ToolContext
from flexmarl.tools.arguments import BadArguments, as_text, fitted
from flexmarl.tools.interface import max_parallel_of

SPENT = "budget spent: this call was not run; at most {} tool calls are allowed"
Answer = Callable[[Mapping[str, Any]], Awaitable[Observation]]
"""Answers a call whose arguments fit."""
LEFT_OUT = " ... [{} characters left out] ... "


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call and what came back."""

    name: str
    """Name of the tool; empty if the call could not be read."""
    argument: str
    """The only argument as text, or all of them as JSON; the agent's message if the call could not be read."""
    result: str
    """Text that the agent read as the result."""
    ok: bool = True
    """False: the call was at fault, or was not run."""
    run: bool = True
    """False: the call was not run, because the budget was spent."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments by name; empty if they did not fit the tool."""
    data: Any = None
    """The tool's values for workflows and scorers, which no prompt holds."""
    cost: float = 0.0
    """The tool's cost of the call."""
    dropped: int = 0
    """Number of characters of the result that the agent was not shown."""


def _context(seat: str, tool: Tool, context: EpisodeContext) -> ToolContext:
    return ToolContext(
        episode=context.trajectory_id,
        seed=call_seed(context.run_seed, context.trajectory_id, seat, tool.name, 0),
        files=_files(context),
        deadline=context.tools.deadline(),
        sandbox=context.sandbox,
    )


def _files(context: EpisodeContext) -> Mapping[str, str | bytes]:
    files = context.task.data.get("files", {})
    if not isinstance(files, Mapping) or not all(
        isinstance(name, str) and isinstance(content, str | bytes) for name, content in files.items()
    ):
        raise EpisodeError(
            f"task {context.task.input_id}: its field 'files' must map names to texts or bytes, got {str(files)[:80]!r}"
        )
    return files


async def use_tools(
    calls: Sequence[Found],
    *,
    seat: str,
    tools: Mapping[str, Tool],
    context: EpisodeContext,
    text: str,
    left: int,
    most: int,
    most_chars: int,
    own: Mapping[str, Answer],
) -> list[ToolUse]:
    """Runs the calls of one message, all at once. The result of a faulty call is a text that says what is wrong.

    `text`: the message; `left`: calls that the budget still has; `most`: the whole budget; `most_chars`: longest text
    of a result; `own`: what answers the calls that the seat itself answers, by tool.
    """

    async def use(index: int, call: Found) -> ToolUse:
        if index < left:
            return _cut(await _use(call, seat, tools, context, text, own), most_chars)
        name, argument = (call.name, as_text(call.arguments)) if isinstance(call, ToolCall) else ("", text)
        return _cut(_used(name, argument, Observation(SPENT.format(most), ok=False), run=False), most_chars)

    if len(calls) == 1:
        return [await use(0, calls[0])]
    try:
        async with task_block() as group:
            running = [group.create_task(use(*call), name=f"{seat}/call {call[0]}") for call in enumerate(calls)]
    except BaseExceptionGroup as errors:
        raise cause_of(errors) from errors
    return [task.result() for task in running]


async def _use(
    call: Found, seat: str, tools: Mapping[str, Tool], context: EpisodeContext, text: str, own: Mapping[str, Answer]
) -> ToolUse:
    if not isinstance(call, ToolCall):
        return _used("", text, Observation(call.reason, ok=False))
    argument, tool = as_text(call.arguments), tools.get(call.name)
    if tool is None:
        known = ", ".join(tools) or "none"
        return _used(call.name, argument, Observation(f"there is no tool {call.name!r}; there are: {known}", ok=False))
    arguments = fitted(call.arguments, tool.parameters)
    if isinstance(arguments, BadArguments):
        return _used(call.name, argument, Observation(arguments.reason, ok=False))
    if tool.name in own:
        return _used(call.name, argument, await own[tool.name](arguments), arguments)
    with boundary(EpisodeError, f"tool {call.name!r} of agent {seat!r}"):
        lent = context.tools.lent(seat, tool, _context(seat, tool, context))
        async with lent as bound, context.tools.running.place(tool.name, max_parallel_of(tool)):
            observation = await bound.call(arguments)
        if not math.isfinite(observation.cost):
            raise EpisodeError(f"the cost of a call must be a finite number, got {observation.cost}")
    return _used(call.name, argument, observation, arguments)


def _cut(use: ToolUse, most: int) -> ToolUse:
    """The call with a result of at most `most` characters: head and tail of a longer one, and what is left out."""
    length = len(use.result)
    if length <= most:
        return use
    kept = most - len(LEFT_OUT.format(length))
    tail = kept // 2
    result = use.result[: kept - tail] + LEFT_OUT.format(length - kept) + use.result[length - tail :]
    return replace(use, result=result, dropped=use.dropped + length - kept)


def _used(
    name: str, argument: str, observation: Observation, arguments: Mapping[str, Any] | None = None, *, run: bool = True
) -> ToolUse:
    result = observation.shown
    if not is_unicode(result):  # No tokenizer takes half a surrogate pair.
        result = result.encode("utf-8", "backslashreplace").decode("utf-8")
    return ToolUse(
        name=name,
        argument=argument,
        result=result,
        ok=observation.ok,
        run=run,
        arguments=arguments or {},
        data=observation.data,
        cost=observation.cost,
        dropped=observation.dropped,
    )
