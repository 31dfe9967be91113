"""Runs the process for programs: one for all episodes, started with the first, and anew when it has died.

consumes     plays: the name of a program, a task and the addresses of seats
waits for    the process to answer
produces     the program's answer, or an EpisodeError with what it raised
unblocked by the answer; the death of the process, which fails the plays under way; the end of the block
"""

import asyncio
import itertools
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import EpisodeError

MOST_BYTES = 64 * 2**20
"""Longest answer of a program, as JSON."""
CLOSES_S = 2.0
"""Seconds that the process has to end once its input is closed."""


class ProgramHost:
    """The plays under way, and the process that runs them."""

    def __init__(self, code: Sequence[Path]) -> None:
        """`code`: files in which programs are registered."""
        self._code = tuple(code)
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._process: Process | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Runs programs for the length of a block."""
        try:
            async with task_block() as self._tasks:
                try:
                    yield self
                finally:
                    await self._end()
        finally:
            self._fail("the run has ended")

    async def play(self, program: str, payload: Mapping[str, Any]) -> Any:
        """Runs a registered program. Raises EpisodeError if it raises, or its process dies."""
        try:
            line = json.dumps({"program": program, "task": payload["task"], "seats": payload["seats"]})
        except (TypeError, ValueError) as error:
            raise EpisodeError(f"Task.data cannot be sent to a program, which gets JSON: {error}") from None
        process, number = await self._started(), next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._write(process, f'{{"play": {number}, "what": {line}}}')
            return await answer
        finally:
            del self._answers[number]
            if not answer.done() or answer.cancelled():
                self._write(process, f'{{"leave": {number}}}')

    async def _started(self) -> Process:
        async with self._starting:
            if self._process is None:
                module = "flexmarl.gateway.runners.program_process"
                files = [str(path.absolute()) for path in self._code]
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", module, *files, stdin=PIPE, stdout=PIPE, limit=MOST_BYTES
                )
                assert self._tasks is not None, "programs are played while the host is open"
                self._tasks.create_task(self._listen(self._process), name="gateway/programs")
            return self._process

    async def _listen(self, process: Process) -> None:
        """Reads answers until the process ends."""
        assert process.stdout is not None, "it was started with a pipe"
        try:
            while line := await process.stdout.readline():
                heard = json.loads(line)
                answer = self._answers.get(heard["play"])
                if answer is None or answer.done():
                    continue
                if "error" in heard:
                    answer.set_exception(EpisodeError(heard["error"]))
                else:
                    answer.set_result(heard["answer"])
        except ValueError:
            process.kill()
        code = await process.wait()
        if self._process is process:
            self._process = None
        self._fail(f"the process for programs ended with exit code {code}; see its messages on stderr")

    def _write(self, process: Process, line: str) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(line.encode() + b"\n")

    def _fail(self, because: str) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EpisodeError(because))

    async def _end(self) -> None:
        if (process := self._process) is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSES_S):
                await process.wait()
                return
        process.kill()
