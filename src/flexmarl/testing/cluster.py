"""Conformance suite of clusters. Tests use the cluster `flexmarl.cluster.inproc.inproc_cluster(crosses=True)`."""
# ruff: noqa: D103  (the name of a check is its sentence)

import asyncio
import fcntl
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from flexmarl.cluster.interface import Cluster, Resident, ResidentKind, ResidentSpec
from flexmarl.cluster.proxy import alters, restores
from flexmarl.errors import ConfigError, MissingExtra, WorkerError
from flexmarl.events.run_events import WorkerLost
from flexmarl.records import WorkerId

LONGEST_S = 600.0
"""Time limit of a check; beyond it the cluster hangs. A busy machine may take minutes to start a few processes."""


class Probing(Protocol):
    """The contract of the objects that the checks host."""

    async def echo(self, value: Any) -> Any: ...

    async def later(self, value: Any) -> Any: ...

    async def wait(self) -> str: ...

    @alters
    async def change(self) -> None: ...

    async def open(self) -> None: ...

    async def passed(self) -> int: ...

    async def fail(self, kind: str) -> None: ...

    def count(self, to: int, *, stop_at: int | None = None) -> AsyncIterator[int]: ...

    async def readers(self) -> int: ...

    async def decode(self) -> None: ...

    @restores
    async def renew(self) -> None: ...

    async def close(self) -> None: ...


class Probe:
    """The object that the checks host: it answers, fails, and waits until `open` is called."""

    def __init__(self, name: str = "probe") -> None:
        self._name = name
        self._gate = asyncio.Event()
        self._passed = 0
        self._readers = 0

    def echo(self, value: Any) -> Any:
        """Returns the value."""
        return value

    async def later(self, value: Any) -> Any:
        """Returns the value after a turn of the event loop."""
        await asyncio.sleep(0)
        return value

    async def wait(self) -> str:
        """Waits until `open` is called, then returns the probe's name."""
        await self._gate.wait()
        self._passed += 1
        return self._name

    def open(self) -> None:
        """Ends all waits, present and future."""
        self._gate.set()

    def passed(self) -> int:
        """Returns how many waits have ended."""
        return self._passed

    async def change(self) -> None:
        """Alters the state: waits until `open` is called."""
        await self.wait()

    def renew(self) -> None:
        """Resets the state."""
        self._passed = 0

    async def count(self, to: int, *, stop_at: int | None = None) -> AsyncIterator[int]:
        """Yields 0 to `to` - 1. Raises ValueError at `stop_at`. If `to` is odd, waits for `open` at the end."""
        self._readers += 1
        try:
            for number in range(to):
                if number == stop_at:
                    raise ValueError(f"stopped at {number}")
                yield number
            if to % 2:
                await self._gate.wait()
        finally:
            self._readers -= 1

    def readers(self) -> int:
        """Returns how many streams are open."""
        return self._readers

    async def close(self) -> None:
        """Ends all waits."""
        self.open()

    def fail(self, kind: str) -> None:
        """Raises an error of this kind."""
        raise {"value": ValueError("torn"), "extra": MissingExtra("vllm", "speed"), "odd": odd_error()}[kind]


class LockingProbe(Probe):
    """A probe that holds a lock on a file until it is closed or its process ends."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = open(path, "w")  # noqa: SIM115  (it is open as long as the probe lives)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    async def close(self) -> None:
        """Ends all waits and lets go of the lock."""
        await super().close()
        self._file.close()


def odd_error() -> Exception:
    """Makes an error of a class that no other process can know."""

    class OddError(Exception):
        pass

    return OddError("only here")


def make_nothing() -> None:
    """Raises ConfigError, like a resident with wrong settings."""
    raise ConfigError("probe.size must be at least 1, got 0")


def probe(name: str, make: Callable[[], Any] | None = None) -> ResidentSpec[Probing]:
    """Specifies a resident that hosts a Probe."""
    return ResidentSpec(
        name=WorkerId(name),
        kind=ResidentKind.ENGINE,
        contract=Probing,
        make=make or partial(Probe, name),
        advice="try again",
    )


class Losses:
    """Collects the losses that a cluster reports."""

    def __init__(self, cluster: Cluster) -> None:
        self.seen: list[WorkerLost] = []
        self._first = asyncio.Event()
        cluster.events.listen(WorkerLost, self._lost)

    def _lost(self, lost: WorkerLost) -> None:
        self.seen.append(lost)
        self._first.set()

    async def first(self) -> WorkerLost:
        """Waits for the first loss and returns it."""
        await self._first.wait()
        return self.seen[0]


Kill = Callable[[Resident[Probing]], None]
"""Ends a resident's process from outside, as a crash would."""


async def check_cluster(cluster: Cluster, kill: Kill) -> None:
    """Runs every check on an open cluster with room for three residents, and closes it.

    Raises AssertionError or the cluster's own error, with a note that names the check.
    """
    (resident,) = await cluster.spawn([probe("shared")])
    for check in (*CALL_CHECKS, *LIFE_CHECKS):
        losses = Losses(cluster)
        try:
            async with asyncio.timeout(LONGEST_S):
                await (check(resident) if check in CALL_CHECKS else check(cluster, kill, losses))
        except Exception as error:
            error.add_note(f"in the conformance check: {check.__name__.replace('_', ' ')}")
            raise
    losses = Losses(cluster)
    await cluster.close()
    await cluster.close()
    assert "shared" in str(await raised(resident.remote.echo(1), WorkerError))
    assert not losses.seen, f"closing is no loss, got {losses.seen}"


async def raised(call: Any, kind: type[Exception]) -> Exception:
    """Returns the error of this kind that awaiting `call` raises. Raises AssertionError if there is none."""
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


async def arguments_and_results_are_copies(resident: Resident[Probing]) -> None:
    sent = {"ids": np.arange(3), "text": "é\0🙂", "nested": [(1, None)]}
    back = await resident.remote.echo(sent)
    assert back["nested"] == sent["nested"]
    assert back["text"] == sent["text"]
    back["ids"][0] = 7
    assert sent["ids"].tolist() == [0, 1, 2]


async def a_result_of_a_megabyte_comes_back_whole(resident: Resident[Probing]) -> None:
    sent = np.random.default_rng(0).bytes(2**20)
    assert await resident.remote.echo(sent) == sent


async def methods_may_be_async(resident: Resident[Probing]) -> None:
    assert await resident.remote.later(5) == 5


async def calls_run_at_the_same_time(resident: Resident[Probing]) -> None:
    waits = [asyncio.ensure_future(resident.remote.wait()) for _ in range(8)]
    await resident.remote.open()
    assert await asyncio.gather(*waits) == ["shared"] * 8


async def an_exception_comes_back_as_itself_with_the_resident_in_a_note(resident: Resident[Probing]) -> None:
    error = await raised(resident.remote.fail("value"), ValueError)
    assert error.args == ("torn",)
    notes = "\n".join(error.__notes__)
    assert resident.name in notes, notes
    assert "in fail" in notes, notes


async def an_exception_with_arguments_of_its_own_comes_back_too(resident: Resident[Probing]) -> None:
    error = await raised(resident.remote.fail("extra"), MissingExtra)
    assert isinstance(error, MissingExtra)
    assert error.extra == "vllm"
    assert str(MissingExtra("vllm", "speed")) in str(error)


async def an_exception_that_cannot_travel_is_described(resident: Resident[Probing]) -> None:
    assert "OddError: only here" in str(await raised(resident.remote.fail("odd"), RuntimeError))


async def a_method_that_is_not_there_is_named(resident: Resident[Probing]) -> None:
    assert "decode" in str(await raised(resident.remote.decode(), AttributeError))


async def a_stream_brings_its_items_in_order_and_its_error_as_itself(resident: Resident[Probing]) -> None:
    assert [number async for number in resident.remote.count(6)] == [0, 1, 2, 3, 4, 5]
    stream = resident.remote.count(6, stop_at=2)
    assert [await anext(stream), await anext(stream)] == [0, 1]
    assert (await raised(anext(stream), ValueError)).args == ("stopped at 2",)


async def streams_run_at_the_same_time(resident: Resident[Probing]) -> None:
    async def read(to: int) -> int:
        return len([number async for number in resident.remote.count(to)])

    lengths = [2 * number for number in range(40)]
    assert await asyncio.gather(*(read(to) for to in lengths)) == lengths


async def leaving_a_stream_early_closes_it_where_it_is(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    (resident,) = await cluster.spawn([probe("left")])
    stream = resident.remote.count(3)
    assert await anext(stream) == 0
    reading = asyncio.ensure_future(_read(resident.remote.count(5)))
    assert [await anext(stream), await anext(stream)] == [1, 2]
    while await resident.remote.readers() < 2:
        await resident.remote.later(None)
    await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
    reading.cancel()
    while await resident.remote.readers():
        await resident.remote.later(None)
    assert [number async for number in resident.remote.count(2)] == [0, 1]
    await resident.stop()


async def _read(stream: AsyncIterator[int]) -> list[int]:
    return [number async for number in stream]


async def after_a_cancelled_change_calls_are_refused_until_the_state_is_renewed(
    cluster: Cluster, kill: Kill, losses: Losses
) -> None:
    if not cluster.crosses:  # Without a crossing, the called object itself decides what a cancellation does.
        return
    (resident,) = await cluster.spawn([probe("changed")])
    change = asyncio.ensure_future(resident.remote.change())
    await resident.remote.later(None)
    change.cancel()
    await asyncio.wait([change])
    text = str(await raised(resident.remote.passed(), WorkerError))
    assert "changed: 'change' was cancelled" in text, text
    assert "try again" in text, text
    await resident.remote.renew()
    assert await resident.remote.passed() == 0
    await resident.stop()


async def closing_what_lives_there_ends_the_resident(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    if not cluster.crosses:
        return
    (resident,) = await cluster.spawn([probe("closed")])
    reading = asyncio.ensure_future(_read(resident.remote.count(3)))
    await resident.remote.later(None)
    await resident.remote.close()
    await resident.remote.close()
    assert await reading == [0, 1, 2], "what is under way is answered before the end"
    assert "closed" in str(await raised(resident.remote.echo(1), WorkerError))
    assert not losses.seen, f"closing is no loss, got {losses.seen}"


async def cancelling_a_call_stops_the_wait_and_not_the_work(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    (resident,) = await cluster.spawn([probe("cancelled")])
    wait = asyncio.ensure_future(resident.remote.wait())
    await resident.remote.echo("the wait has arrived, calls keep their order")
    wait.cancel()
    await asyncio.wait([wait])
    await resident.remote.open()
    while await resident.remote.passed() == 0:
        await resident.remote.later(None)
    await resident.stop()


async def an_error_of_make_comes_back_and_leaves_none(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    for _ in range(2):
        error = await raised(cluster.spawn([probe("good"), probe("bad", make_nothing)]), ConfigError)
        assert "probe.size" in str(error)
    (resident,) = await cluster.spawn([probe("good")])  # its name and its room are free again
    await resident.stop()
    assert not losses.seen, f"nobody died, got {losses.seen}"


async def an_error_of_make_leaves_no_object_either(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    with tempfile.TemporaryDirectory() as folder:
        held = probe("held", partial(LockingProbe, f"{folder}/lock"))
        await raised(cluster.spawn([held, probe("bad", make_nothing)]), ConfigError)
        (resident,) = await cluster.spawn([held])  # BlockingIOError if the object of the first spawn still lives
        await resident.stop()


async def a_name_of_a_live_resident_is_refused(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    assert "twin" in str(await raised(cluster.spawn([probe("twin"), probe("twin")]), ConfigError))
    (first,) = await cluster.spawn([probe("twin")])
    assert "twin" in str(await raised(cluster.spawn([probe("twin")]), ConfigError))
    assert await first.remote.echo(1) == 1
    await first.stop()
    (again,) = await cluster.spawn([probe("twin")])
    await again.stop()


async def residents_of_a_group_are_on_one_node(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    residents = await cluster.spawn([replace(probe(f"pair/{number}"), group="pair") for number in range(2)])
    assert len({resident.place.node for resident in residents}) == 1
    for resident in residents:
        await resident.stop()


async def more_than_there_is_room_for_is_refused(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    await raised(cluster.spawn([probe(f"crowd/{number}") for number in range(4)]), ConfigError)
    for resident in await cluster.spawn([probe("crowd/0"), probe("crowd/1")]):
        await resident.stop()


async def a_death_fails_its_calls_and_is_told_once(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    dies, lives = await cluster.spawn([probe("dies"), probe("lives")])
    place = dies.place
    waits = [asyncio.ensure_future(dies.remote.wait()) for _ in range(2)]
    await dies.remote.later(None)
    kill(dies)
    for wait in waits:
        assert "dies" in str(await raised(wait, WorkerError))
        assert losses.seen, "who learns of a death from a call finds it in the journal"
    lost = await losses.first()
    assert "dies" in str(await raised(dies.remote.echo(1), WorkerError))
    assert await lives.remote.echo(1) == 1
    assert (lost.process, lost.node, lost.pid) == ("dies", place.node, place.pid)
    assert lost.because
    await dies.stop()
    await lives.stop()
    assert losses.seen == [lost]


async def a_death_is_told_though_nobody_calls(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    (idle,) = await cluster.spawn([probe("idle")])
    kill(idle)
    assert (await losses.first()).process == "idle"
    (again,) = await cluster.spawn([probe("idle")])
    assert await again.remote.echo(1) == 1
    await again.stop()


async def a_stop_is_no_loss_and_fails_calls_under_way(cluster: Cluster, kill: Kill, losses: Losses) -> None:
    (resident,) = await cluster.spawn([probe("stopped")])
    wait = asyncio.ensure_future(resident.remote.wait())
    await resident.remote.later(None)
    await resident.stop()
    await resident.stop()
    for call in (wait, resident.remote.echo(1)):
        assert "stopped" in str(await raised(call, WorkerError))
    assert not losses.seen, f"a stop is no loss, got {losses.seen}"


CALL_CHECKS: tuple[Callable[..., Any], ...] = (
    arguments_and_results_are_copies,
    a_result_of_a_megabyte_comes_back_whole,
    methods_may_be_async,
    calls_run_at_the_same_time,
    an_exception_comes_back_as_itself_with_the_resident_in_a_note,
    an_exception_with_arguments_of_its_own_comes_back_too,
    an_exception_that_cannot_travel_is_described,
    a_method_that_is_not_there_is_named,
    a_stream_brings_its_items_in_order_and_its_error_as_itself,
    streams_run_at_the_same_time,
)
LIFE_CHECKS: tuple[Callable[..., Any], ...] = (
    cancelling_a_call_stops_the_wait_and_not_the_work,
    an_error_of_make_comes_back_and_leaves_none,
    an_error_of_make_leaves_no_object_either,
    a_name_of_a_live_resident_is_refused,
    residents_of_a_group_are_on_one_node,
    more_than_there_is_room_for_is_refused,
    a_death_fails_its_calls_and_is_told_once,
    a_death_is_told_though_nobody_calls,
    a_stop_is_no_loss_and_fails_calls_under_way,
    leaving_a_stream_early_closes_it_where_it_is,
    after_a_cancelled_change_calls_are_refused_until_the_state_is_renewed,
    closing_what_lives_there_ends_the_resident,
)
