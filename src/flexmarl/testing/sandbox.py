"""Conformance check of sandboxes: `check_sandbox(lambda: Bubblewrap())`."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from flexmarl.sandbox.interface import MIB, Box, Ended, Limits, Sandbox

SMALL = Limits(memory_bytes=96 * MIB, pids=24, disk_bytes=32 * MIB, cpu_s=20, output_bytes=MIB)
"""Limits under which attacks run."""


def check_sandbox(make: Callable[[], Sandbox], *, unpromised: Collection[str] = ()) -> None:
    """Raises AssertionError naming the law that a sandbox breaks. It opens about ten boxes.

    `unpromised`: guarantees that it does not give (`RemoteSandbox.unpromised`); they are not checked.
    """
    asyncio.run(_check(make(), unpromised))


async def _check(sandbox: Sandbox, unpromised: Collection[str]) -> None:
    async with sandbox.open({"folder/a.txt": "one", "b.bin": b"\0\xff"}) as box, sandbox.open() as other:
        await _check_session(box)
        await _check_files(box, other)
        await _check_commands(box)
    await _check_limits(sandbox, limits_memory="memory" not in unpromised)
    await _check_ends(sandbox)


async def _check_session(box: Box) -> None:
    first = await box.run("x = 20\nx + 22")
    assert (first.ok, first.stdout) == (True, "42\n"), f"the value of a last expression is printed: {first}"
    assert (await box.run("x")).stdout == "20\n", "variables stay from call to call"
    failed = await box.run("print('seen')\n1 / 0")
    assert (failed.ended, failed.exit) == (Ended.EXITED, 1), f"an exception is status 1: {failed}"
    assert failed.stdout == "seen\n", "what was printed before it is kept"
    assert "ZeroDivisionError" in failed.stderr, "and the exception is told"
    assert (await box.run("import sys; sys.exit(7)")).exit == 7, "sys.exit gives the status"
    assert (await box.run("x")).stdout == "20\n", "and the session goes on"
    odd = await box.run("import sys; sys.stdout.buffer.write(b'\\xff\\x00\\xed\\xa0\\x80')")
    odd.stdout.encode()
    assert (await box.run("\ud800")).exit == 1, "code that is no Unicode is a fault of the code"


async def _check_files(box: Box, other: Box) -> None:
    assert (await box.run("open('folder/a.txt').read() + str(open('b.bin', 'rb').read())")).ok, "files are there"
    await box.write("made/c.txt", b"three")
    assert await box.read("made/c.txt") == b"three", "a file that was written can be read"
    await box.run("import os\nos.symlink('/usr/bin/env', 'link'); os.mkfifo('pipe'); os.symlink('/usr', 'usr')")
    for path in ("link", "pipe", "usr/bin/env", "../driver.py", "/etc/passwd", "missing", "folder"):
        try:
            await box.read(path)
        except FileNotFoundError:
            continue
        raise AssertionError(f"only regular files below the root can be read, and {path!r} could")
    assert (await other.run("import os; os.listdir()")).stdout == "[]\n", "no other box has the files"


async def _check_commands(box: Box) -> None:
    said = await box.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin="in")
    assert (said.exit, said.stdout, said.stderr) == (3, "in", "err\n"), f"a command has its three streams: {said}"
    assert (await box.run(["no-such-program"])).exit == 127, "a missing program is a status"
    slow = await box.run(["sleep", "600"], timeout_s=0.2)
    assert (slow.ended, slow.lost) == (Ended.TIMED_OUT, False), f"a command ends at its time: {slow}"


async def _check_limits(sandbox: Sandbox, *, limits_memory: bool) -> None:
    async with sandbox.open({}, SMALL) as box:
        flood = await box.run("print('x' * 3_000_000)")
        assert flood.ok, "what prints too much goes on"
        assert len(flood.stdout) + flood.dropped_bytes == 3_000_001, "each byte is kept or counted"
        assert len(flood.stdout) == SMALL.output_bytes, "as many bytes are kept as may be"
        full = await box.run("held = bytearray(200 << 20)" if limits_memory else "raise MemoryError")
        assert full.ended is Ended.OUT_OF_MEMORY or "MemoryError" in full.stderr, f"memory is limited: {full}"
    async with sandbox.open() as box:
        ended = await box.run("import os; os.kill(os.getpid(), 9)")
        assert (ended.ended, ended.lost) == (Ended.KILLED, True), f"a box that ends itself is told: {ended}"
        assert (await box.run("1")).lost, "and stays ended"


async def _check_ends(sandbox: Sandbox) -> None:
    async with sandbox.open() as box:
        slow = await box.run("x = 1\nwhile True: pass", timeout_s=0.2)
        assert slow.ended is Ended.TIMED_OUT, f"a loop ends at its time: {slow}"
        assert (await box.run("x")).stdout == "1\n" or slow.lost, "a session goes on, or is said to be lost"
    async with sandbox.open() as box:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await box.run("while True: pass", timeout_s=600.0)
        assert (await box.run("1")).lost, "a cancelled call ends its box"
    async with sandbox.open() as box:
        forged = await box.run(FORGED, timeout_s=10.0)
        again = await box.run("print('mine')")
        assert forged.lost or again.lost or again.stdout == "mine\n", f"forged frames change no later call: {again}"


FORGED = """
import json, os, struct
frame = json.dumps({"nonce": "0" * 32, "ended": "exited", "exit": 0}).encode()
frame = struct.pack("!I", len(frame)) + frame
for fd in range(3, 64):
    try:
        os.set_blocking(fd, False)
        for _ in range(1_000):
            os.write(fd, frame)
    except OSError:
        pass
"""
"""Writes 1 000 replies that nobody asked for to every descriptor, as far as it takes them at once."""
