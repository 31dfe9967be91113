"""Servers with the interfaces of SandboxFusion and of E2B, on real sockets, which really run code.

It runs in kernels of Jupyter and in plain processes of this machine, without isolation but where a test asks for it.

Bodies and answers of SandboxFusion go through the models of its own client, so that neither side can drift.
"""

import base64
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from sandbox_fusion import models

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
_QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
ADDED_S = 0.5
"""Time that a real SandboxFusion gives a kernel above `total_timeout`: 10 s there."""


@dataclass
class Told:
    """The way in which a server answers, and what it was asked."""

    faults: list[str] = field(default_factory=list)
    """Of the next requests to `faulty`, "" for none.

    500, garbage, nothing, hang, half; of E2B: lost (the reply), hang up; of SandboxFusion: error, process error.
    """
    faulty: tuple[str, ...] = ("/run_code", "/run_jupyter", "/execute")
    unwell: bool = False
    """True: sandboxes of E2B do not answer when they are asked whether they run."""
    isolates: bool = False
    """True: kernels of E2B are in namespaces of their own."""
    met: list[str] = field(default_factory=list)
    """Faults that a client met."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    open: dict[str, "FakeSandbox"] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    """Idempotency keys of the sandboxes that were created."""
    ended: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)


def _isolated(folder: Path) -> KernelSpec:
    """A kernel in namespaces of its own: it sees neither files of /tmp but its own, nor a network, nor processes."""
    parts = ["--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
    seen = ["--ro-bind", sys.prefix, sys.prefix, "--bind", str(folder), str(folder)]  # Its Python may be in /tmp, too.
    argv = ["bwrap", "--ro-bind", "/", "/", "--tmpfs", "/tmp", *seen, *parts]
    # The kernel would look for its parent, which it cannot see.
    argv += ["--unsetenv", "JPY_PARENT_PID", "--chdir", str(folder)]
    argv += [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    return KernelSpec(argv=argv, display_name="isolated", language="python", interrupt_mode="message")


class Kernel:
    """A kernel of Jupyter in a folder."""

    def __init__(self, folder: Path, *, isolated: bool = False) -> None:
        self.manager = KernelManager(kernel_name="python3")
        if isolated:
            self.manager._kernel_spec = _isolated(folder)
        # Sockets in a folder, as another process could take a port before the kernel does.
        self.sockets = Path(tempfile.mkdtemp(prefix="kernel-", dir=folder if isolated else "/tmp"))
        self.manager.transport, self.manager.ip = "ipc", str(self.sockets / "socket")
        self.manager.connection_file = str(self.sockets / "connection.json")
        kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LANG") if name in os.environ}
        self.manager.start_kernel(cwd=str(folder), env={**kept, "HOME": str(folder)}, **_QUIET)
        self.client = self.manager.client()
        # Code that writes into the sockets of its kernel can make the thread of the heartbeat wait for ever.
        self.client.start_channels(hb=False)
        try:
            self.client.wait_for_ready(timeout=60)
        except RuntimeError:
            self.end()  # The garbage collector waits for ever for a client with open channels.
            raise

    def execute(self, code: str, emit: Callable[[str, dict[str, Any]], None], stop: Callable[[], bool]) -> bool:
        """Runs a cell and emits what it shows. False if the kernel died, or went on when `stop` had it interrupted."""
        asked, stopped = self.client.execute(code), 0.0
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except (ValueError, KeyError, TypeError, UnicodeError):
                return False  # The code wrote into the sockets of its kernel.
            except Empty:
                if not self.manager.is_alive() or (stopped and time.monotonic() > stopped + 3):
                    return False
                if not stopped and stop():
                    stopped = time.monotonic()
                    self.manager.interrupt_kernel()
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return not stopped
            emit(kind, content)

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        shutil.rmtree(self.sockets, ignore_errors=True)


class FakeSandbox:
    """A sandbox of E2B: a folder, and its contexts."""

    def __init__(self, *, isolated: bool) -> None:
        self.folder, self.isolated = Path(tempfile.mkdtemp(prefix="e2b-", dir="/tmp")), isolated
        self.contexts: dict[str, Kernel] = {}
        self.turn = threading.Lock()

    def context(self) -> str:
        self.contexts[name := str(uuid.uuid4())] = Kernel(self.folder, isolated=self.isolated)
        return name

    def end(self) -> None:
        for kernel in self.contexts.values():
            kernel.end()
        shutil.rmtree(self.folder, ignore_errors=True)


class FakeServer(BaseHTTPRequestHandler):
    """One server for all interfaces."""

    told: Told
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            gone = self._sandbox() is None or self.told.unwell
            self._answer(502 if gone else 204, {"message": "The sandbox was not found"} if gone else None)
        else:
            self._answer(404, {"message": self.path})

    def do_DELETE(self) -> None:
        name = self.path.rpartition("/")[2]
        if not self._has_key() or self._fails("DELETE"):
            return
        with self.told.lock:
            sandbox = self.told.open.pop(name, None)
        if sandbox is None:
            self._answer(404, {"code": 404, "message": "not found"})
        else:
            sandbox.end()
            self.told.ended.append(name)
            self._answer(204, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        told = self.told
        with told.lock:
            told.asked.append((self.path, body))
            told.at_once += 1
            told.most_at_once = max(told.most_at_once, told.at_once)
        try:
            if self._fails(self.path):
                return
            {
                "/run_code": self._run_code,
                "/run_jupyter": self._run_jupyter,
                "/v2/sandboxes": self._create,
                "/contexts": self._context,
                "/execute": self._execute,
            }[self.path](body)
        finally:
            with told.lock:
                told.at_once -= 1

    def _fails(self, path: str) -> bool:
        """True if this request meets a fault that is no answer of the interface."""
        told = self.told
        with told.lock:
            fault = told.faults.pop(0) if path in told.faulty and told.faults else ""
            told.met += [fault] if fault else []
        self.fault = fault
        if fault == "500":
            self._answer(500, {"detail": "boom", "code": 500, "message": "boom"})
        elif fault == "garbage":
            self._text(200, b"<html>a proxy says hello</html>\n")
        elif fault == "nothing":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "hang":
            told.over.wait(60)
            self.close_connection = True
        return fault in ("500", "garbage", "nothing", "hang")

    def _answer(self, status: int, body: Any) -> None:
        self._text(status, b"" if body is None else json.dumps(body).encode())

    def _text(self, status: int, text: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.fault_half():
            self.wfile.write(text[: len(text) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(text)

    fault = ""
    hangs_up_at = math.inf

    def fault_half(self) -> bool:
        return self.fault == "half" and self.path != "/execute"

    # SandboxFusion, as its server does it: sandbox/server/sandbox_api.py

    def _run_code(self, body: dict[str, Any]) -> None:
        request = models.RunCodeRequest(**body)
        assert not body.keys() - request.dict().keys(), "the client has no such field"
        assert request.language in ("python", "bash")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _restore(folder, request.files)
            program = folder / ("tmp.py" if request.language == "python" else "tmp.sh")
            program.write_text(request.code)
            argv = [sys.executable if request.language == "python" else "/bin/bash", str(program)]
            ran = _run(argv, folder, request.run_timeout, request.stdin)
            files = _fetched(folder, request.fetch_files)
        status = "Success" if ran.return_code == 0 else "Failed"
        self._fusion(models.RunCodeResponse(status=status, message="", run_result=ran, files=files))

    def _run_jupyter(self, body: dict[str, Any]) -> None:
        request = models.RunJupyterRequest(**body)
        assert not body.keys() - request.dict().keys(), "the client has no such field"
        deadline = time.monotonic() + request.total_timeout + ADDED_S
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _restore(folder, request.files)
            kernel = Kernel(folder)
            try:
                cells, ended = [], "Finished"
                for cell in request.cells:
                    cells.append(made := models.CellRunResult(stdout="", stderr="", display=[], error=[]))
                    if not kernel.execute(
                        cell, lambda kind, content: _shown(made, kind, content), lambda: time.monotonic() > deadline
                    ):
                        ended = "TimeLimitExceeded" if time.monotonic() > deadline else "died"
                        break
                files = _fetched(folder, request.fetch_files)
            finally:
                kernel.end()
        if ended == "Finished":
            driver = models.CommandRunResult(status="Finished", execution_time=1.0, return_code=0, stdout="", stderr="")
            self._fusion(
                models.RunJupyterResponse(status="Success", message="", driver=driver, cells=cells, files=files)
            )
        else:  # The real one has no cells then, nor files.
            limit = ended == "TimeLimitExceeded"
            driver = models.CommandRunResult(
                status=ended if limit else "Finished", return_code=None if limit else 1, stdout="", stderr=""
            )
            self._fusion(models.RunJupyterResponse(status="Failed", message="", driver=driver))

    def _fusion(self, answer: Any) -> None:
        if self.fault == "error":
            answer = answer.copy(update={"status": models.RunStatus.SandboxError, "message": "the sandbox broke"})
        elif self.fault == "process error":
            ran = models.CommandRunResult(status="Error", stderr="exception on running command")
            answer = type(answer)(
                status="Failed", message="", **{"driver" if "driver" in answer.__fields__ else "run_result": ran}
            )
        self._text(200, answer.json().encode())

    # E2B: its control plane, and the code interpreter in a sandbox, as template/server does it.

    def _has_key(self) -> bool:
        if self.headers["X-API-Key"] == KEY:
            return True
        self._answer(401, {"code": 401, "message": f"invalid key {self.headers['X-API-Key']}"})
        return False

    def _sandbox(self) -> FakeSandbox | None:
        return self.told.open.get(self.headers["E2b-Sandbox-Id"])

    def _create(self, body: dict[str, Any]) -> None:
        if not self._has_key():
            return
        self.told.keys.append(self.headers["Idempotency-Key"])
        name = f"i{uuid.uuid4().hex[:19]}"
        self.told.open[name] = FakeSandbox(isolated=self.told.isolates)
        made = {"templateID": body["templateID"], "sandboxID": name, "clientID": "c", "envdVersion": "0.6.7"}
        self._answer(201, made | {"envdAccessToken": "t", "domain": None})

    def _context(self, body: dict[str, Any]) -> None:
        if (sandbox := self._sandbox()) is None:
            self._answer(502, {"message": "The sandbox was not found"})
        else:
            made = {"id": sandbox.context(), "language": body.get("language", "python"), "cwd": str(sandbox.folder)}
            self._answer(200, made)

    def _execute(self, body: dict[str, Any]) -> None:
        sandbox = self._sandbox()
        if sandbox is None:
            self._answer(502, {"message": "The sandbox was not found"})
            return
        if body["context_id"] is None:  # The default context.
            body["context_id"] = next(iter(sandbox.contexts), None) or sandbox.context()
        kernel = sandbox.contexts[body["context_id"]]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with sandbox.turn, suppress(OSError):
            stop = lambda: self._hung_up() or time.monotonic() > self.hangs_up_at  # noqa: E731
            if not kernel.execute(body["code"], self._emit, stop) and not stop():
                self._line(
                    {"type": "error", "name": "ContextRestarting", "value": "Context was restarted", "traceback": ""}
                )
                kernel.end()
                sandbox.contexts[body["context_id"]] = Kernel(sandbox.folder, isolated=sandbox.isolated)
            if self.fault in ("half", "hang up"):
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            if self.fault != "lost":
                self._line({"type": "end_of_execution"})
            self.wfile.write(b"0\r\n\r\n")

    def _emit(self, kind: str, content: dict[str, Any]) -> None:
        if self.fault in ("half", "lost", "hang up") and kind != "stream":
            return
        if kind == "stream":
            if self.fault == "hang up":  # Its code has begun: before, a kernel would not notice.
                self.hangs_up_at = min(self.hangs_up_at, time.monotonic() + 0.5)
            self._line({"type": content["name"], "text": content["text"], "timestamp": "2026-01-01T00:00:00Z"})
        elif kind == "execute_result":
            self._line({"type": "result", "is_main_result": True, "text": content["data"].get("text/plain")})
        elif kind == "error":
            traceback = "".join(content["traceback"])
            self._line({"type": "error", "name": content["ename"], "value": content["evalue"], "traceback": traceback})
        elif kind == "execute_input":
            self._line({"type": "number_of_executions", "execution_count": content["execution_count"]})

    def _line(self, plain: dict[str, Any]) -> None:
        line = json.dumps(plain).encode() + b"\n"
        with suppress(OSError):
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()

    def _hung_up(self) -> bool:
        """True if the client went away; the real one then interrupts the kernel."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True


def _restore(folder: Path, files: dict[str, str | None]) -> None:
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(base64.b64decode(content))


def _fetched(folder: Path, names: list[str]) -> dict[str, str]:
    found = {name: folder / name for name in names}
    return {name: base64.b64encode(path.read_bytes()).decode() for name, path in found.items() if path.is_file()}


def _run(argv: list[str], folder: Path, timeout_s: float, stdin: str | None) -> Any:
    process = subprocess.Popen(
        argv,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin or "", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return models.CommandRunResult(status="TimeLimitExceeded", execution_time=timeout_s, stdout="", stderr="")
    return models.CommandRunResult(
        status="Finished", execution_time=0.1, return_code=process.returncode, stdout=out[: 1 << 20], stderr=err
    )


def _shown(cell: Any, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
    elif kind in ("display_data", "execute_result"):
        cell.display.append(content["data"])
    elif kind == "error":
        cell.error.append(content)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that went away is no fault."""


@contextmanager
def sandbox_server(told: Told) -> Iterator[str]:
    """Serves for the length of a block; yields its URL."""
    server = _Server(("127.0.0.1", 0), type("TheServer", (FakeServer,), {"told": told}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        told.over.set()
        server.shutdown()
        server.server_close()
        for sandbox in told.open.values():
            sandbox.end()
