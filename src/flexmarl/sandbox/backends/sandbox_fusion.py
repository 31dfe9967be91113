"""Boxes on a SandboxFusion server, over HTTP: Python by `/run_jupyter`, commands by `/run_code`.

A server keeps nothing from one request to the next. So a box is kept here:

files      travel with each request, and back
variables  are made again: the calls of a session are played again in a new kernel, before the next one. If one of them
           then ends or prints otherwise than before, the session is said to be lost.

A request changes nothing at the server, so that a failed one can be sent again.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ValidationError

from flexmarl.errors import EpisodeError, MissingExtra, described
from flexmarl.events.safe_json import parse_json
from flexmarl.sandbox import remote_calls as calls
from flexmarl.sandbox.interface import MIB, BoxOutcome, Ended, Limits
from flexmarl.sandbox.remote_calls import KernelReply, ServiceFault
from flexmarl.sandbox.settings import SandboxFusionSettings

try:
    import httpx2
except ImportError as error:
    raise MissingExtra("sandbox_fusion", "sandbox.type sandbox_fusion") from error

SERVER_ADDS_S = 10.0
"""Time that the server gives a kernel above `total_timeout`."""
MOST_ANSWER = 96 * MIB
"""Longest answer that is read. Only what a box printed or wrote makes one longer."""
FILES, PACKED, REPLY = "flexmarl-files.json", "flexmarl-packed.json", "flexmarl-reply.json"
FSIZE_SPARE = 8 * MIB
"""Size that a file may have beyond: the outputs of a call are files too."""
ROOT = "box"
"""The box's working folder in that of a request."""

Workspace = dict[str, tuple[int, bytes]]
"""Files of a box by path: permissions and content."""


class CommandRun(BaseModel):
    """A process of the server."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    stderr: str | None = None


class CellRun(BaseModel):
    """The outputs of a cell."""

    stdout: str
    stderr: str
    display: list[dict[str, Any]]
    error: list[dict[str, Any]]


class FusionAnswer(BaseModel):
    """The answer to either request; other fields are ignored."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: CommandRun | None = None
    driver: CommandRun | None = None
    cells: list[CellRun] = []
    files: dict[str, str] = {}

    def file(self, name: str) -> Any:
        """The JSON in a file that was fetched; None without it, or if it is none."""
        try:
            return parse_json(calls.decoded(self.files[name]))
        except (KeyError, ValueError):
            return None


class TooLong(Exception):
    """An answer was longer than may be read."""


@dataclass(frozen=True, slots=True)
class SandboxFusion:
    """The Sandbox on a SandboxFusion server. It can be pickled: another process has a queue of its own."""

    settings: SandboxFusionSettings

    @asynccontextmanager
    async def open(
        self,
        files: Mapping[str, str | bytes] = {},
        limits: Limits | None = None,
        *,
        relay: Path | None = None,
        reads: Sequence[Path] = (),
    ) -> AsyncIterator["FusionBox"]:
        """Opens a box. Nothing is sent before its first run. See `Sandbox`."""
        if relay is not None or reads:
            raise EpisodeError("boxes of sandbox.type sandbox_fusion reach nothing of this machine; use bubblewrap")
        async with httpx2.AsyncClient(trust_env=False) as client:
            box = FusionBox(Server(self.settings, client), limits or self.settings.limits)
            for name, content in files.items():
                await box.write(name, content.encode() if isinstance(content, str) else content)
            try:
                yield box
            finally:
                box.lost = True


_QUEUES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()


class Server:
    """The server, as one box asks it."""

    def __init__(self, settings: SandboxFusionSettings, client: httpx2.AsyncClient) -> None:
        self.settings, self._client = settings, client
        queues = _QUEUES.setdefault(asyncio.get_running_loop(), {})
        self._queue = queues.setdefault(settings.url, asyncio.Semaphore(settings.concurrency))

    async def ask(self, path: str, body: Mapping[str, Any], within_s: float) -> FusionAnswer:
        """The answer to a request, which waits for its turn. Raises EpisodeError after all attempts, or TooLong."""
        url, cells = f"{self.settings.url.rstrip('/')}{path}", len(body.get("cells", ()))

        async def attempt() -> FusionAnswer:
            async with self._queue:
                try:
                    async with asyncio.timeout(within_s):
                        return _answer(await self._sent(url, body), cells)
                except TimeoutError:
                    raise ServiceFault(f"no answer in {within_s:g} s") from None
                except httpx2.HTTPError as error:
                    raise ServiceFault(described(error)) from None

        return await calls.attempted(attempt, self.settings.retries, f"a request to {url}")

    async def _sent(self, url: str, body: Mapping[str, Any]) -> bytes:
        timeout, data = httpx2.Timeout(None, connect=10.0), bytearray()
        async with self._client.stream("POST", url, json=body, timeout=timeout) as response:
            async for part in response.aiter_bytes():
                data += part
                if len(data) > MOST_ANSWER:
                    raise TooLong
        if response.status_code != httpx2.codes.OK:
            raise ServiceFault(f"status {response.status_code}: {data[:200].decode(errors='replace')}")
        return bytes(data)


def _answer(data: bytes, cells: int) -> FusionAnswer:
    """The answer in a body. Raises ServiceFault for any other, and for an error of the server.

    `cells`: how many were asked for.
    """
    try:
        answer = FusionAnswer.model_validate(parse_json(data))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ServiceFault(f"no answer of SandboxFusion: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    except ValueError:
        raise ServiceFault(f"no JSON: {data[:100].decode(errors='replace')!r}") from None
    if answer.status == "SandboxError":
        raise ServiceFault(f"SandboxError: {answer.message[:200]}")
    ran = answer.run_result or answer.driver
    if ran is None:
        raise ServiceFault("an answer without run_result and driver")
    if ran.status == "Error":
        raise ServiceFault(f"an error of its process: {(ran.stderr or '')[:200]}")
    if answer.status == "Success" and len(answer.cells) != cells:
        raise ServiceFault(f"{len(answer.cells)} cells for {cells}")
    return answer


class FusionBox:
    """A Box on a server that keeps nothing."""

    def __init__(self, server: Server, limits: Limits) -> None:
        self._server, self._limits = server, limits
        self._base: Workspace = {}
        """Files when the session began."""
        self._files: Workspace = {}
        """Files now."""
        self._log: list[tuple[Mapping[str, Any], KernelReply | None]] = []
        """Requests of the session so far, with their replies; None for a file that was changed from here."""
        self._spent_s = 0.0
        self._turn = asyncio.Lock()
        self.lost = False

    async def run(self, code: str | Sequence[str], *, stdin: str = "", timeout_s: float = 10.0) -> BoxOutcome:
        """See `Box`."""
        async with self._turn:
            if self.lost:
                return BoxOutcome(ended=Ended.KILLED, lost=True)
            began = asyncio.get_running_loop().time()
            request = calls.run_request(code, stdin, timeout_s)
            try:
                if isinstance(code, str):
                    outcome = await self._in_session(request, timeout_s)
                else:
                    outcome = await self._command(request, timeout_s)
            except TooLong:
                outcome = BoxOutcome(ended=Ended.TOO_MUCH_OUTPUT, lost=True)
            except BaseException:
                self.lost = True
                raise
            self.lost = outcome.lost
            return replace(outcome, wall_s=asyncio.get_running_loop().time() - began)

    async def write(self, path: str, data: bytes) -> None:
        """See `Box`."""
        async with self._turn:
            try:
                name = calls.plain_path(path)
            except ValueError as error:
                raise EpisodeError(f"the sandbox cannot write {path!r}: {error}") from None
            files = {**self._files, name: (0o644, data)}
            most = self._limits.disk_bytes
            if self.lost or sum(len(content) for _, content in files.values()) > most:
                why = "the box has ended" if self.lost else f"its files may have {most} bytes"
                raise EpisodeError(f"the sandbox cannot write {path!r}: {why}")
            self._changed(files)

    async def read(self, path: str) -> bytes:
        """See `Box`."""
        if self.lost:
            raise EpisodeError("the box has ended")
        try:
            return self._files[calls.plain_path(path)][1]
        except (KeyError, ValueError):
            raise FileNotFoundError(f"{path!r}: there is no such file in the box") from None

    async def _in_session(self, request: Mapping[str, Any], timeout_s: float) -> BoxOutcome:
        """Runs code in a new kernel, after all that ran before it."""
        nonces = [calls.new_nonce() for _ in range(len(self._log) + 1)]
        replayed = [calls.call_cell(nonce, before) for nonce, (before, _) in zip(nonces[:-1], self._log, strict=True)]
        # Paths start from the box's folder.
        cell = calls.call_cell(nonces[-1], request, f"../{PACKED}", self._limits.disk_bytes)
        total_s = self._spent_s + timeout_s + self._server.settings.patience_s
        body = {
            "cells": [self._boot(), *replayed, cell],
            "cell_timeout": total_s,
            "total_timeout": total_s,
            "kernel": "python3",
            "files": _sent_files(self._base),
            "fetch_files": [PACKED],
        }
        began = asyncio.get_running_loop().time()
        within_s = total_s + SERVER_ADDS_S + self._server.settings.patience_s
        answer = await self._server.ask("/run_jupyter", body, within_s)
        if (ended := _abrupt(answer, answer.driver)) is not None:
            return BoxOutcome(ended=ended, lost=True)
        if answer.cells[0].error:
            raise EpisodeError(f"the sandbox server cannot begin a session: {_said(answer.cells[0], self._limits)}")
        replies = [_reply(cell, nonce) for cell, nonce in zip(answer.cells[1:], nonces, strict=True)]
        for now, (_, then) in zip(replies, self._log, strict=False):
            if now is None or (then is not None and _differs(now, then)):
                said = "the session cannot be made again: an earlier call gave another result this time\n"
                return BoxOutcome(ended=Ended.KILLED, stderr=said, lost=True)
        if (reply := replies[-1]) is None:
            return BoxOutcome(ended=Ended.KILLED, stderr=_said(answer.cells[-1], self._limits), lost=True)
        self._spent_s += asyncio.get_running_loop().time() - began
        self._log.append((request, reply))
        return self._outcome(reply, answer, session=True)

    async def _command(self, request: Mapping[str, Any], timeout_s: float) -> BoxOutcome:
        """Runs a command on the files as they are."""
        nonce = calls.new_nonce()
        cell = calls.call_cell(nonce, request, f"../{PACKED}", self._limits.disk_bytes)
        body = {
            "language": "python",
            "code": f"{self._boot()}\nreply = repr({cell})\nopen('../{REPLY}', 'w').write(reply)\n",
            "run_timeout": timeout_s + self._server.settings.patience_s,
            "files": _sent_files(self._files),
            "fetch_files": [PACKED, REPLY],
        }
        answer = await self._server.ask("/run_code", body, timeout_s + 2 * self._server.settings.patience_s)
        found = answer.file(REPLY)
        reply = calls.reply_of(json.dumps(found), nonce) if found is not None else None
        if reply is None and answer.run_result and "Traceback" in (said := answer.run_result.stderr or ""):
            raise EpisodeError(f"the sandbox server cannot run a command: {said[-calls.SHOWN :]}")
        if reply is None:
            return BoxOutcome(ended=_abrupt(answer, answer.run_result) or Ended.KILLED, lost=True)
        return self._outcome(reply, answer, session=False)

    def _boot(self) -> str:
        held = {
            "RLIMIT_CPU": self._limits.cpu_s,
            # Files are packed into one, in base64.
            "RLIMIT_FSIZE": 2 * self._limits.disk_bytes + FSIZE_SPARE,
            "RLIMIT_CORE": 0,
            "RLIMIT_DATA": self._limits.memory_bytes,
        }
        return calls.boot_cell(ROOT, held, self._limits.output_bytes, FILES)

    def _outcome(self, reply: KernelReply, answer: FusionAnswer, *, session: bool) -> BoxOutcome:
        """The outcome of a run, after which the files are those that came back."""
        files = _workspace(answer.file(PACKED))
        # What ran until its time cannot be played again.
        lost = files is None or reply.interrupted or (session and reply.ended is Ended.TIMED_OUT)
        outcome = calls.outcome_of(reply, self._limits, 0.0, lost=lost)
        if files is None:
            said = f"{outcome.stderr}the files of the box are more than {self._limits.disk_bytes} bytes, or are gone\n"
            return replace(outcome, ended=Ended.KILLED, exit=None, stderr=said)
        if session:
            self._files = files
        else:
            self._changed(files)
        return outcome

    def _changed(self, files: Workspace) -> None:
        """Takes over files that no code of the session made: a session that is played again needs them in its order."""
        if not self._log:
            self._base = files
        else:
            for name in self._files.keys() - files.keys():
                self._log.append(({"kind": "code", "code": f"__import__('os').unlink({name!r})", "timeout_s": 5}, None))
            for name, (_, data) in files.items():
                if self._files.get(name) != files[name]:
                    encoded = calls.encoded(data)
                    self._log.append(({"kind": "write", "path": name, "data": encoded}, None))
        self._files = files


def _abrupt(answer: FusionAnswer, ran: CommandRun | None) -> Ended | None:
    """The way in which the process of a request ended, if it did not end by itself."""
    if ran is not None and ran.status == "TimeLimitExceeded":
        return Ended.TIMED_OUT
    return Ended.KILLED if answer.status == "Failed" else None


def _reply(cell: CellRun, nonce: str) -> KernelReply | None:
    """The reply among what a cell showed."""
    shown = [str(one.get("text/plain", "")) for one in cell.display]
    return next((reply for text in reversed(shown) if (reply := calls.reply_of(text, nonce))), None)


def _differs(now: KernelReply, then: KernelReply) -> bool:
    """True if a call that was played again gave another result."""
    return (now.ended, now.exit, now.text("stdout")) != (then.ended, then.exit, then.text("stdout"))


def _said(cell: CellRun, limits: Limits) -> str:
    """The errors of a cell that gave no reply."""
    named = "\n".join(f"{error.get('ename')}: {error.get('evalue')}" for error in cell.error)
    return f"{cell.stderr}{named}"[: limits.output_bytes]


def _sent_files(files: Workspace) -> dict[str, str]:
    """Files as a request takes them: packed into one, in base64."""
    packed = {name: [mode, calls.encoded(data)] for name, (mode, data) in files.items()}
    return {FILES: calls.encoded(json.dumps(packed).encode())}


def _workspace(found: Any) -> Workspace | None:
    """The files that came back; None if they were too many, or are no files."""
    try:
        return {
            calls.plain_path(name): (int(mode) & 0o777, calls.decoded(data)) for name, (mode, data) in found.items()
        }
    except (AttributeError, TypeError, ValueError):
        return None
