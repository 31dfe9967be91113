import asyncio
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.cluster.host import Host, answer, packed
from flexmarl.errors import StoreError, WorkerError
from flexmarl.experience.backends.remote import LANES, MAX_TOGETHER, MAX_WAITING, RemoteStore, StoreHost
from flexmarl.experience.backends.sqlite import DurableStore, SqliteStore
from flexmarl.experience.interface import Column
from flexmarl.records import AgentName, EpisodeId, GroupId, RowState
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.experience import (
    AGENTS,
    COLUMNS,
    READY,
    SHARED,
    SOLVER,
    check_experience_store,
    partial,
    sample,
)

FOREVER = "forever"


class HostAddress:
    """Reaches what lives in a host of this process. Everything is copied, as between nodes; a crossing takes 1 s."""

    def __init__(self, make: Callable[..., StoreHost], *args: Any) -> None:
        self.crossings: list[list[str]] = []
        """The methods of each crossing."""
        self._host, self._make = Host(), packed(make, *args)

    def restart(self) -> None:
        """The process dies, with what it has under way, and another takes its place."""
        self._host = Host()

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._host.hosted is None:
            answer(await self._host.make_hosted(self._make))
        arguments = packed(*args, **kwargs)
        if method == "answer_all":
            self.crossings.append([name for name, _ in args[0]])
        return answer(await self._host.call_method(method, arguments))


class LocalAddress:
    """Reaches a store in memory. The plan says of each crossing whether it is lost before or after its work."""

    def __init__(self, *plan: str, crossing_s: float = 1.0) -> None:
        self.store = SqliteStore(agents=AGENTS, columns=COLUMNS)
        self.crossings: list[list[str]] = []
        self.lost: list[str] = []
        self._service, self._plan, self._crossing_s = StoreHost(self.store), list(plan), crossing_s

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        arguments = pickle.loads(packed(*args, **kwargs))
        self.crossings.append([name for name, _ in args[0]])
        fault = self._plan[0] if self._plan[:1] == [FOREVER] else self._plan.pop(0) if self._plan else ""
        await asyncio.sleep(self._crossing_s)
        if fault in ("before", FOREVER):
            self.lost.append(fault)
            raise WorkerError("store/0 was killed")
        replies = await getattr(self._service, method)(*arguments[0], **arguments[1])
        if fault == "after":
            self.lost.append(fault)
            raise WorkerError("store/0 was killed")
        return pickle.loads(pickle.dumps(replies))


class FromTwoNodes:
    """A store whose reads and writes of rows come from another node, and the rest from the owner."""

    def __init__(self, owner: DurableStore, address: HostAddress) -> None:
        self._owner, self._address, self._remote = owner, address, RemoteStore(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote if name in LANES else self._owner, name)

    async def close(self) -> None:
        await self._remote.close()
        await self._address.call("close")
        await self._owner.close()


def from_two_nodes(path: Path, agents: Sequence[AgentName] = AGENTS, columns: Sequence[Column] = COLUMNS) -> Any:
    owner = DurableStore.create(path, agents=agents, columns=columns)
    return FromTwoNodes(owner, HostAddress(StoreHost.join, path))


def test_the_suite_holds_on_two_nodes(tmp_path: Path):
    paths = iter(tmp_path / f"{number}.sqlite" for number in range(99))
    asyncio.run(check_experience_store(lambda agents, columns: from_two_nodes(next(paths), agents, columns)))


def test_a_process_that_dies_after_a_commit_is_replaced_and_the_row_is_there_once(tmp_path: Path):
    async def life() -> None:
        path = tmp_path / "experience.sqlite"
        owner = DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
        address = Dying(StoreHost.join, path)
        store = RemoteStore(address)
        await store.put(SOLVER, [partial(sample(0), text="prompt", tensor=np.arange(3))])
        assert (address.deaths, len(address.crossings)) == (1, 2)
        assert await owner.counts(SHARED) == await store.counts(SHARED) == {RowState.OPEN: 1}
        assert (await owner.query("SELECT count(*) FROM payloads")).rows == ((2,),)
        await address.call("close")
        await owner.close()

    asyncio.run(life())


class Dying(HostAddress):
    """Dies once, after the first crossing did its work."""

    deaths = 0

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        result = await super().call(method, *args, **kwargs)
        if method == "answer_all" and not self.deaths:
            self.deaths += 1
            await super().call("close")  # ends the threads that a dead process would not have
            self.restart()
            raise WorkerError("store/0 was killed")
        return result


def test_calls_that_arrive_during_a_crossing_share_the_next_one_of_their_kind():
    async def life() -> float:
        address = LocalAddress()
        store = RemoteStore(address)
        first = asyncio.create_task(store.put(SOLVER, [partial(sample(0))]))
        await asyncio.sleep(0.5)
        number = 2 * MAX_TOGETHER + 5
        await asyncio.gather(
            first, store.counts(SHARED), *(store.put(SOLVER, [partial(sample(1 + i))]) for i in range(number))
        )
        assert await store.counts(SHARED) == {RowState.OPEN: 1 + number}
        assert sorted(map(len, address.crossings)) == [1, 1, 1, 5, MAX_TOGETHER, MAX_TOGETHER]
        return asyncio.get_running_loop().time()

    assert run_virtual(life()) == 5.0  # four crossings of puts, with one of counts beside them, and one of counts


def test_more_calls_than_may_wait_wait_for_room():
    async def life() -> None:
        address = LocalAddress()
        store = RemoteStore(address)
        puts = [asyncio.create_task(store.put(SOLVER, [partial(sample(i))])) for i in range(MAX_WAITING + 10)]
        await asyncio.sleep(0.5)
        assert len(store._lanes["write"]._waiting) == MAX_WAITING - MAX_TOGETHER
        await asyncio.gather(*puts)
        assert await store.counts(SHARED) == {RowState.OPEN: MAX_WAITING + 10}

    run_virtual(life())


def test_calls_wait_while_the_process_is_started_anew():
    async def life() -> float:
        address = LocalAddress("before", "after", "before")
        store = RemoteStore(address)
        await asyncio.gather(*(store.put(SOLVER, [partial(sample(i), int=i)]) for i in range(3)))
        assert address.lost == ["before", "after", "before"]
        assert [row.values["int"] for row in await store.get([sample(2), sample(0)])] == [2, 0]
        return asyncio.get_running_loop().time()

    assert run_virtual(life()) == pytest.approx(4 * 1.0 + 0.1 + 0.2 + 0.4 + 1.0)


def test_after_the_patience_every_call_that_waits_raises_an_error_that_names_the_process():
    async def life() -> None:
        address = LocalAddress(FOREVER)
        store, clock = RemoteStore(address), asyncio.get_running_loop().time
        first = asyncio.create_task(store.put(SOLVER, [partial(sample(0))]))
        await asyncio.sleep(30)
        ends = await asyncio.gather(first, store.put(SOLVER, [partial(sample(1))]), return_exceptions=True)
        assert 60 <= clock() <= 63
        for end in ends:
            assert isinstance(end, StoreError)
            assert all(word in str(end) for word in ("'put' of store/0", "60 s", "was killed", "--resume"))
        with pytest.raises(StoreError, match="9 s"):
            await RemoteStore(address, "store/0", 9.0).get([sample(0)])
        address._plan.clear()
        await store.put(SOLVER, [partial(sample(2))])
        assert await store.counts(SHARED) == {RowState.OPEN: 1}

    run_virtual(life())


def test_an_error_of_one_call_reaches_its_caller_alone():
    async def life() -> None:
        address = LocalAddress()
        store = RemoteStore(address)
        rows = [partial(sample(0), int=1), partial(sample(1), int="two"), partial(sample(2), json=lambda: 3)]
        ends = await asyncio.gather(*(store.put(SOLVER, [row]) for row in rows), return_exceptions=True)
        assert ends[0] is None
        assert isinstance(ends[1], StoreError)
        assert "int does not take 'two'" in str(ends[1])
        assert "in store/0" in ends[1].__notes__[0]
        assert isinstance(ends[2], StoreError)
        assert "pickle" in str(ends[2])
        assert await store.counts(SHARED) == {RowState.OPEN: 1}

    run_virtual(life())


def test_an_address_that_breaks_fails_the_calls_of_that_crossing_as_errors_of_the_store():
    class Breaking(LocalAddress):
        async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
            if not self.crossings:
                self.crossings.append([])
                raise OSError("no route to host")
            return await super().call(method, *args, **kwargs)

    async def life() -> None:
        store = RemoteStore(Breaking())
        with pytest.raises(StoreError, match=r"'counts' of store/0: OSError: no route to host"):
            await store.counts(SHARED)
        assert await store.counts(SHARED) == {}

    run_virtual(life())


def test_a_caller_that_is_cancelled_leaves_the_others_alone_and_its_later_discard_comes_after_its_put():
    async def life() -> None:
        address = LocalAddress("before")
        store = RemoteStore(address)
        puts = [asyncio.create_task(store.put(SOLVER, [partial(sample(i))])) for i in range(3)]
        await asyncio.sleep(1.05)  # the first crossing was lost
        waiting = asyncio.create_task(store.put(SOLVER, [partial(sample(3))]))
        await asyncio.sleep(0)
        for cancelled in (puts[0], waiting):
            cancelled.cancel()
        await asyncio.sleep(0.5)
        puts[1].cancel()  # during the second crossing
        assert await store.discard([EpisodeId("g1e0a0")]) == 1
        ends = await asyncio.gather(*puts, waiting, return_exceptions=True)
        assert [isinstance(end, asyncio.CancelledError) for end in ends] == [True, True, False, True]
        assert address.crossings == [["put"] * 3, ["put"] * 2, ["discard"]]
        assert (await store.get([sample(2)]))[0].state is RowState.OPEN
        assert await store.counts(SHARED) == {RowState.OPEN: 1}

    run_virtual(life())


def test_a_discard_whose_answer_was_lost_is_repeated():
    async def life() -> None:
        address = LocalAddress("", "after")
        store = RemoteStore(address)
        await store.put(SOLVER, [partial(sample(0)), partial(sample(1))])
        assert await store.discard([EpisodeId("g0e0a0")]) == 0
        assert address.lost == ["after"]
        assert await store.counts(SHARED) == {RowState.OPEN: 1}

    run_virtual(life())


def test_a_store_in_use_can_be_pickled_and_its_copy_is_another_client():
    async def life() -> None:
        store = RemoteStore(Shared())
        putting = asyncio.create_task(store.put(SOLVER, [partial(sample(0))]))
        await asyncio.sleep(0.5)
        copy = pickle.loads(pickle.dumps(store))
        await putting
        await store.close()
        assert await copy.counts(SHARED) == {RowState.OPEN: 1}
        with pytest.raises(StoreError, match="closed"):
            await store.counts(SHARED)

    run_virtual(life())


class Shared(LocalAddress):
    """An address that is the same wherever it is sent, as an actor's handle is."""

    made: "Shared"

    def __init__(self) -> None:
        super().__init__()
        Shared.made = self

    def __reduce__(self) -> Any:
        return _shared, ()


def _shared() -> Shared:
    return Shared.made


def test_closing_waits_for_calls_under_way():
    async def life() -> None:
        address = LocalAddress()
        store = RemoteStore(address)
        putting = asyncio.create_task(store.put(SOLVER, [partial(sample(0))]))
        await asyncio.sleep(0.5)
        await store.close()
        assert await address.store.counts(SHARED) == {RowState.OPEN: 1}
        await putting

    run_virtual(life())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("claim", lambda store: store.claim(SHARED, 1)),
        ("settle", lambda store: store.settle([sample(0)], READY)),
        ("release", lambda store: store.release(cache="c")),
        ("rewind", lambda store: store.rewind(GroupId(0))),
        ("prune", lambda store: store.prune(GroupId(0), 0)),
    ],
)
def test_only_the_controller_moves_rows_through_their_lives(name, call):
    async def life() -> None:
        address = LocalAddress()
        with pytest.raises(StoreError, match=rf"'{name}'.*only the controller"):
            await call(RemoteStore(address))
        (reply,) = await StoreHost(address.store).answer_all([(name, packed())])
        with pytest.raises(StoreError, match="only the controller"):
            answer(reply)
        assert not address.crossings

    run_virtual(life())


CALLS = st.tuples(st.floats(0.0, 6.0), st.integers(0, 3), st.integers(0, 2), st.one_of(st.none(), st.floats(0.0, 3.0)))
"""When a caller puts, which row, which value, and after how many seconds it is cancelled, if it is."""


@given(st.lists(CALLS, min_size=1, max_size=25), st.lists(st.sampled_from(["", "before", "after"]), max_size=12))
@settings(max_examples=200, deadline=None)
def test_whatever_is_lost_no_row_is_lost_or_doubled_and_each_caller_gets_its_own_answer(calls, plan):
    async def life() -> None:
        address = LocalAddress(*plan)
        store = RemoteStore(address)

        async def put_and_read(begin_s: float, row: int, value: int) -> Any:
            await asyncio.sleep(begin_s)
            await store.put(SOLVER, [partial(sample(row), int=value, tensor=np.full(3, row))])
            (found,) = await store.get([sample(row)])
            return found.sample_id, found.values["int"]

        async def call(begin_s: float, row: int, value: int, left_after_s: float | None) -> Any:
            async with asyncio.timeout(None if left_after_s is None else begin_s + left_after_s):
                return await put_and_read(begin_s, row, value)

        ends = await asyncio.gather(*(call(*one) for one in calls), return_exceptions=True)
        await store.close()
        assert sorted(address.lost) == sorted(fault for fault in plan[: len(address.crossings)] if fault)
        kept = dict((await address.store.query("SELECT sample_id, int FROM solver")).rows)
        payloads = (await address.store.query("SELECT count(*) FROM payloads")).rows
        assert payloads == ((len(kept),),)
        for (_, row, value, _), end in zip(calls, ends, strict=True):
            if isinstance(end, TimeoutError):
                continue
            if kept[sample(row)] == value:
                assert end == (sample(row), value)
            else:
                assert isinstance(end, StoreError)
                assert f"{sample(row)!r}: int is {kept[sample(row)]} and cannot become {value}" in str(end)

    run_virtual(life())
