"""Runs episodes as commands in boxes: an agent of the command line, one process tree for each episode.

    box: argv in /box with the task's files ──► 127.0.0.1:RELAY_PORT ──► box_relay.py ──► Unix socket ──► seats

The box has no other way out, and all that runs in it ends with it. The socket serves seats alone, neither rewards nor
accounts.

consumes     plays: the settings of a command, a task and the addresses of seats
waits for    a box; the command, up to `deadline_s`
produces     the answer: what it printed, or a file; its outputs, in the run's folder; or an EpisodeError that says how
             it ended
unblocked by the end of the command, its time limit; a play that is cancelled ends its box
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flexmarl.agents.black_box import Command
from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.events.safe_json import MASK, masked
from flexmarl.gateway.runners import box_relay
from flexmarl.sandbox.interface import Box, BoxOutcome, Ended, Sandbox

RELAY_PORT = 17117
"""Port in the box at which the gateway is reached."""
START_S = 15.0
"""Seconds in which the relay of a box must listen."""
SHOWN = 300
"""Last characters of stderr that the error of a failed command shows."""


class CommandHost:
    """Runs commands in boxes of a sandbox."""

    def __init__(self, sandbox: Sandbox, socket: Path, *, base: Path, outputs: Path | None) -> None:
        """`socket`: the gateway's Unix socket. `base`: folder that relative paths of settings start from.

        `outputs`: folder for what the commands print; None: it is not kept.
        """
        self._sandbox, self._socket, self._base, self._outputs = sandbox, socket, base, outputs

    async def check(self, command: Command) -> None:
        """Opens a box as those of the episodes. Raises ConfigError if that is impossible."""
        try:
            async with self._sandbox.open({}, relay=self._socket, reads=self._reads(command)) as box:
                await _relayed(box, {})
        except EpisodeError as error:
            raise ConfigError(
                f"team.workflow: no box for its command: {error}; paths of team.workflow.reads "
                f"({', '.join(map(str, command.reads)) or 'none'}) must be readable for every user"
            ) from error

    async def play(self, command: Command, payload: Mapping[str, Any]) -> str:
        """Plays one episode; returns the answer. Raises EpisodeError."""
        task, seats = payload["task"], payload["seats"]
        names = {**_placeholders(task["prompt"], seats), "base": str(self._base)}
        files = task["data"].get("files", {})
        if not isinstance(files, Mapping):
            raise EpisodeError(f"Task.data['files'] must map names to texts, got {type(files).__name__}")
        async with self._sandbox.open(files, relay=self._socket, reads=self._reads(command)) as box:
            await _relayed(box, {**_environment(names), **command.filled_env(names)})
            outcome = await box.run(command.filled_argv(names), timeout_s=command.deadline_s)
            self._keep(command, str(payload["episode"]), outcome, names["key"])
            _check(command, outcome)
            if not command.answer:
                return outcome.stdout.strip()
            try:
                return (await box.read(command.answer)).decode(errors="replace").strip()
            except FileNotFoundError as error:
                raise EpisodeError(f"{_named(command)} left no answer in team.workflow.answer: {error}") from None

    def _reads(self, command: Command) -> list[Path]:
        return [(self._base / path.expanduser()).resolve() for path in command.reads]

    def _keep(self, command: Command, episode: str, outcome: BoxOutcome, key: str) -> None:
        """Writes what the command printed, without its key."""
        if self._outputs is None or not command.output_kib:
            return
        self._outputs.mkdir(exist_ok=True)
        for name, text in (("out", outcome.stdout), ("err", outcome.stderr)):
            kept = masked(text.replace(key, MASK)).encode()[: command.output_kib * 1024]
            (self._outputs / f"{episode}.{name}").write_bytes(kept)


async def _relayed(box: Box, environment: Mapping[str, str]) -> None:
    """Starts the relay in a box. Raises EpisodeError if it does not listen."""
    code = f"{inspect.getsource(box_relay)}\nbegin({RELAY_PORT}, {dict(environment)!r})\n"
    if not (began := await box.run(code, timeout_s=START_S)).ok:
        raise EpisodeError(f"the relay in the box does not start: {began.stderr[-SHOWN:] or began.ended}")


def _placeholders(prompt: str, seats: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The values of a command's placeholders. One URL serves all seats: the model's name chooses the seat."""
    first = next(iter(seats.values()))
    path = urlsplit(first["anthropic_url"]).path.rpartition("/")[0]
    url = f"http://127.0.0.1:{RELAY_PORT}{path}"
    return {
        "openai_url": f"{url}/v1",
        "anthropic_url": url,
        "key": first["key"],
        "model": first["model"],
        "prompt": prompt,
    }


def _environment(names: Mapping[str, str]) -> dict[str, str]:
    """The variables that clients of both APIs read."""
    return {
        "OPENAI_BASE_URL": names["openai_url"],
        "OPENAI_API_KEY": names["key"],
        "ANTHROPIC_BASE_URL": names["anthropic_url"],
        "ANTHROPIC_API_KEY": names["key"],
    }


def _named(command: Command) -> str:
    return f"command {command.argv[0]!r}"


def _check(command: Command, outcome: BoxOutcome) -> None:
    """Raises EpisodeError unless the command ended as it should."""
    if outcome.ended is Ended.TIMED_OUT:
        raise EpisodeError(f"{_named(command)} took longer than team.workflow.deadline_s={command.deadline_s:g}")
    if outcome.ended is Ended.OUT_OF_MEMORY:
        raise EpisodeError(f"{_named(command)} took more memory than sandbox.memory_mib")
    if outcome.ended is not Ended.EXITED:
        raise EpisodeError(f"{_named(command)} ended its box: {outcome.ended}")
    if outcome.exit not in command.ok_exits:
        said = outcome.stderr.strip()[-SHOWN:]
        raise EpisodeError(f"{_named(command)} ended with exit status {outcome.exit}{f': {said}' if said else ''}")
