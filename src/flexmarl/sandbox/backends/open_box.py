"""The host's side of one open box: its process, the channel to its driver, its outputs, its end."""

import asyncio
import base64
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from typing import Any

from flexmarl.errors import EpisodeError
from flexmarl.sandbox.backends.cgroups import BoxGroup
from flexmarl.sandbox.driver import MOST_FRAME
from flexmarl.sandbox.interface import BoxOutcome, Ended

GRACE_S = 1.0
"""Time in which a call that is over its time must end when it is interrupted; then its box is killed."""
MOST_ANSWER = 2**15
"""Bytes of a reply that holds no file: an error quotes a path, whose characters JSON may spell with six bytes."""
MOST_FORGED = 64 * 2**20
"""Bytes of frames with a wrong nonce that are passed over in one call. A box that sends more is killed."""
PIPE_BYTES = 65536
"""Bytes that a pipe holds."""


class BoxLost(Exception):
    """The box has ended, or must be."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended)
        self.ended = ended


class Output:
    """One output of a box: a pipe that is read while something runs, of which each run keeps at most so many bytes."""

    def __init__(self, most: int, ours: AsyncExitStack, theirs: ExitStack) -> None:
        """Makes the pipe; its ends are closed with their stacks."""
        self._most, self._kept, self._dropped = most, bytearray(), 0
        self.ours, self.theirs = os.pipe()
        ours.callback(self.close)
        theirs.callback(os.close, self.theirs)
        os.set_blocking(self.ours, False)

    def drain(self) -> None:
        """Takes what the pipe holds. One that is filled all the time is read at most twice its size."""
        for _ in range(2):
            try:
                data = os.read(self.ours, PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self.ours)
                return
            room = max(0, self._most - len(self._kept))
            self._kept += data[:room]
            self._dropped += len(data[room:])

    @contextmanager
    def read(self) -> Iterator[None]:
        """A block in which it is read. Outside, what a run has left behind fills the pipe, and waits."""
        asyncio.get_running_loop().add_reader(self.ours, self.drain)
        try:
            yield
        finally:
            asyncio.get_running_loop().remove_reader(self.ours)

    def taken(self) -> tuple[str, int]:
        """The text since the last call, and how many bytes of it were dropped."""
        text, dropped = self._kept.decode("utf-8", "backslashreplace"), self._dropped
        self._kept, self._dropped = bytearray(), 0
        return text, dropped

    def close(self) -> None:
        """Closes our end."""
        os.close(self.ours)


class OpenBox:
    """A Box on a process that has started."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: socket.socket,
        outputs: tuple[Output, Output],
        group: BoxGroup | None,
    ) -> None:
        """`outputs`: stdout and stderr, which the box closes. `group`: its control group, which it removes."""
        self._process, self._channel, self._group = process, channel, group
        self._out, self._err = outputs
        self._turn = asyncio.Lock()
        self._lost = False
        self._kills = 0

    async def begin(self, limits: Mapping[str, int], within_s: float) -> None:
        """Waits for the driver, and sets the limits of its processes. Raises EpisodeError if it does not start."""
        try:
            await self._ask({"kind": "limits", "limits": limits}, within_s)
        except BoxLost:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()
            self._err.drain()
            said = self._err.taken()[0].strip() or f"exit status {self._process.returncode}"
            raise EpisodeError(f"the sandbox cannot start a box: {said[:500]}") from None

    async def run(self, code: str | Sequence[str], *, stdin: str = "", timeout_s: float = 10.0) -> BoxOutcome:
        """See `Box`."""
        kind: dict[str, Any] = {"kind": "code", "code": code}
        if not isinstance(code, str):
            kind = {"kind": "command", "argv": list(code), "stdin": stdin}
        async with self._turn:
            clock = asyncio.get_running_loop().time
            began, kills, before = clock(), self._out_of_memory(), self._cpu_s()
            try:
                with self._out.read(), self._err.read():
                    reply = await self._ask({**kind, "timeout_s": timeout_s}, timeout_s + GRACE_S)
                ended, status = _ending(reply)
            except BoxLost as lost:
                ended, status = lost.ended, None
                await self.kill()
            self._out.drain()  # All that was printed before the reply is in the pipes.
            self._err.drain()
            if self._out_of_memory() > kills:
                ended = Ended.OUT_OF_MEMORY
            out, err = self._out.taken(), self._err.taken()
            return BoxOutcome(
                ended=ended,
                exit=status,
                stdout=out[0],
                stderr=err[0],
                cpu_s=max(0.0, self._cpu_s() - before),
                wall_s=clock() - began,
                peak_bytes=self._group.peak_bytes() if self._group else 0,
                dropped_bytes=out[1] + err[1],
                lost=self._lost,
            )

    async def write(self, path: str, data: bytes) -> None:
        """See `Box`."""
        reply = await self._file({"kind": "write", "path": path, "data": base64.b64encode(data).decode()})
        if "error" in reply:
            raise EpisodeError(f"the sandbox cannot write {path!r}: {reply['error']}")

    async def read(self, path: str) -> bytes:
        """See `Box`."""
        reply = await self._file({"kind": "read", "path": path})
        try:
            return base64.b64decode(reply["data"], validate=True)
        except (KeyError, TypeError, ValueError):
            raise FileNotFoundError(f"{path!r}: {str(reply.get('error', 'the box gave no file'))[:200]}") from None

    async def _file(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        async with self._turn:
            try:
                return await self._ask(request, 10.0)
            except BoxLost as lost:
                await self.kill()
                raise EpisodeError(f"the box has ended: {lost.ended}") from None

    async def _ask(self, request: Mapping[str, Any], within_s: float) -> Mapping[str, Any]:
        """Sends a request, and returns the reply with its nonce. Raises BoxLost; kills the box if it is cancelled."""
        if self._lost:
            raise BoxLost(Ended.KILLED)
        nonce = secrets.token_hex(16)
        frame = json.dumps({**request, "nonce": nonce}).encode()
        if len(frame) > MOST_FRAME:
            raise EpisodeError(f"the sandbox takes at most {MOST_FRAME} bytes at once, got {len(frame)}")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(within_s):
                await loop.sock_sendall(self._channel, struct.pack("!I", len(frame)) + frame)
                return await self._reply(nonce, MOST_FRAME if request["kind"] == "read" else MOST_ANSWER)
        except TimeoutError:
            raise BoxLost(Ended.TIMED_OUT) from None
        except OSError:
            raise BoxLost(Ended.KILLED) from None
        except asyncio.CancelledError:
            await asyncio.shield(self.kill())
            raise

    async def _reply(self, nonce: str, most: int) -> Mapping[str, Any]:
        """The reply of at most so many bytes. To read what else the box has written would take memory and time."""
        forged = 0
        while forged <= MOST_FORGED:
            size = struct.unpack("!I", await self._received(4))[0]
            if size > MOST_FRAME:
                break
            frame = await self._received(size)
            with suppress(ValueError, RecursionError):
                reply = json.loads(frame) if size <= most and nonce.encode() in frame else None
                if isinstance(reply, dict) and reply.get("nonce") == nonce:
                    return reply
            forged += size + 4
        raise BoxLost(Ended.TOO_MUCH_OUTPUT)

    async def _received(self, size: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), []
        while size:
            part = await loop.sock_recv(self._channel, min(size, 2**20))
            if not part:
                raise BoxLost(Ended.KILLED)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _out_of_memory(self) -> int:
        if self._group is not None and not self._lost:
            self._kills = self._group.out_of_memory()
        return self._kills

    def _cpu_s(self) -> float:
        """Processor seconds of the box so far."""
        return self._group.cpu_s() if self._group else 0.0

    async def kill(self) -> None:
        """Ends all processes of the box. Its group stays until `end`, so that what it used can still be read."""
        if self._group is not None:
            self._kills = self._group.out_of_memory()
        self._lost = True
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        """Ends the box, and removes all of it."""
        await self.kill()
        for one in (self._channel, self._out, self._err):
            one.close()
        if self._group is not None:
            await self._group.remove()


def _ending(reply: Mapping[str, Any]) -> tuple[Ended, int | None]:
    """The end that a reply names. The code in the box may have written it: anything is possible."""
    status = reply.get("exit")
    status = status if isinstance(status, int) and abs(status) < 2**31 else None
    if reply.get("ended") == Ended.TIMED_OUT:
        return Ended.TIMED_OUT, None
    return Ended.EXITED, status if status is not None else 1
