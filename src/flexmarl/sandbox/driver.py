"""The program inside a box: it runs code in one session, commands, and moves files. It imports nothing of flexmarl.

Frames on an inherited socket: 4 bytes of length, then JSON. Each request has a nonce, which its reply repeats. Code in
the session can read and write this socket. A forged reply can only claim what the code could have printed itself:
texts, never objects, and nothing of another box. A signal interrupts code that is over its time. The sandbox kills the
box if that does not help.

Modules that are written in Python would take half of the time in which a box starts. So the parts in C of `ast`, `json`
and `signal` are used alone, and others are imported when they are needed.
"""

import _signal  # pyright: ignore[reportMissingImports] - CPython's own, in C
import binascii
import os
import resource
import stat
import sys
from _ast import Expr, Expression, Module, PyCF_ONLY_AST
from _json import encode_basestring_ascii, make_encoder, make_scanner

ROOT = "/box"
MOST_FRAME = 32 * 2**20
"""Longest frame in bytes, in either direction."""

_OWN = sys.path
_HOOKS = dict.fromkeys(("object_hook", "object_pairs_hook", "parse_constant"))
_PLAIN = type("Plain", (), {**_HOOKS, "strict": True, "parse_float": float, "parse_int": int})
decoded = make_scanner(_PLAIN)  # pyright: ignore[reportArgumentType] - anything with these names
encoded = make_encoder(None, repr, encode_basestring_ascii, None, ": ", ", ", False, False, False)


class Interrupted(BaseException):
    """Raised in code that is over its time. It is no Exception, so that `except Exception` does not keep it."""


def received(channel: int, size: int) -> bytes:
    """Exactly so many bytes. Ends the program if the sandbox has gone."""
    parts = []
    while size:
        part = os.read(channel, min(size, 2**20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def run_code(code: str, session: dict, timeout_s: float) -> dict:
    """Runs code in the session's namespace, and prints the value of a last expression, as a notebook does."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    ended, status = "exited", 0
    _signal.signal(_signal.SIGALRM, interrupt)
    try:
        try:
            tree = compile(code, "<code>", "exec", PyCF_ONLY_AST)
            assert isinstance(tree, Module), "code is compiled as a module"
            end = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
            body = compile(tree, "<code>", "exec")
            value = compile(Expression(end.value), "<code>", "eval") if isinstance(end, Expr) else None
            _signal.setitimer(_signal.ITIMER_REAL, timeout_s, 0.5)
            exec(body, session)
            if value is not None and (shown := eval(value, session)) is not None:
                print(repr(shown))
        finally:
            _signal.setitimer(_signal.ITIMER_REAL, 0)
    except Interrupted:
        ended, status = "timed_out", None
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        status = 1
        try:
            inner = error.__traceback__.tb_next if error.__traceback__ else None
            sys.__excepthook__(type(error), error.with_traceback(inner), inner)
        except BaseException:
            os.write(2, b"an exception that cannot be printed\n")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            status = status or 1
    return {"ended": ended, "exit": status}


def run_command(argv: list, stdin: str, timeout_s: float) -> dict:
    """Runs a command in a process group of its own, and ends the group with it."""
    sys.path, path = _OWN, sys.path  # Files of the box must not stand for modules.
    try:
        import subprocess
        from contextlib import suppress
    finally:
        sys.path = path
    try:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=ROOT, start_new_session=True)
    except (OSError, ValueError) as error:
        os.write(2, f"{argv[0]}: {error}\n".encode("utf-8", "backslashreplace"))
        return {"ended": "exited", "exit": 127}
    try:
        process.communicate(stdin.encode("utf-8", "surrogatepass"), timeout=timeout_s)
        ended = "exited"
    except subprocess.TimeoutExpired:
        ended = "timed_out"
    with suppress(ProcessLookupError):
        os.killpg(process.pid, _signal.SIGKILL)
    process.wait()
    return {"ended": ended, "exit": process.returncode if ended == "exited" else None}


def inside(path: str) -> str:
    """The absolute path of a name below the root."""
    full = os.path.normpath(os.path.join(ROOT, path))
    if not full.startswith(ROOT + os.sep):
        raise ValueError(f"{path!r} is not below {ROOT}")
    return full


def write_file(path: str, data: bytes) -> None:
    """Writes a file, and makes its folders."""
    full = inside(path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    with open(full, "wb") as file:
        file.write(data)


def read_file(path: str) -> bytes:
    """The content of a regular file, through no link."""
    full = inside(path)
    if os.path.realpath(full) != full:
        raise ValueError(f"{path!r} is a link")
    with os.fdopen(os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path!r} is no regular file")
        if (size := os.fstat(file.fileno()).st_size) > MOST_FRAME // 2:
            raise ValueError(f"{path!r} has {size} bytes, at most {MOST_FRAME // 2} can be read")
        return file.read()


def answer(request: dict, session: dict) -> dict:
    """The reply to one request."""
    kind = request["kind"]
    if kind == "code":
        return run_code(request["code"], session, request["timeout_s"])
    if kind == "command":
        return run_command(request["argv"], request["stdin"], request["timeout_s"])
    try:
        if kind == "limits":
            for name, most in request["limits"].items():  # For good: raising them needs a capability that no box has.
                resource.setrlimit(getattr(resource, name), (most, most))
        elif kind == "write":
            write_file(request["path"], binascii.a2b_base64(request["data"]))
        elif kind == "read":
            return {"data": binascii.b2a_base64(read_file(request["path"]), newline=False).decode()}
        return {}
    except (OSError, ValueError) as error:
        return {"error": str(error)}


def main() -> None:
    """Answers requests until the sandbox goes away."""
    channel = int(sys.argv[1])
    os.set_inheritable(channel, False)
    os.chdir(ROOT)
    sys.path = [ROOT, *_OWN]
    session = {"__name__": "__main__", "__builtins__": __builtins__}
    while True:
        request, _ = decoded(received(channel, int.from_bytes(received(channel, 4), "big")).decode(), 0)
        reply = answer(request, session)
        reply["nonce"] = request["nonce"]
        frame = "".join(encoded(reply, 0)).encode()
        rest = memoryview(len(frame).to_bytes(4, "big") + frame)
        while rest:
            rest = rest[os.write(channel, rest) :]


if __name__ == "__main__":
    main()
