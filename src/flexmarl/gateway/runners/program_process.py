"""Runs registered programs in a process of their own: `python -m flexmarl.gateway.runners.program_process FILE...`.

consumes     a line of JSON on its input for each play: {"play": 3, "what": {"program": ..., "task": ..., "seats": ...}}
waits for    the programs, all on one event loop
produces     a line on its output for each: {"play": 3, "answer": ...} or {"play": 3, "error": "..."}
unblocked by the end of its input, at which it exits, whatever the programs do
"""

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from flexmarl.agents.black_box import PROGRAMS, ProgramTask
from flexmarl.agents.doors import SeatAddress
from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import described, place_of
from flexmarl.plugins import load_code


class Plays:
    """The plays under way."""

    def __init__(self, tasks: asyncio.TaskGroup, out: TextIO) -> None:
        self._tasks, self._out = tasks, out
        self._playing: dict[int, asyncio.Task[None]] = {}

    def hear(self, line: str) -> None:
        """Begins or ends a play."""
        heard = json.loads(line)
        if "leave" in heard:
            if playing := self._playing.get(heard["leave"]):
                playing.cancel()
            return
        number = heard["play"]
        playing = self._playing[number] = self._tasks.create_task(self._play(number, heard["what"]))
        playing.add_done_callback(lambda _: self._playing.pop(number, None))

    async def _play(self, number: int, what: dict[str, Any]) -> None:
        name = what["program"]
        try:
            task = ProgramTask(**{**what["task"], "opening": tuple(what["task"]["opening"])})
            seats = {seat: SeatAddress(**at) for seat, at in what["seats"].items()}
            said = json.dumps({"play": number, "answer": await PROGRAMS[name](task, seats)}, allow_nan=False)
        except BaseException as error:  # Whatever a program raises is the failure of its episode; here it ends nothing.
            if isinstance(error, asyncio.CancelledError) and (own := asyncio.current_task()) and own.cancelling():
                raise
            place = place_of(error)
            text = f"program {name!r}: {described(error)}{f' ({place})' if place else ''}"
            said = json.dumps({"play": number, "error": text})
        self._out.write(said + "\n")
        self._out.flush()


async def serve(out: TextIO) -> None:
    """Plays until the process is ended."""
    loop, for_ever = asyncio.get_running_loop(), asyncio.Event()
    async with task_block() as tasks:
        plays = Plays(tasks, out)

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(plays.hear, line)
            os._exit(0)  # The run has ended; a program that blocks the loop must not outlive it.

        threading.Thread(target=read, daemon=True).start()
        await for_ever.wait()


def main() -> None:
    """Imports the files of programs, and plays."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What programs print is no answer.
    for file in sys.argv[1:]:
        load_code(Path(file))
    asyncio.run(serve(out))


if __name__ == "__main__":
    main()
