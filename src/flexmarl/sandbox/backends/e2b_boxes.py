"""Boxes in microVMs of E2B, by E2B's own client: a sandbox for each box, a context of it as the session.

    create ──► a record for `flexmarl clean` ──► context ──► boot_cell ──► one cell for each request ──► kill

A request that failed is sent again. It has a nonce, by which the kernel runs it once and keeps its reply, so that one
whose answer got lost is answered after all. No answer in time has two causes:

the code    it began, which the kernel prints, and the sandbox still answers: the call is over its time
the service anything else: the episode fails
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexmarl.errors import ConfigError, EpisodeError, MissingExtra, described
from flexmarl.events.safe_json import MASK, masked
from flexmarl.sandbox import remote_calls as calls
from flexmarl.sandbox.driver import MOST_FRAME
from flexmarl.sandbox.interface import MIB, BoxOutcome, Ended, Limits
from flexmarl.sandbox.leased_sandboxes import LeasedSandbox
from flexmarl.sandbox.remote_calls import KernelReply, ServiceFault
from flexmarl.sandbox.settings import E2bSettings

try:
    from e2b import AuthenticationException  # pyright: ignore[reportMissingImports]
    from e2b_code_interpreter import AsyncSandbox  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingExtra("e2b", "sandbox.type e2b") from error

ROOT = "~/box"
"""The box's working folder."""
FILE_S = 20.0
"""Longest reading or writing of a file."""
MOST_STREAMED = 64 * MIB
"""Bytes that a call may print past the program in its kernel."""
RESTARTED = ("ContextRestarting", "ModuleNotFoundError")
"""Errors after which the kernel, or the session in it, is a new one."""
BROKEN = ("UnexpectedEndOfExecution", "WebSocketError", "ExecutionAborted")
"""Errors of the service in the sandbox."""


@dataclass(frozen=True, slots=True)
class E2bSandbox:
    """The Sandbox on E2B. It can be pickled, and holds no key."""

    settings: E2bSettings

    @asynccontextmanager
    async def open(
        self,
        files: Mapping[str, str | bytes] = {},
        limits: Limits | None = None,
        *,
        relay: Path | None = None,
        reads: Sequence[Path] = (),
    ) -> AsyncIterator["E2bBox"]:
        """Creates a sandbox; kills it at the end. See `Sandbox`."""
        if relay is not None or reads:
            raise EpisodeError("boxes of sandbox.type e2b reach nothing of this machine; use bubblewrap")
        account = E2bAccount(self.settings)
        sandbox, leased = await account.created()
        try:
            box = E2bBox(account, sandbox, limits or self.settings.limits)
            await box.begin()
            for name, content in files.items():
                await box.write(name, content.encode() if isinstance(content, str) else content)
            yield box
        finally:
            await asyncio.shield(account.ended(leased))


class E2bAccount:
    """E2B's control plane, with retries and time limits of ours."""

    def __init__(self, settings: E2bSettings) -> None:
        """Raises EpisodeError that names the variable if there is no key."""
        self.settings = settings
        self._key = key_of(settings.key_env)

    async def created(self) -> tuple[Any, LeasedSandbox]:
        """A new sandbox, and its record. Raises EpisodeError."""
        once = str(uuid.uuid4())

        async def create() -> tuple[Any, LeasedSandbox]:
            made = await AsyncSandbox.create(
                template=self.settings.template,
                timeout=self.settings.lifetime_s,
                metadata={"made_by": "flexmarl"},
                allow_internet_access=self.settings.internet,
                idempotency_key=once,
                **self._options,
            )
            leased = LeasedSandbox.of_this_process(made.sandbox_id, self.settings.key_env, self.settings.domain)
            return made, leased

        sandbox, leased = await self.tried(create, "creating a sandbox of E2B")
        try:
            leased.record()
        except (OSError, ConfigError) as error:
            await asyncio.shield(self.ended(leased))
            raise EpisodeError(f"the sandbox cannot be recorded for `flexmarl clean`: {described(error)}") from error
        return sandbox, leased

    async def ended(self, leased: LeasedSandbox) -> None:
        """Kills a sandbox. If that fails, its record stays, and `flexmarl clean` or its lifetime ends it."""
        with suppress(EpisodeError):
            await self.killed(leased)

    async def killed(self, leased: LeasedSandbox) -> None:
        """Kills a sandbox and forgets it; one that is gone counts. Raises EpisodeError."""
        await self.tried(
            lambda: AsyncSandbox.kill(leased.sandbox_id, **self._options),
            f"killing the E2B sandbox {leased.sandbox_id}",
        )
        leased.forget()

    async def tried(self, call: Any, what: str) -> Any:
        """The result of a call of the client. Raises EpisodeError after all attempts."""

        async def attempt() -> Any:
            try:
                async with asyncio.timeout(self.settings.patience_s):
                    return await call()
            except AuthenticationException as error:
                raise EpisodeError(f"{what}: the key in {self.settings.key_env}: {self.shown(error)}") from None
            except Exception as error:  # Whatever the client raises at an answer that is none.
                raise ServiceFault(self.shown(error)) from None

        return await calls.attempted(attempt, self.settings.retries, what)

    def shown(self, error: BaseException) -> str:
        """An error of the client without the key."""
        if isinstance(error, TimeoutError) and not str(error):
            return f"no answer in {self.settings.patience_s:g} s"
        return masked(described(error).replace(self._key, MASK))[: calls.SHOWN]

    @property
    def _options(self) -> dict[str, Any]:
        given = {"domain": self.settings.domain} if self.settings.domain else {}
        return {"api_key": self._key, "request_timeout": self.settings.patience_s, "retries": 0, **given}


def key_of(variable: str) -> str:
    """The key in an environment variable. Raises EpisodeError that names it."""
    if key := os.environ.get(variable, "").strip():
        return key
    raise EpisodeError(f"sandbox.key_env: the environment variable {variable} holds no key of E2B; set it")


class E2bBox:
    """A Box in a sandbox of its own."""

    def __init__(self, account: E2bAccount, sandbox: Any, limits: Limits) -> None:
        self._account, self._sandbox, self._limits = account, sandbox, limits
        self._settings = account.settings
        self._context: Any = None
        self._turn = asyncio.Lock()
        self._lost = False

    async def begin(self) -> None:
        """Makes the session. Raises EpisodeError."""
        self._context = await self._account.tried(
            lambda: self._sandbox.create_code_context(language="python"), "making a context at E2B"
        )
        cell = calls.boot_cell(ROOT, {}, self._limits.output_bytes)

        async def boot() -> None:
            ran = await self._sandbox.run_code(cell, context=self._context, timeout=FILE_S)
            if ran.error is not None:
                raise ServiceFault(f"{ran.error.name}: {ran.error.value}")

        await self._account.tried(boot, "beginning a session at E2B")

    async def run(self, code: str | Sequence[str], *, stdin: str = "", timeout_s: float = 10.0) -> BoxOutcome:
        """See `Box`."""
        async with self._turn:
            if self._lost:
                return BoxOutcome(ended=Ended.KILLED, lost=True)
            began = asyncio.get_running_loop().time()
            try:
                reply = await self._asked(calls.run_request(code, stdin, timeout_s), timeout_s)
                outcome = calls.outcome_of(reply, self._limits, 0.0)
            except BoxOver as over:
                self._lost = True
                outcome = BoxOutcome(ended=over.ended, stderr=over.said[: self._limits.output_bytes], lost=True)
            except BaseException:
                self._lost = True  # The code may still run: its sandbox is killed as the block is left.
                with suppress(Exception):
                    await asyncio.shield(self._sandbox.kill(request_timeout=self._settings.patience_s))
                raise
            return replace(outcome, wall_s=asyncio.get_running_loop().time() - began)

    async def write(self, path: str, data: bytes) -> None:
        """See `Box`."""
        if len(data) > MOST_FRAME // 2:
            raise EpisodeError(f"the sandbox cannot write {path!r}: it takes at most {MOST_FRAME // 2} bytes at once")
        reply = await self._file({"kind": "write", "path": path, "data": calls.encoded(data)})
        if reply.error is not None:
            raise EpisodeError(f"the sandbox cannot write {path!r}: {reply.error}")

    async def read(self, path: str) -> bytes:
        """See `Box`."""
        reply = await self._file({"kind": "read", "path": path})
        try:
            return calls.decoded(reply.fields["data"])
        except (KeyError, TypeError, ValueError):
            raise FileNotFoundError(f"{path!r}: {reply.error or 'the box gave no file'}") from None

    async def _file(self, request: Mapping[str, Any]) -> KernelReply:
        async with self._turn:
            if self._lost:
                raise EpisodeError("the box has ended")
            try:
                return await self._asked(request, FILE_S)
            except BoxOver as over:
                self._lost = True
                raise EpisodeError(f"the box has ended: {over.ended}") from None

    async def _asked(self, request: Mapping[str, Any], timeout_s: float) -> KernelReply:
        """The reply to a request. Raises BoxOver if the code ended its box, EpisodeError if the service failed."""
        nonce = calls.new_nonce()
        call, heard = calls.call_cell(nonce, request), Heard(nonce)
        said = ""
        for number in range(self._settings.retries + 1):
            try:
                reply = await self._answered(call, heard, timeout_s + self._settings.patience_s)
            except TimeoutError:
                if heard.began:
                    return await self._overdue(call, heard)
                said = f"no answer {self._settings.patience_s:g} s after its time"
            except ServiceFault as fault:
                said = str(fault)
            else:
                if not reply.interrupted:
                    return reply
                said = "the service interrupted the call"
                break
            await asyncio.sleep(calls.FIRST_WAIT_S * 2**number)
        raise EpisodeError(f"a call at E2B failed: {masked(said)[: calls.SHOWN]}")

    async def _overdue(self, call: str, heard: "Heard") -> KernelReply:
        """The reply to a call that began and is over its time. Hanging up interrupted it, so that it may answer now."""
        try:
            reply = await self._answered(call, heard, self._settings.patience_s)
        except (TimeoutError, ServiceFault):
            try:
                async with asyncio.timeout(self._settings.patience_s):
                    running = await self._sandbox.is_running(request_timeout=self._settings.patience_s)
            except Exception as error:  # Whatever the client raises.
                raise EpisodeError(f"E2B does not answer: {self._account.shown(error)}") from None
            if running:
                raise BoxOver(Ended.TIMED_OUT) from None
            raise EpisodeError("E2B ended the sandbox during a call") from None
        return KernelReply({**reply.fields, "ended": Ended.TIMED_OUT.value}) if reply.interrupted else reply

    async def _answered(self, call: str, heard: "Heard", within_s: float) -> KernelReply:
        """The reply in the answer to one request. Raises ServiceFault, TimeoutError, or BoxOver."""
        try:
            async with asyncio.timeout(within_s):
                ran = await self._sandbox.run_code(
                    call, context=self._context, timeout=within_s + 1, on_stdout=heard, on_stderr=heard
                )
        except (TimeoutError, BoxOver):
            raise
        except Exception as error:  # Whatever the client raises at an answer that is none.
            raise ServiceFault(self._account.shown(error)) from None
        for result in reversed(ran.results):
            if reply := calls.reply_of(str(result.text or ""), heard.nonce):
                return reply
        if ran.error is None:
            raise ServiceFault("half an answer")
        said = f"{ran.error.name}: {ran.error.value}"
        if ran.error.name in BROKEN:
            raise ServiceFault(said)
        raise BoxOver(Ended.KILLED, "" if ran.error.name in RESTARTED else said)


class Heard:
    """Hears what a call prints: that it began, and that it does not print too much past the program in its kernel."""

    def __init__(self, nonce: str) -> None:
        self.nonce, self.began, self._size = nonce, False, 0

    def __call__(self, message: Any) -> None:
        """One output. Raises BoxOver if there were too many bytes."""
        self.began = self.began or self.nonce in message.line
        self._size += len(message.line)
        if self._size > MOST_STREAMED:
            raise BoxOver(Ended.TOO_MUCH_OUTPUT)


class BoxOver(Exception):
    """The code in a box has ended it, or must be ended with it."""

    def __init__(self, ended: Ended, said: str = "") -> None:
        super().__init__(ended)
        self.ended, self.said = ended, said
