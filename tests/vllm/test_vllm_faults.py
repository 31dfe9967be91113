"""vLLM's processes are killed, stopped or starved: every call ends, the engine says so, and nothing of it stays."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from flexmarl.errors import EngineError
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import canary_key, weights_key
from flexmarl.records import FinishReason, InstanceId, Version
from tests.vllm.conftest import POLICY, Served, ServedAdapters, ask

LOST = InstanceId(POLICY, 0)


def children() -> list[psutil.Process]:
    """The processes of the test's only engine."""
    return [one for one in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(_words(one))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def part(name: str) -> psutil.Process:
    """The process of vLLM's core, or of its worker."""
    (found,) = [one for one in children() if name in " ".join(_words(one))]
    return found


def left() -> set[str]:
    """Names in shared memory and in the temp folder that an engine could leave."""
    temp = Path(tempfile.gettempdir())
    return {path.name for path in (*Path("/dev/shm").glob("psm_*"), *temp.glob("flexmarl-adapter-*"))}


def sockets() -> set[str]:
    """Names of sockets in the temp folder, and of folders for those of this process's engines."""
    temp = Path(tempfile.gettempdir())
    folders = temp.glob(f"flexmarl-vllm-{os.getpid()}-*")
    return {path.name for path in (*folders, *filter(Path.is_socket, temp.iterdir()))}


NOT_OURS = sockets()
"""Those that were there before any engine."""


async def closed(served: Served, before: set[str]) -> None:
    """Closes the engine, and checks that nothing is left of it."""
    processes = children()
    await served.engine.close()
    gone, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, f"still there: {alive}, gone: {gone}"
    assert left() <= before
    assert sockets() <= NOT_OURS


CLOSED = """
import sys
from pathlib import Path
from tests.vllm.conftest import ask, serving
def main():
    for served in serving(Path(sys.argv[1])):
        served.runner.run(served.all([ask("one", max_tokens=4)]))
main()
"""


def test_an_engine_that_is_closed_reports_no_failure(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert not [line for line in ended.stderr.splitlines() if re.search("Exception|Error|failed|shared_memory", line)]


@pytest.mark.parametrize("name", ["EngineCore", "Worker"])
def test_a_process_that_is_killed_while_weights_are_loaded_costs_the_engine_and_leaves_nothing(
    doomed: Served, name: str
) -> None:
    async def check() -> None:
        before = left()
        running = asyncio.ensure_future(doomed.all([ask(f"r{n}", seed=n, max_tokens=250) for n in range(4)]))
        await doomed.publish(1)
        loading = asyncio.ensure_future(doomed.engine.load_weights(POLICY, Version(1)))
        while doomed.engine._may_go.is_set():  # noqa: ASYNC110 - the load has begun when requests may not go
            await asyncio.sleep(0)
        part(name).kill()
        with pytest.raises(EngineError, match=r"loading 'weights/solver/1'|is lost"):  # Whoever notices first.
            await loading
        with pytest.raises(EngineError, match="is lost"):
            await running
        with pytest.raises(EngineError, match="is lost"):
            await doomed.all([ask("later", max_tokens=1)])
        await closed(doomed, before)

    doomed.runner.run(check())


def test_a_core_that_hangs_is_given_up_by_the_pool_with_the_tokens_that_it_has_answered(doomed: Served) -> None:
    async def check() -> None:
        before = left()
        settings = PoolSettings(replacements=0, abort_grace_s=2.0, close_timeout_s=60.0)
        async with InferencePool({POLICY: [doomed.engine]}, settings).open() as pool:
            whole = await pool.generate(ask("whole", max_tokens=8), timeout_s=60)
            assert (len(whole.response_ids), whole.finish) == (8, FinishReason.LENGTH)
            core = part("EngineCore")
            core.send_signal(signal.SIGSTOP)
            cut = await pool.generate(ask("cut", max_tokens=8), timeout_s=2)
            assert core.status() == psutil.STATUS_STOPPED, "the core must have hung"
            assert (len(cut.response_ids), cut.finish) == (0, FinishReason.ABORT)
            assert "left an abort unanswered" in pool.lost[LOST]
            with pytest.raises(EngineError, match="no instance of 'solver' is left"):
                await pool.generate(ask("later", max_tokens=1))
        await closed(doomed, before)

    doomed.runner.run(check())


def test_a_load_on_a_core_that_hangs_ends_with_its_time_and_with_its_engine(doomed_adapted: ServedAdapters) -> None:
    async def check() -> None:
        before, engine = left(), doomed_adapted.engine
        await doomed_adapted.load_next_adapter()
        await doomed_adapted.publish_adapter(99)
        core = part("EngineCore")
        core.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await engine.load_weights(POLICY, Version(99))
        assert left() <= before
        loading = asyncio.ensure_future(engine.load_weights(POLICY, Version(99)))
        await asyncio.sleep(1)
        assert not loading.done(), "the core must hang"
        await closed(doomed_adapted, before)
        with pytest.raises(EngineError, match="is closed"):
            await loading
        assert left() <= before

    doomed_adapted.runner.run(check())


def test_weights_that_came_otherwise_than_promised_in_its_sleep_are_not_served(doomed: Served) -> None:
    async def check() -> None:
        before = left()
        await doomed.engine.sleep()
        promised = await doomed.publish(1)
        assert await doomed.engine.load_weights(POLICY, Version(1)) == promised
        await doomed.publish(2)
        for key in (weights_key, canary_key):
            other = await doomed.store.get(key(POLICY, Version(2)))
            await doomed.store.release(key(POLICY, Version(1)))
            await doomed.store.set(key(POLICY, Version(1)), other)
        with pytest.raises(EngineError, match=f"version 1 of 'solver' had checksum {promised}, but came as"):
            await doomed.engine.wake()
        await closed(doomed, before)

    doomed.runner.run(check())


def test_an_engine_that_is_closed_while_it_wakes_leaves_nothing(doomed: Served) -> None:
    async def check() -> None:
        before = left()
        await doomed.engine.sleep()
        waking = asyncio.ensure_future(doomed.engine.wake())
        await asyncio.sleep(1)
        assert not waking.done()
        waking.cancel()
        await doomed.engine.close()
        await doomed.engine._parts.thread.run(int)  # What was being started has started, and was ended.
        gone, alive = psutil.wait_procs(children(), timeout=60)
        assert not alive, f"still there: {alive}, gone: {gone}"
        assert left() <= before

    doomed.runner.run(check())


def test_a_second_abort_does_not_answer_for_a_core_that_hangs(doomed: Served) -> None:
    async def check() -> None:
        before = left()
        await doomed.all([ask("warm", max_tokens=2)])
        running = asyncio.ensure_future(doomed.all([ask("one", max_tokens=250)]))
        await asyncio.sleep(0.3)
        part("EngineCore").send_signal(signal.SIGSTOP)
        for _ in range(3):
            await doomed.engine.abort(["one"])
            await asyncio.sleep(0.3)
        assert not running.done(), "its tokens have come, and no sign of the core"
        await closed(doomed, before)
        (cut,) = await running
        assert cut.finish is FinishReason.ABORT

    doomed.runner.run(check())


def test_a_worker_without_memory_fails_and_the_engine_is_lost_with_its_calls(doomed: Served) -> None:
    async def check() -> None:
        before = left()
        await doomed.all([ask("warm", max_tokens=2)])
        worker = part("Worker")
        worker.rlimit(psutil.RLIMIT_AS, (worker.memory_info().vms, worker.memory_info().vms))
        prompts = [
            [(n * m) % 90 for m in range(200)] for n in range(1, 33)
        ]  # 6 400 tokens: more than its heap has free
        calls = [ask(f"r{n}", prompt=prompt, max_tokens=50) for n, prompt in enumerate(prompts)]
        with pytest.raises(EngineError, match="is lost"):
            await doomed.all(calls)
        await closed(doomed, before)

    doomed.runner.run(check())
