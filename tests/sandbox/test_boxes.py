"""Boxes on bubblewrap: what they are for, and what no program gets out of one."""

import asyncio
import json
import os
import resource
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from flexmarl.errors import EpisodeError
from flexmarl.sandbox.backends import bubblewrap, open_box
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.interface import Ended, Limits
from flexmarl.sandbox.settings import SandboxSettings
from flexmarl.testing.sandbox import SMALL, check_sandbox
from tests.docs.pages import blocks
from tests.sandbox.attacks import ATTACKS, ENDLESS, THROUGH, Surroundings, attacked, gets_through
from tests.sandbox.conftest import PLAIN, as_plain_user, remains


def those_that_get_through(surroundings: Surroundings) -> list[str]:
    """Names of the attacks that get through."""

    async def all_of_them() -> list[str]:
        through = []
        for attack in ATTACKS:
            outcome = await attacked(Bubblewrap(), attack, surroundings)
            if THROUGH in outcome.stdout or outcome.ended is Ended.TIMED_OUT:
                through.append(attack.name)
        return through

    return asyncio.run(all_of_them())


def test_the_sandbox_conforms(sandbox):
    check_sandbox(lambda: sandbox)
    assert remains() == []


def test_there_are_forty_attacks_and_each_has_a_name_of_its_own():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 40


def test_no_attack_gets_out_of_a_box(sandbox):
    with Surroundings.open() as surroundings:
        assert those_that_get_through(surroundings) == []
    assert remains() == []


def test_every_attack_that_does_no_harm_gets_through_a_plain_process(sandbox):
    users = ("any", "root") if os.geteuid() == 0 else ("any",)
    with Surroundings.open() as surroundings:
        harmless = [attack for attack in ATTACKS if attack.witness in users]
        held_off = [attack.name for attack in harmless if not gets_through(attack, surroundings)]
    assert held_off == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a plain user; the tests above ran as one")
def test_no_attack_gets_out_of_the_box_of_a_plain_user(sandbox):
    def work() -> Sequence[object]:
        bubblewrap._CGROUPS.clear()
        return [os.getuid(), those_that_get_through(surroundings), remains()]

    with Surroundings.open() as surroundings:
        assert as_plain_user(work) == [PLAIN, [], []]


@pytest.mark.parametrize(("name", "code"), ENDLESS, ids=[name for name, _ in ENDLESS])
def test_what_does_not_end_by_itself_is_ended(name, code, sandbox):
    async def run() -> None:
        async with sandbox.open({}, SMALL) as box:
            outcome = await box.run(code, timeout_s=0.3)
            assert outcome.ended is Ended.TIMED_OUT
            assert outcome.lost or (await box.run("1 + 1")).stdout == "2\n"

    asyncio.run(run())
    assert remains() == []


def test_a_box_without_a_relay_has_no_way_out_and_one_with_it_reaches_that_socket_alone(sandbox):
    code = """
import socket
one = socket.socket(socket.AF_UNIX)
try:
    one.connect('/run/relay.sock')
    one.sendall(b'ask')
    print(one.recv(64).decode())
except OSError as error:
    print('no way out')
"""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        os.chmod(folder, 0o755)
        path = Path(folder) / "gateway.sock"
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen()

        def serve() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.sendall(b"answer to " + caller.recv(64))

        async def run() -> list[str]:
            async with sandbox.open() as closed, sandbox.open(relay=path) as relayed:
                return [(await box.run(code)).stdout.strip() for box in (closed, relayed)]

        thread = threading.Thread(target=serve)
        thread.start()
        assert asyncio.run(run()) == ["no way out", "answer to ask"]
        thread.join()


def test_boxes_are_apart_at_the_same_time_and_leave_nothing(sandbox):
    async def one(number: int) -> str:
        async with sandbox.open({"mine": str(number)}) as box:
            await box.run("mine = open('mine').read()\nopen('/tmp/trace', 'x').write(mine)")
            return (await box.run("print(mine, open('/tmp/trace').read())")).stdout

    async def many() -> list[str]:
        return await asyncio.gather(*map(one, range(24)))

    assert asyncio.run(many()) == [f"{number} {number}\n" for number in range(24)]
    assert remains() == []


def test_a_box_that_outlives_its_program_does_not_outlive_its_block(sandbox):
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)"
    )

    async def run() -> None:
        async with sandbox.open() as box:
            assert (await box.run(code)).ok
            assert remains() != []

    asyncio.run(run())
    assert remains() == []


def test_files_of_a_box_never_stand_for_modules_of_its_driver_and_its_code_can_import_them(sandbox):
    names = ("subprocess", "contextlib", "signal", "types", "enum", "json", "re", "traceback")
    files = {f"{name}.py": "raise SystemError('it was imported')" for name in names} | {"mine.py": "found = 42"}

    async def work() -> None:
        async with sandbox.open(files) as box:
            assert (await box.run("1 / 0")).stderr.endswith("ZeroDivisionError: division by zero\n")
            assert (await box.run(["sh", "-c", "echo here"])).stdout == "here\n"
            assert (await box.run("import mine; mine.found")).stdout == "42\n"
            assert "it was imported" in (await box.run("import traceback")).stderr

    asyncio.run(work())


def test_an_exception_is_shown_as_python_shows_it(sandbox):
    code = (
        "def deep(n):\n    return deep(n - 1) if n else {}['k']\n"
        "try:\n    deep(2)\nexcept KeyError as e:\n    raise ValueError('a\\x1b') from e"
    )
    frames = '  File "<code>", line 4, in <module>\n' + '  File "<code>", line 2, in deep\n' * 3
    begin = "Traceback (most recent call last):\n"
    cause = "\nThe above exception was the direct cause of the following exception:\n\n"
    shown = f"{begin}{frames}KeyError: 'k'\n{cause}{begin}  File \"<code>\", line 6, in <module>\nValueError: a\x1b\n"

    async def work() -> None:
        async with sandbox.open() as box:
            assert (await box.run(code)).stderr == shown
            assert (await box.run("def (")).stderr == (
                '  File "<code>", line 1\n    def (\n        ^\nSyntaxError: invalid syntax\n'
            )
            grouped = (await box.run("raise ExceptionGroup('two', [ValueError(1), OSError('x')])")).stderr
            assert "ExceptionGroup: two (2 sub-exceptions)" in grouped

    asyncio.run(work())


def test_memory_that_a_child_used_up_is_told_and_the_session_goes_on_or_is_said_to_be_lost(sandbox):
    async def run() -> None:
        async with sandbox.open({}, Limits(memory_bytes=96 * 2**20)) as box:
            grown = await box.run(["python3", "-c", "held = bytearray(400 << 20)"])
            assert grown.ended is Ended.OUT_OF_MEMORY
            assert (await box.run("1 + 1")).stdout == "2\n" or grown.lost

    asyncio.run(run())


def test_the_page_of_the_sandbox_runs(sandbox, capfd):
    (block,) = [one for one in blocks("docs/howto/sandbox.md", "python") if "box" in one.notes]
    exec(compile(block.text, "sandbox.md", "exec"), {"__name__": "page"})
    said = capfd.readouterr().out
    assert "'1,2\\n'" in said or "1,2" in said
    assert "1 data.csv" in said


FORGED = """
import os, struct, sys
frame = b"[" + b"[]," * (2**21) + b"[]]"
rest = memoryview(struct.pack("!I", len(frame)) + frame)
while rest:
    rest = rest[os.write(int(sys.argv[1]), rest):]
"""
"""Six MiB on the box's own channel, which make two million lists."""


def test_what_a_box_forges_is_not_read(sandbox, monkeypatch):
    read = []
    monkeypatch.setattr(
        open_box.json, "loads", lambda text: (read.append(len(text)), json.JSONDecoder().decode(text.decode()))[1]
    )

    async def run() -> None:
        async with sandbox.open() as box:
            assert (await box.run(FORGED, timeout_s=60)).exit == 0
            assert (await box.run("print('after')")).stdout == "after\n"

    asyncio.run(run())
    assert read
    assert max(read) <= open_box.MOST_ANSWER


def test_too_many_forged_bytes_end_the_box(sandbox, monkeypatch):
    monkeypatch.setattr(open_box, "MOST_FORGED", 2**20)

    async def run() -> tuple[Ended, bool]:
        async with sandbox.open() as box:
            outcome = await box.run(FORGED, timeout_s=60)
            return outcome.ended, outcome.lost

    assert asyncio.run(run()) == (Ended.TOO_MUCH_OUTPUT, True)


def test_between_runs_nothing_of_a_box_is_read(sandbox):
    """What a run has left behind writes for ever, and costs this process nothing."""

    async def run() -> None:
        async with sandbox.open() as box:
            await box.run("import os\nif os.fork() == 0:\n    while True: os.write(1, bytes(65536))")
            assert not any(asyncio.get_running_loop().remove_reader(one.ours) for one in (box._out, box._err))
            assert (await box.run("2", timeout_s=60)).ended is Ended.EXITED

    asyncio.run(run())
    assert remains() == []


@pytest.mark.parametrize("spare", range(10))
def test_a_box_without_descriptors_names_the_limit_and_leaves_none(sandbox, spare):
    def opened() -> list[int]:
        return [int(name) for name in os.listdir("/proc/self/fd")]

    async def run() -> None:
        before, limits, held = opened(), resource.getrlimit(resource.RLIMIT_NOFILE), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before) + 16, limits[1]))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for one in held[len(held) - spare :]:
                os.close(one)
            with pytest.raises(EpisodeError, match=r"Too many open files.*ulimit -n"):
                async with sandbox.open():
                    pass
        finally:
            for one in held[: len(held) - spare]:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(opened()) == len(before)

    asyncio.run(run())
    assert remains() == []


def test_an_interpreter_beside_which_a_home_lies_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch(mode=0o755)

    async def run() -> None:
        async with Bubblewrap(SandboxSettings(python=str(tmp_path / "bin" / "python3"))).open():
            pass

    with pytest.raises(EpisodeError, match=rf"a box would read all of {tmp_path}; use e.g. /usr/bin/python3"):
        asyncio.run(run())
    assert remains() == []
