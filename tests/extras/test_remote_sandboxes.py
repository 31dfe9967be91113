"""Boxes of services: SandboxFusion and E2B, against servers that the services' own clients accept.

Where SANDBOX_FUSION_URL or E2B_API_KEY is set, the tests of what every box does run on the real servers too.
"""

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from threading import Thread
from typing import Any

import e2b_code_interpreter
import pytest
import sandbox_fusion
from jupyter_client.manager import KernelManager

from flexmarl.assemble.boxes import check_sandbox_of
from flexmarl.cli.runs import ended_sandboxes
from flexmarl.config import load_run
from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.sandbox.backends.e2b_boxes import E2bAccount, E2bSandbox
from flexmarl.sandbox.backends.sandbox_fusion import SandboxFusion
from flexmarl.sandbox.interface import Ended, Limits, Sandbox
from flexmarl.sandbox.leased_sandboxes import LeasedSandbox, left_sandboxes, records_root
from flexmarl.sandbox.probe import GUARANTEES, probe_now
from flexmarl.sandbox.settings import E2bSettings, SandboxFusionSettings
from flexmarl.tasks.scorers.python_tests import python_tests, reference_of
from flexmarl.testing.sandbox import check_sandbox
from flexmarl.tools.boxed import PythonTool
from flexmarl.tools.interface import ToolContext
from tests.commands import run_commands
from tests.extras.sandbox_servers import KEY, Kernel, Told, sandbox_server

REAL = {name: os.environ.get(name, "") for name in ("SANDBOX_FUSION_URL", "E2B_API_KEY")}
TOOL = "team.agents.solver.tools=[{type: python}]"
ALL_OF_FUSION = "filesystem, network, processes, syscalls, memory, pids, disk"
Make = Callable[..., Sandbox]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def url(told: Told, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with sandbox_server(told) as url:
        for name, value in environment_of(url).items():
            monkeypatch.setenv(name, value)
        yield url


def environment_of(url: str) -> dict[str, str]:
    """Makes E2B's client use the server."""
    return {"E2B_API_KEY": KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}


def fusion(url: str, **settings: Any) -> SandboxFusion:
    return SandboxFusion(SandboxFusionSettings(**{"url": url, "patience_s": 20, "retries": 1} | settings))


def e2b(url: str, **settings: Any) -> E2bSandbox:
    return E2bSandbox(E2bSettings(**{"patience_s": 20, "retries": 1} | settings))


BOTH = pytest.mark.parametrize("make", [fusion, e2b], ids=["sandbox_fusion", "e2b"])
REALLY = [
    pytest.param(name, id=f"real {name}", marks=pytest.mark.skipif(not value, reason=f"{name} is not set"))
    for name, value in REAL.items()
]


@pytest.fixture(params=["fake sandbox_fusion", "fake e2b", *REALLY])
def everywhere(request: pytest.FixtureRequest) -> Sandbox:
    """A sandbox on each server that there is."""
    match request.param:
        case "SANDBOX_FUSION_URL":
            return SandboxFusion(SandboxFusionSettings(url=REAL["SANDBOX_FUSION_URL"]))
        case "E2B_API_KEY":
            return E2bSandbox(E2bSettings())
        case fake:
            return (fusion if fake.endswith("fusion") else e2b)(request.getfixturevalue("url"))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


# What every box does, on every server


def test_the_boxes_of_a_service_conform_less_what_it_cannot_promise(everywhere):
    check_sandbox(lambda: everywhere, unpromised={*everywhere.settings.unpromised, "memory"})


def test_a_box_that_holds_its_kernel_is_ended_at_its_time(everywhere):
    code = (
        "import signal\nfor one in (signal.SIGALRM, signal.SIGINT):\n    signal.signal(one, signal.SIG_IGN)\n"
        "while True: pass"
    )

    async def work() -> None:
        async with type(everywhere)(everywhere.settings.model_copy(update={"patience_s": 8})).open() as box:
            outcome = await box.run(code, timeout_s=0.3)
            assert (outcome.ended, outcome.lost) == (Ended.TIMED_OUT, True)
            assert (await box.run("1")).lost

    run(work())


def test_answers_are_scored_by_hidden_tests_in_boxes_of_a_service(everywhere):
    reference = reference_of("add", [((2, 3), 5), ((0, 0), 0)], timeout_s=5.0)

    async def work() -> list[float]:
        answers = ["def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b", "raise SystemExit(0)"]
        return [await python_tests.score_in_box(answer, reference, everywhere) for answer in answers]

    assert run(work()) == [1.0, 0.0, 0.0]


def test_a_tool_shows_the_same_as_in_a_box_of_this_machine(everywhere):
    async def work() -> list[str]:
        context = ToolContext(episode="g0e0a0", seed=0, sandbox=everywhere, files={"numbers": "1 2 3"})
        async with PythonTool(timeout_s=5.0).open(context) as tool:
            codes = ["x = sum(map(int, open('numbers').read().split()))\nx", "print(x, '\\x1b[2J')", "1 / 0"]
            return [(await tool.call({"code": code})).shown for code in codes]

    fault = 'error: Traceback (most recent call last):\n  File "<code>", line 1, in <module>'
    assert run(work()) == ["6", "6 \\x1b[2J", f"{fault}\nZeroDivisionError: division by zero\nexit status 1"]


# The servers of these tests are those of the services' own clients


def test_the_server_is_one_that_the_client_of_sandbox_fusion_accepts(url):
    request = sandbox_fusion.RunCodeRequest(
        code="print(open('a').read())", language="python", files={"a": "b25l"}, fetch_files=["a"]
    )
    ran = sandbox_fusion.run_code(request, endpoint=url)
    assert (ran.status, ran.run_result.stdout, ran.files) == ("Success", "one\n", {"a": "b25l"})
    slow = sandbox_fusion.RunCodeRequest(code="sleep 60", language="bash", run_timeout=0.2)
    late = sandbox_fusion.run_code(slow, endpoint=url)
    assert (late.status, late.run_result.status) == ("Failed", "TimeLimitExceeded")
    cells = sandbox_fusion.RunJupyterRequest(cells=["a = 'hello'", "a", "assert False", "print(a)"])
    shown = asyncio.run(sandbox_fusion.run_jupyter_async(cells, endpoint=url))
    assert shown.cells[1].display[0]["text/plain"] == "'hello'"
    assert (shown.cells[2].error[0]["ename"], shown.cells[3].stdout) == ("AssertionError", "hello\n")


def test_the_client_of_sandbox_fusion_meets_the_errors_of_the_server(told, url):
    told.faults = ["error"]
    with pytest.raises(Exception, match="Sandbox responded with error"):
        sandbox_fusion.run_code(
            sandbox_fusion.RunCodeRequest(code="1", language="python"), endpoint=url, max_attempts=1
        )


def test_the_server_is_one_that_the_clients_of_e2b_accept(told, url):
    with e2b_code_interpreter.Sandbox.create() as sandbox:
        assert sandbox.run_code("x = 20\nprint('seen')\nx + 22").text == "42"
        context = sandbox.create_code_context()
        ran = sandbox.run_code("x", context=context)
        assert ran.error is not None
        assert ran.error.name == "NameError"
        assert sandbox.is_running()
    assert not sandbox.is_running()
    assert told.ended == [sandbox.sandbox_id]


def test_a_kernel_of_the_server_that_dies_as_it_begins_leaves_nothing_to_wait_for(tmp_path, monkeypatch):
    start = KernelManager.start_kernel

    def dies(manager: KernelManager, **options: Any) -> None:
        start(manager, **options)
        manager.signal_kernel(signal.SIGKILL)

    monkeypatch.setattr(KernelManager, "start_kernel", dies)
    with pytest.raises(RuntimeError, match="died"):
        Kernel(tmp_path)
    collection = Thread(target=gc.collect, daemon=True)
    collection.start()
    collection.join(20)
    assert not collection.is_alive()


# A fault of the service is never an outcome


FAULTS = ["500", "garbage", "nothing", "half", "hang"]
OF_FUSION = [(fusion, path, fault) for path in ("code", "command") for fault in [*FAULTS, "error", "process error"]]
OF_E2B = [(e2b, path, fault) for path in ("code", "command") for fault in [*FAULTS, "lost"]]


def asked_for(kind: str) -> str | list[str]:
    """Code or a command that leaves a mark each time that it runs, and shows how many there are."""
    if kind == "code":
        return "open('marks', 'a').write('.')\nopen('marks').read()"
    return ["sh", "-c", "printf . >> marks; echo \"'$(cat marks)'\""]


@pytest.mark.parametrize(("make", "kind", "fault"), [*OF_FUSION, *OF_E2B])
def test_a_request_that_failed_is_sent_again_and_its_code_runs_once(make, kind, fault, told, url):
    hangs = fault == "hang"
    sandbox = make(url, patience_s=(5 if make is fusion else 8) if hangs else 20)
    if hangs and make is fusion and kind == "code":
        pytest.skip("the server gives a kernel ten seconds more: the same request as for a command, and longer")

    async def work() -> None:
        async with sandbox.open() as box:
            assert (await box.run(asked_for(kind), timeout_s=1)).stdout == "'.'\n"
            told.faults = [fault]
            assert (await box.run(asked_for(kind), timeout_s=1)).stdout == "'..'\n"

    run(work())
    assert told.met == [fault]


@pytest.mark.parametrize(("make", "kind", "fault"), [*OF_FUSION, *OF_E2B])
def test_a_service_that_goes_on_failing_fails_the_episode_and_shows_the_agent_nothing(make, kind, fault, told, url):
    hangs = fault == "hang"
    if hangs and make is fusion and kind == "code":
        pytest.skip("see above")
    sandbox = make(url, patience_s=(5 if make is fusion else 8) if hangs else 20)
    if fault == "lost":
        pytest.skip("a stream that lacks its reply is asked for again, and the next one has it")

    async def work() -> None:
        async with sandbox.open() as box:
            told.faults = [fault] * 8
            with pytest.raises(EpisodeError, match="failed") as failed:
                await box.run(asked_for(kind), timeout_s=0.5)
            assert KEY not in str(failed.value)
            told.faults = []

    run(work())
    assert told.met == [fault] * 2, "one attempt, and one retry"


@BOTH
def test_a_server_that_cannot_be_reached_fails_the_episode(make, url, monkeypatch):
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setenv("E2B_API_URL", nowhere)

    async def work() -> None:
        async with make(nowhere, retries=0).open() as box:
            await box.run("1")

    with pytest.raises(EpisodeError, match="failed at attempt 1 of 1"):
        run(work())


@BOTH
def test_a_tool_passes_the_fault_of_a_service_on_and_makes_no_observation_of_it(make, told, url):
    async def work() -> None:
        context = ToolContext(episode="g0e0a0", seed=0, sandbox=make(url))
        async with PythonTool(timeout_s=5.0).open(context) as tool:
            await tool.call({"code": "1"})
            told.faults = ["500"] * 4
            with pytest.raises(EpisodeError):
                await tool.call({"code": "2"})

    run(work())
    assert told.met == ["500", "500"]


# SandboxFusion


def test_files_and_variables_of_a_session_are_as_if_the_server_kept_them(url):
    async def work() -> None:
        async with fusion(url).open({"a": "1"}) as box:
            assert (await box.run("x = open('a').read()\nopen('b', 'w').write('2')")).ok
            assert (await box.run(["sh", "-c", "cat a b; rm a; mkdir d; cp b d/c; chmod +x b"])).stdout == "12"
            await box.write("e", b"\0\xff")
            await box.write("b", b"#!/bin/sh\necho run")
            seen = "import os\nprint(x, sorted(os.listdir()), open('d/c').read(), open('e', 'rb').read())"
            assert (await box.run(seen)).stdout == "1 ['b', 'd', 'e'] 2 b'\\x00\\xff'\n"
            assert await box.read("/box/d/../e") == b"\0\xff"

    run(work())


def test_permissions_of_files_stay_from_command_to_command(url):
    async def work() -> None:
        async with fusion(url).open({"program": "#!/bin/sh\necho ran"}) as box:
            assert (await box.run(["./program"])).exit != 0
            assert (await box.run(["chmod", "+x", "program"])).ok
            assert (await box.run(["./program"])).stdout == "ran\n"

    run(work())


def test_a_session_that_cannot_be_played_again_is_said_to_be_lost(url):
    async def work() -> None:
        async with fusion(url).open() as box:
            assert (await box.run("import os\nx = os.urandom(8)\nx")).ok
            again = await box.run("x")
            assert (again.ended, again.lost, again.stdout) == (Ended.KILLED, True, "")
            assert "gave another result" in again.stderr

    run(work())


def test_no_more_requests_are_at_the_server_than_it_takes(told, url):
    sandbox = fusion(url, concurrency=2)

    async def one(number: int) -> str:
        async with sandbox.open() as box:
            return (await box.run(["sh", "-c", f"sleep 0.2; echo {number}"])).stdout

    async def work() -> list[str]:
        return await asyncio.gather(*map(one, range(6)))

    assert run(work()) == [f"{number}\n" for number in range(6)]
    assert told.most_at_once == 2


def test_single_processes_have_limits_of_memory_and_disk(url):
    small = Limits(memory_bytes=96 << 20, disk_bytes=1 << 20)

    async def work() -> None:
        async with fusion(url).open({}, small) as box:
            assert "MemoryError" in (await box.run("held = bytearray(200 << 20)")).stderr
        async with fusion(url).open({}, small) as box:
            assert "File too large" in (await box.run("open('large', 'wb').write(bytes(16 << 20))")).stderr
        async with fusion(url).open({}, small) as box:
            several = await box.run("for name in 'abc': open(name, 'wb').write(bytes(700_000))")
            assert (several.ended, several.lost) == (Ended.KILLED, True)
            assert "more than 1048576 bytes" in several.stderr
        async with fusion(url).open({}, small) as box:
            with pytest.raises(EpisodeError, match="its files may have 1048576 bytes"):
                await box.write("large", bytes(2 << 20))

    run(work())


# E2B


def test_a_sandbox_is_made_without_internet_and_killed_at_the_end_whatever_happens(told, url):
    async def ended(work: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        async with e2b(url, lifetime_s=120).open({"a": "1"}) as box:
            assert len(told.open) == 1
            await work(box)

    async def fails(box: Any) -> None:
        raise EpisodeError("on purpose")

    async def is_cancelled(box: Any) -> None:
        async with asyncio.timeout(0.3):
            await box.run("while True: pass", timeout_s=60)

    run(ended(lambda box: box.run("1")))
    with pytest.raises(EpisodeError, match="on purpose"):
        run(ended(fails))
    with pytest.raises(TimeoutError):
        run(ended(is_cancelled))
    assert (len(told.ended), told.open) == (3, {})
    assert not {*told.ended} & {*records()}, "none of them is still recorded"
    bodies = [body for path, body in told.asked if path == "/v2/sandboxes"]
    assert {(body["allow_internet_access"], body["timeout"], body["templateID"]) for body in bodies} == {
        (False, 120, "code-interpreter-v1")
    }


def records() -> Iterator[str]:
    if records_root().exists():
        yield from (path.stem for path in records_root().glob("i*.json"))


def test_a_creation_that_is_tried_again_makes_one_sandbox(told, url):
    told.faulty, told.faults = ("/v2/sandboxes", "DELETE"), ["500", "", "500"]

    async def work() -> None:
        async with e2b(url).open() as box:
            assert (await box.run("1 + 1")).stdout == "2\n"

    run(work())
    assert told.met == ["500", "500"]
    assert (len(told.keys), len(told.ended), told.open) == (1, 1, {})


def test_a_call_that_a_broken_stream_interrupted_fails_the_episode(told, url):
    """The code was stopped by the service, so that what it did is no result of the code."""

    async def work() -> None:
        async with e2b(url, patience_s=8).open() as box:
            told.faults = ["hang up"]
            with pytest.raises(EpisodeError, match="interrupted"):
                await box.run("import time\ntime.sleep(3)\n'done'", timeout_s=10)

    run(work())


def test_a_sandbox_that_is_gone_during_a_call_fails_the_episode(told, url):
    async def work() -> None:
        async with e2b(url, patience_s=8).open() as box:
            told.unwell = True
            code = "import signal\nfor one in (14, 2): signal.signal(one, signal.SIG_IGN)\nwhile True: pass"
            with pytest.raises(EpisodeError, match="ended the sandbox"):
                await box.run(code, timeout_s=0.2)

    run(work())


def test_clean_ends_the_sandboxes_of_a_killed_process_and_leaves_those_of_a_live_one(told, url, tmp_path, monkeypatch):
    script = (
        "import asyncio\nfrom flexmarl.sandbox.backends.e2b_boxes import E2bSandbox\n"
        "from flexmarl.sandbox.settings import E2bSettings\n"
        "async def main():\n    async with E2bSandbox(E2bSettings()).open():\n        print('open', flush=True)\n"
        "        await asyncio.sleep(600)\nasyncio.run(main())"
    )
    kept = {"TMPDIR": str(tmp_path), **environment_of(url)}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | kept, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        (name,) = told.open
        assert list(ended_sandboxes(dry_run=False)) == [], "its process lives"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert list(ended_sandboxes(dry_run=True)) == [f"would end the E2B sandbox {name} of process {process.pid}"]
    done, again = run_commands(("clean",), ("clean",), cwd=tmp_path, environment=kept)
    assert done.returncode == 0, done.stderr
    assert f"ending the E2B sandbox {name} of process {process.pid}".encode() in done.stdout
    assert (told.open, told.ended) == ({}, [name])
    assert b"Nothing to clean" in again.stdout


def test_clean_names_the_variable_without_which_it_cannot_end_a_sandbox(url, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    LeasedSandbox("iold", pid=2**22 + 1, started=1.0, key_env="E2B_API_KEY").record()
    monkeypatch.setenv("E2B_API_KEY", "")
    with pytest.raises(ConfigError, match="E2B_API_KEY holds no key"):
        list(ended_sandboxes(dry_run=False))
    assert [one.sandbox_id for one in left_sandboxes()] == ["iold"]
    monkeypatch.setenv("E2B_API_KEY", KEY)
    assert len(list(ended_sandboxes(dry_run=False))) == 1, "one that is gone at E2B counts as ended"
    assert list(left_sandboxes()) == []


def test_the_key_is_in_no_error_no_repr_and_no_pickle(told, url, monkeypatch):
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + 40 * "f")
    sandbox = e2b(url)

    async def work() -> None:
        async with sandbox.open():
            pass

    with pytest.raises(EpisodeError, match="the key in E2B_API_KEY") as refused:
        run(work())
    kept = f"{refused.value} {sandbox!r} {E2bAccount(sandbox.settings)!r} {pickle.dumps(sandbox)!r}"
    assert 20 * "f" not in kept


# Law 14


def test_check_and_train_name_each_guarantee_that_a_service_does_not_promise(small_run, url, tmp_path):
    of_fusion = f"sandbox={{type: sandbox_fusion, url: {url}, patience_s: 20}}"
    of_e2b = "sandbox={type: e2b, patience_s: 20}"
    out = tmp_path / "out"
    commands = [("check", small_run, TOOL, of_fusion, f"out={out}"), ("train", small_run, TOOL, of_e2b, f"out={out}")]
    ended = run_commands(*commands, cwd=tmp_path, environment=environment_of(url))
    for said, unpromised in zip(ended, (SandboxFusionSettings.unpromised, E2bSettings().unpromised), strict=True):
        assert said.returncode == 2, said.stdout
        text = " ".join(said.stderr.decode().split())
        assert all(f"cannot guarantee {name}" in text for name in unpromised), text
        assert "sandbox.accept=[" in text
    assert not out.exists()


def test_check_begins_with_what_the_config_accepts_and_names_it(small_run, url):
    settings = load_run(
        small_run, [TOOL, f"sandbox={{type: sandbox_fusion, url: {url}, patience_s: 20, accept: [{ALL_OF_FUSION}]}}"]
    )
    found = {one.name: one for one in check_sandbox_of(settings)}
    assert found.keys() == GUARANTEES.keys()
    assert all("missing, and accepted" in one.found for name, one in found.items() if name != "output")
    assert found["output"].found == "held by the service"


def test_a_service_that_does_not_isolate_its_boxes_is_found_out(url):
    found = {one.name: one for one in probe_now(e2b(url), E2bSettings(accept=("syscalls", "pids", "output")))}
    through = {name for name, one in found.items() if not one.held}
    assert through == {"filesystem", "network", "processes"}
    assert "read a file of this machine" in found["filesystem"].found
    assert "connect to this machine" in found["network"].found


def test_a_service_that_isolates_its_boxes_is_accepted(small_run, told, url):
    told.isolates = True
    settings = load_run(small_run, [TOOL, "sandbox={type: e2b, patience_s: 20, accept: [syscalls, pids, output]}"])
    assert all(one.held for one in check_sandbox_of(settings))


def test_a_server_that_does_not_run_is_named_with_the_settings_to_look_at(small_run, monkeypatch):
    at = "sandbox={type: sandbox_fusion, url: http://127.0.0.1:9, retries: 0}"
    with pytest.raises(ConfigError, match=r"sandbox\.url=http://127\.0\.0\.1:9"):
        check_sandbox_of(load_run(small_run, [TOOL, at]))
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="E2B_API_KEY holds no key"):
        check_sandbox_of(load_run(small_run, [TOOL, "sandbox={type: e2b}"]))
