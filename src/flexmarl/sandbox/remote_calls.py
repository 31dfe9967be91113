"""The host's side of boxes in kernels of a service: the cells that it runs, their replies, and what is tried again.

    boot_cell ──► the programs driver.py and remote_driver.py are in the kernel, with the limits of its processes
    call_cell ──► one request of a box; the value of the cell is its reply

A service may fail: no connection, a status, no JSON, half a stream, no answer in time. Each is a `ServiceFault`, after
which `attempted` tries again; then it is an EpisodeError. None is an outcome, which is of the code in the box alone.
"""

import asyncio
import base64
import inspect
import json
import posixpath
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flexmarl.errors import EpisodeError
from flexmarl.events.safe_json import masked, parse_json
from flexmarl.sandbox import driver, remote_driver
from flexmarl.sandbox.interface import BoxOutcome, Ended, Limits

T = TypeVar("T")
FIRST_WAIT_S = 0.25
"""Time before the first new attempt; it doubles from one to the next."""
SHOWN = 300
"""Characters of a fault that an error shows."""
BOX_MODULE = "flexmarl_box"
"""Name under which a kernel has the program of its box."""


class ServiceFault(Exception):
    """The service failed at one attempt; no code of the box is to blame."""


@dataclass(frozen=True, slots=True)
class KernelReply:
    """The reply to a request, as the program in the kernel gave it. The code of the box may have written it."""

    fields: Mapping[str, Any]

    @property
    def ended(self) -> Ended:
        """Ended by itself, or at its time."""
        return Ended.TIMED_OUT if self.fields.get("ended") == Ended.TIMED_OUT else Ended.EXITED

    @property
    def exit(self) -> int | None:
        """Exit status; 1 if it is none."""
        status = self.fields.get("exit")
        if self.ended is Ended.TIMED_OUT:
            return None
        return status if isinstance(status, int) and abs(status) < 2**31 else 1

    @property
    def interrupted(self) -> bool:
        """True if the service interrupted it."""
        return self.fields.get("interrupted") is True

    @property
    def error(self) -> str | None:
        """The reason why a file could not be read or written."""
        error = self.fields.get("error")
        return None if error is None else str(error)[:SHOWN]

    def text(self, name: str) -> str:
        """An output, by its name."""
        found = self.fields.get(name)
        return found if isinstance(found, str) else ""

    @property
    def dropped(self) -> int:
        """Bytes that the program in the kernel did not keep."""
        found = self.fields.get("dropped")
        return found if isinstance(found, int) and 0 <= found < 2**62 else 0


def new_nonce() -> str:
    """A nonce that no code can guess before it runs."""
    return secrets.token_hex(8)


def boot_cell(root: str, limits: Mapping[str, int], output_bytes: int, files: str = "") -> str:
    """The cell that makes a kernel the box of a session. Running it again changes nothing."""
    sources = inspect.getsource(driver), inspect.getsource(remote_driver)
    return f"""def _flexmarl_boot():
    import sys, types
    if {BOX_MODULE!r} in sys.modules:
        return
    driver, box = types.ModuleType("flexmarl_driver"), types.ModuleType({BOX_MODULE!r})
    for module, source in zip((driver, box), {sources!r}):
        exec(compile(source, module.__name__, "exec"), module.__dict__)
    box.kernel = box.Kernel(driver, {root!r}, {dict(limits)!r}, {output_bytes}, {files!r})
    sys.modules[{BOX_MODULE!r}] = box
_flexmarl_boot()
"""


def call_cell(nonce: str, request: Mapping[str, Any], pack: str = "", most: int = 0) -> str:
    """The cell of one request. `pack`: file into which the files of the box are packed after it."""
    return f"__import__({BOX_MODULE!r}).kernel.answer({nonce!r}, {json.dumps(request)!r}, {pack!r}, {most})"


def run_request(code: str | Sequence[str], stdin: str, timeout_s: float) -> dict[str, Any]:
    """The request for a run of code or of a command, as driver.py takes it."""
    if isinstance(code, str):
        return {"kind": "code", "code": code, "timeout_s": timeout_s}
    return {"kind": "command", "argv": list(code), "stdin": stdin, "timeout_s": timeout_s}


def reply_of(shown: str, nonce: str) -> KernelReply | None:
    """The reply in the value of a cell; None if it is that of no request with this nonce."""
    try:
        fields = parse_json(shown)
    except ValueError:
        return None
    return KernelReply(fields) if isinstance(fields, dict) and fields.get("nonce") == nonce else None


def outcome_of(reply: KernelReply, limits: Limits, wall_s: float, *, lost: bool = False) -> BoxOutcome:
    """The outcome of a run that was answered. No more output is kept than may be, whatever the reply holds."""
    texts, dropped = [], reply.dropped
    for name in ("stdout", "stderr"):
        data = reply.text(name).encode("utf-8", "backslashreplace")
        texts.append(data[: limits.output_bytes].decode("utf-8", "backslashreplace"))
        dropped += max(0, len(data) - limits.output_bytes)
    return BoxOutcome(
        ended=reply.ended,
        exit=reply.exit,
        stdout=texts[0],
        stderr=texts[1],
        wall_s=wall_s,
        dropped_bytes=dropped,
        lost=lost,
    )


def plain_path(path: str) -> str:
    """The path below the box's root, without `.` and `..`. Raises ValueError if it is not below it."""
    full = posixpath.normpath(posixpath.join(driver.ROOT, path))
    if not full.startswith(f"{driver.ROOT}/") or "\0" in full:
        raise ValueError(f"{path!r} is not below {driver.ROOT}")
    return full.removeprefix(f"{driver.ROOT}/")


def encoded(data: bytes) -> str:
    """Bytes as a request or a reply has them."""
    return base64.b64encode(data).decode()


def decoded(data: str) -> bytes:
    """The bytes of `encoded`. Raises TypeError or ValueError if it is none."""
    return base64.b64decode(data, validate=True)


async def attempted(attempt: Callable[[], Awaitable[T]], retries: int, what: str) -> T:
    """The result of the first attempt without a ServiceFault. Raises EpisodeError after `retries` more."""
    for number in range(retries + 1):
        try:
            return await attempt()
        except ServiceFault as fault:
            if number == retries:
                said = masked(str(fault))[:SHOWN]
                raise EpisodeError(f"{what} failed at attempt {number + 1} of {retries + 1}: {said}") from None
        await asyncio.sleep(FIRST_WAIT_S * 2**number)
    raise AssertionError("the last attempt returned or raised")
