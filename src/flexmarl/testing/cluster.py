"""What every backend of a cluster must do. The fake one is `flexmarl.simulator.cluster.SimulatedCluster`."""
# ruff: noqa: D103  (the name of a check is its sentence)

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from flexmarl.cluster.interface import Cluster, Worker, WorkerRole, WorkerSpec
from flexmarl.errors import ConfigError, MissingExtra, WorkerError
from flexmarl.records import WorkerLost

LONGEST_S = 600.0
"""A check that waits longer than that has found a hang: a busy machine may take minutes to start a few processes."""


class Probe:
    """What the checks host: it answers, fails, and waits until it is told to go on."""

    def __init__(self, name: str = "probe") -> None:
        self._name = name
        self._gate = asyncio.Event()
        self._passed = 0

    def echo(self, value: Any) -> Any:
        """The value."""
        return value

    async def later(self, value: Any) -> Any:
        """The value, after a turn of the event loop."""
        await asyncio.sleep(0)
        return value

    async def wait(self) -> str:
        """Its name, when `open` was called."""
        await self._gate.wait()
        self._passed += 1
        return self._name

    def open(self) -> None:
        """Lets everybody pass who waits."""
        self._gate.set()

    def passed(self) -> int:
        """How many waits ended."""
        return self._passed

    def fail(self, kind: str) -> None:
        """Raises an error of this kind."""
        raise {"value": ValueError("torn"), "extra": MissingExtra("vllm", "speed"), "odd": odd_error()}[kind]


def odd_error() -> Exception:
    """An error of a class that no other process can know."""

    class OddError(Exception):
        pass

    return OddError("only here")


def make_nothing() -> None:
    """Fails as a host does whose settings are wrong."""
    raise ConfigError("probe.size must be at least 1, got 0")


def probe(name: str, make: Callable[[], Any] | None = None) -> WorkerSpec:
    """A worker that hosts a Probe."""
    return WorkerSpec(name=name, role=WorkerRole.ENGINE, make=make or partial(Probe, name))


class Losses:
    """The losses that a cluster told of."""

    def __init__(self) -> None:
        self.told: list[WorkerLost] = []
        self._first = asyncio.Event()

    def __call__(self, lost: WorkerLost) -> None:
        """Takes one."""
        self.told.append(lost)
        self._first.set()

    async def first(self) -> WorkerLost:
        """The first, when there is one."""
        await self._first.wait()
        return self.told[0]


Kill = Callable[[Worker], None]
"""Ends a worker's process from outside, as a crash would."""


async def check_cluster(cluster: Cluster, kill: Kill) -> None:
    """Runs every check on an open cluster with room for three workers, and closes it.

    Raises AssertionError or the cluster's own error, noting the check.
    """
    (worker,) = await cluster.spawn([probe("shared")])
    for check in (*CALL_CHECKS, *LIFE_CHECKS):
        cluster.on_lost = losses = Losses()
        try:
            async with asyncio.timeout(LONGEST_S):
                await (check(worker) if check in CALL_CHECKS else check(cluster, kill, losses))
        except Exception as error:
            error.add_note(f"in the conformance check: {check.__name__.replace('_', ' ')}")
            raise
    cluster.on_lost = losses = Losses()
    await cluster.close()
    await cluster.close()
    assert "shared" in str(await raised(worker.call("echo", 1), WorkerError))
    assert not losses.told, f"closing is no loss, got {losses.told}"


async def raised(call: Any, kind: type[Exception]) -> Exception:
    """The error of this kind that awaiting `call` raises."""
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


async def arguments_and_results_are_copies(worker: Worker) -> None:
    sent = {"ids": np.arange(3), "text": "é\0🙂", "nested": [(1, None)]}
    back = await worker.call("echo", sent)
    assert back["nested"] == sent["nested"]
    assert back["text"] == sent["text"]
    back["ids"][0] = 7
    assert sent["ids"].tolist() == [0, 1, 2]


async def a_result_of_a_megabyte_comes_back_whole(worker: Worker) -> None:
    sent = np.random.default_rng(0).bytes(2**20)
    assert await worker.call("echo", sent) == sent


async def methods_may_be_async(worker: Worker) -> None:
    assert await worker.call("later", 5) == 5


async def calls_run_at_the_same_time(worker: Worker) -> None:
    waits = [asyncio.ensure_future(worker.call("wait")) for _ in range(8)]
    await worker.call("open")
    assert await asyncio.gather(*waits) == ["shared"] * 8


async def an_exception_comes_back_as_itself_with_the_worker_in_a_note(worker: Worker) -> None:
    error = await raised(worker.call("fail", "value"), ValueError)
    assert error.args == ("torn",)
    notes = "\n".join(error.__notes__)
    assert worker.name in notes, notes
    assert "in fail" in notes, notes


async def an_exception_with_arguments_of_its_own_comes_back_too(worker: Worker) -> None:
    error = await raised(worker.call("fail", "extra"), MissingExtra)
    assert isinstance(error, MissingExtra)
    assert error.extra == "vllm"
    assert "flexmarl[vllm]" in str(error)


async def an_exception_that_cannot_travel_is_described(worker: Worker) -> None:
    assert "OddError: only here" in str(await raised(worker.call("fail", "odd"), RuntimeError))


async def a_method_that_is_not_there_is_named(worker: Worker) -> None:
    assert "decode" in str(await raised(worker.call("decode"), AttributeError))


async def cancelling_a_call_stops_the_wait_and_not_the_work(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    (worker,) = await cluster.spawn([probe("cancelled")])
    wait = asyncio.ensure_future(worker.call("wait"))
    await worker.call("echo", "the wait has arrived, calls keep their order")
    wait.cancel()
    await asyncio.wait([wait])
    await worker.call("open")
    while await worker.call("passed") == 0:
        await worker.call("later", None)
    await worker.stop()


async def an_error_of_make_comes_back_and_leaves_none(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    for _ in range(2):
        error = await raised(cluster.spawn([probe("good"), probe("bad", make_nothing)]), ConfigError)
        assert "probe.size" in str(error)
    (worker,) = await cluster.spawn([probe("good")])  # its name and its room are free again
    await worker.stop()
    assert not losses.told, f"nobody died, got {losses.told}"


async def a_death_fails_its_calls_and_is_told_once(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    dies, lives = await cluster.spawn([probe("dies"), probe("lives")])
    place = dies.place
    waits = [asyncio.ensure_future(dies.call("wait")) for _ in range(2)]
    await dies.call("later", None)
    kill(dies)
    for wait in waits:
        assert "dies" in str(await raised(wait, WorkerError))
    lost = await losses.first()
    assert "dies" in str(await raised(dies.call("echo", 1), WorkerError))
    assert await lives.call("echo", 1) == 1
    assert (lost.name, lost.node, lost.pid) == ("dies", place.node, place.pid)
    assert lost.because
    await dies.stop()
    await lives.stop()
    assert losses.told == [lost]


async def a_death_is_told_though_nobody_calls(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    (idle,) = await cluster.spawn([probe("idle")])
    kill(idle)
    assert (await losses.first()).name == "idle"
    (again,) = await cluster.spawn([probe("idle")])
    assert await again.call("echo", 1) == 1
    await again.stop()


async def a_stop_is_no_loss_and_fails_calls_under_way(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    (worker,) = await cluster.spawn([probe("stopped")])
    wait = asyncio.ensure_future(worker.call("wait"))
    await worker.call("later", None)
    await worker.stop()
    await worker.stop()
    for call in (wait, worker.call("echo", 1)):
        assert "stopped" in str(await raised(call, WorkerError))
    assert not losses.told, f"a stop is no loss, got {losses.told}"


CALL_CHECKS: tuple[Callable[..., Any], ...] = (
    arguments_and_results_are_copies,
    a_result_of_a_megabyte_comes_back_whole,
    methods_may_be_async,
    calls_run_at_the_same_time,
    an_exception_comes_back_as_itself_with_the_worker_in_a_note,
    an_exception_with_arguments_of_its_own_comes_back_too,
    an_exception_that_cannot_travel_is_described,
    a_method_that_is_not_there_is_named,
)
LIFE_CHECKS: tuple[Callable[..., Any], ...] = (
    cancelling_a_call_stops_the_wait_and_not_the_work,
    an_error_of_make_comes_back_and_leaves_none,
    a_death_fails_its_calls_and_is_told_once,
    a_death_is_told_though_nobody_calls,
    a_stop_is_no_loss_and_fails_calls_under_way,
)
