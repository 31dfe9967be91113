"""Keeps the tools of an episode open: each from the first call of a seat to the end of the episode.

consumes     the tools that seats call
waits for    a tool to open; at the end, for all of them to close
produces     one bound tool per seat and tool
unblocked by the tools, or by the grace period at the end
"""

import asyncio
import contextvars
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

from flexmarl.tools.interface import BoundTool, Tool, ToolContext


class RunningCalls:
    """The places for a run's tool calls: `at_once` for all tools, `max_parallel` for each name. None: no bound."""

    def __init__(self, at_once: int | None = None) -> None:
        self._of_all = asyncio.Semaphore(at_once) if at_once else nullcontext()
        self._of_tool: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def place(self, tool: str, max_parallel: int | None = None) -> AsyncIterator[None]:
        """Holds a place for a call of the tool with this name, and its `max_parallel`.

        The tool's own line comes first: a call that waits there keeps no other tool from running.
        """
        if max_parallel:
            self._of_tool.setdefault(tool, asyncio.Semaphore(max_parallel))
        async with self._of_tool.get(tool, nullcontext()), self._of_all:
            yield


class OpenTools:
    """The tools of one episode. Outside a `block`, each is open only for as long as it is lent."""

    def __init__(self, deadline: Callable[[], float] = lambda: math.inf, running: RunningCalls | None = None) -> None:
        """`deadline`: time of the event loop at which the episode ends at the latest, as far as is known now.
        `running`: the places for calls, which all episodes of a run share.
        """
        self.deadline, self.running = deadline, running or RunningCalls()
        self.faults: list[Exception] = []
        """Errors of tools that failed when they were closed."""
        self._group: asyncio.TaskGroup | None = None
        self._surroundings = contextvars.copy_context()
        self._over = asyncio.Event()
        self._bound: dict[tuple[str, str], asyncio.Future[BoundTool]] = {}
        self._holders: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def block(self, grace_s: float) -> AsyncIterator[None]:
        """Keeps tools open for as long as the block lasts, and closes them. One that takes longer than `grace_s` to
        close is cancelled."""
        # A holder must not count as a task of the workflow whose call opens the tool: these end before the block does.
        self._surroundings = contextvars.copy_context()
        async with asyncio.TaskGroup() as self._group:
            try:
                yield
            finally:
                group, self._group = self._group, None
                self._over.set()
                if self._holders:
                    group.create_task(self._cut(grace_s), name="tools/cut")

    @asynccontextmanager
    async def lent(self, seat: str, tool: Tool, context: ToolContext) -> AsyncIterator[BoundTool]:
        """Lends a seat's tool, which is opened if it is not open yet. Raises what the tool raises when it opens."""
        if self._group is None:
            async with tool.open(context) as bound:
                yield bound
            return
        key = (seat, tool.name)
        if key not in self._bound:
            self._bound[key] = asyncio.get_running_loop().create_future()
            # A task of its own, because many context managers must be left by the task that entered them.
            opening, name = self._hold(tool, context, self._bound[key]), f"tools/{seat}/{tool.name}"
            self._holders.append(self._surroundings.run(self._group.create_task, opening, name=name))
        yield await asyncio.shield(self._bound[key])

    async def _hold(self, tool: Tool, context: ToolContext, ready: "asyncio.Future[BoundTool]") -> None:
        try:
            async with tool.open(context) as bound:
                ready.set_result(bound)
                await self._over.wait()
        except Exception as error:  # A tool may raise anything. Its callers, or the player, are told.
            if ready.done():
                self.faults.append(error)
            else:
                ready.set_exception(error)
                ready.exception()  # Its caller may have been cancelled; then nobody else looks.
        finally:
            ready.cancel()

    async def _cut(self, grace_s: float) -> None:
        await asyncio.wait(self._holders, timeout=grace_s)
        for holder in self._holders:
            holder.cancel()
