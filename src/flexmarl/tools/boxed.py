"""Tools that run code of a model in a box: `python`, in one session per episode or anew for each call, and `shell`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, Literal

from pydantic import Field

from flexmarl.errors import EpisodeError
from flexmarl.sandbox.interface import Box, BoxOutcome, Ended
from flexmarl.settings import Settings
from flexmarl.tools.interface import Observation, ToolContext

LOST = "the session has ended, with its variables and files; the next call begins a new one"
CUT = "the call before was cancelled, and its session has ended; this call began a new one"
REASONS = {
    Ended.TIMED_OUT: "it took longer than {timeout_s:g} s",
    Ended.OUT_OF_MEMORY: "it used more memory than it may",
    Ended.TOO_MUCH_OUTPUT: "it wrote too much",
    Ended.KILLED: "its process was ended",
}


class BoxedCalls:
    """The calls of one seat in one episode: their box is opened at the first call, and anew if it has ended."""

    def __init__(
        self, context: ToolContext, *, timeout_s: float, session: bool, first: tuple[str, str] = ("", "")
    ) -> None:
        """`session`: calls share a box, in which `first` runs before them; its second text says what fails if it does.

        Otherwise, each has its own. Raises EpisodeError if the run has no sandbox.
        """
        if context.sandbox is None:
            raise EpisodeError("the tool runs code of a model and needs a sandbox; flexmarl gives it one in a run")
        self._sandbox, self._context = context.sandbox, context
        self._timeout_s, self._session, self._first = timeout_s, session, first
        self._cut = False
        """True if a call was cancelled, so that nobody has read that its session is lost."""
        self._stack = AsyncExitStack()
        self._box: Box | None = None
        self._turn = asyncio.Lock()

    async def run(self, code: str | Sequence[str]) -> BoxOutcome:
        """Runs code or a command for at most `timeout_s`. An episode that ends cancels it."""
        if not self._session:
            async with self._sandbox.open(self._context.files) as box:
                return await box.run(code, timeout_s=self._timeout_s)
        async with self._turn:
            box, self._box = self._box or await self._opened(), None  # A call that is cancelled ends its box.
            try:
                outcome = await box.run(code, timeout_s=self._timeout_s)
            except asyncio.CancelledError:
                self._cut = True
                raise
            if outcome.lost:
                await self._stack.aclose()
            else:
                self._box = box
            return outcome

    async def _opened(self) -> Box:
        box = await self._stack.enter_async_context(self._sandbox.open(self._context.files))
        code, fails = self._first
        if code and not (outcome := await box.run(code, timeout_s=self._timeout_s)).ok:
            raise EpisodeError(f"{fails}: {outcome.stderr or self._reason(outcome)}")
        return box

    def _reason(self, outcome: BoxOutcome) -> str:
        return REASONS[outcome.ended].format(timeout_s=self._timeout_s)

    def observation(self, outcome: BoxOutcome) -> Observation:
        """The outcome, as the agent reads it."""
        parts = [outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n")]
        if outcome.ended is not Ended.EXITED:
            parts.append(self._reason(outcome))
        elif outcome.exit:
            parts.append(f"exit status {outcome.exit}")
        if outcome.dropped_bytes:
            parts.append(f"{outcome.dropped_bytes} bytes of output were not kept")
        if outcome.lost and self._session:
            parts.append(LOST)
        if self._cut:
            parts.append(CUT)
            self._cut = False
        text = "\n".join(filter(None, parts))
        figures = {"ended": str(outcome.ended), "exit": outcome.exit, "cpu_s": outcome.cpu_s, "wall_s": outcome.wall_s}
        return Observation(text or "(no output)", ok=outcome.ok, data=figures)

    async def close(self) -> None:
        """Ends the box."""
        await self._stack.aclose()


class BoundCode:
    """A tool for code that was opened for an episode."""

    def __init__(self, calls: BoxedCalls, argument: str, prefix: Sequence[str] = ()) -> None:
        """`argument`: the name of the argument. `prefix`: the command that takes it; without one, Python does."""
        self._calls, self._argument, self._prefix = calls, argument, prefix

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Runs the code of one call."""
        code = arguments[self._argument]
        if "\0" in code and self._prefix:
            return Observation("a command cannot hold the character 0", ok=False)
        return self._calls.observation(await self._calls.run([*self._prefix, code] if self._prefix else code))


class BoxedTool(Settings):
    """Base of the tools that run code in a box."""

    name: str
    description: str
    max_parallel: int | None = Field(default=None, ge=1)
    """Calls of tools with this name that run at once in the run; others wait. null: no bound."""
    session: bool = True
    """True: the calls of an agent in an episode share a box, with variables and files. False: each has its own."""
    timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Longest call. It is interrupted then; if that does not help, its box is ended, and the agent is told."""
    argument: ClassVar[tuple[str, str]]
    """Name and description of the argument."""
    command: ClassVar[tuple[str, ...]] = ()
    needs_box: ClassVar[bool] = True

    @property
    def keeps_state(self) -> bool:
        """True if later calls depend on earlier ones."""
        return self.session

    @property
    def parameters(self) -> Mapping[str, Any]:
        """One text, the code."""
        name, description = self.argument
        properties = {name: {"type": "string", "description": description}}
        return {"type": "object", "properties": properties, "required": [name]}

    @asynccontextmanager
    async def open(self, context: ToolContext) -> AsyncIterator[BoundCode]:
        """Opens the tool; its box is opened at the first call. The task's files are in it."""
        calls = BoxedCalls(context, timeout_s=self.timeout_s, session=self.session)
        try:
            yield BoundCode(calls, self.argument[0], self.command)
        finally:
            await calls.close()


class PythonTool(BoxedTool):
    """Runs Python in a box. The value of a last expression is printed, as in a notebook."""

    type: Literal["python"] = "python"
    name: str = Field(default="python", min_length=1)
    """Name that agents call it by."""
    description: str = "Runs Python code, and shows what it prints and the value of its last line."
    """Description that a model may be given."""
    argument: ClassVar[tuple[str, str]] = ("code", "The code.")


class ShellTool(BoxedTool):
    """Runs a shell command in a box. With a session, its files stay from call to call."""

    type: Literal["shell"] = "shell"
    name: str = Field(default="shell", min_length=1)
    """Name that agents call it by."""
    description: str = "Runs a shell command, and shows what it prints."
    """Description that a model may be given."""
    argument: ClassVar[tuple[str, str]] = ("command", "The command, for sh.")
    command: ClassVar[tuple[str, ...]] = ("/bin/sh", "-c")
