"""Experience store of another node: calls cross to the resident `store/0`, which has joined the file, in batches.

    other node                                                        node with the file
    put, discard ──► lane ──► crossing, one at a time per lane ──►.
    get          ──► lane ──► ...                                 +── StoreHost ──► DurableStore
    counts       ──► lane ──► ...                                 │
    query        ──► lane ──► ...                                 '

consumes      calls; at most `MAX_WAITING` of them wait in a lane, and a further caller waits for room
waits for     the crossing before; while the resident is lost or started anew, up to `patience_s`
produces      each call's result or its own error
unblocked by  a call; calls that arrive during a crossing share the next one of their lane

A crossing that is lost is repeated, though its work may have been done: all calls that cross can be repeated.
"""

import asyncio
import pickle
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

from flexmarl.cluster.host import answer, packed, replied
from flexmarl.cluster.interface import Address
from flexmarl.cluster.node_agent import NodeFiles
from flexmarl.errors import StoreError, WorkerError, boundary, described
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow, Row, Table
from flexmarl.records import AgentName, EpisodeId, GroupId, PolicyName, RowState, SampleId

LANES = {"put": "write", "discard": "write", "get": "get", "counts": "counts", "query": "query"}
"""The methods that cross, and the lane of each. Writes share one, so that they arrive in the order of the calls."""
PATIENCE_S = 60.0
"""Default of the time that calls wait for a lost `store/0`: its new process imports flexmarl and opens the file."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Waits between two attempts: each is twice as long as the one before, up to the longest."""
MAX_WAITING = 1024
"""Calls that may wait in a lane, those under way included. More would only take memory."""
MAX_TOGETHER = 64
"""Calls in one crossing: their share of its cost is then small against their own, and no call waits long for others."""


class StoreService(Protocol):
    """Contract of the resident `store/0`, which answers the calls of stores on other nodes (`RemoteStore`)."""

    async def answer_all(self, calls: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """Makes calls of the store and returns their replies, in the same order.

        A call is a method in LANES and its arguments, as `packed` packs them. The calls begin in the order given, and
        run at once. `answer` reads a reply: the result, or the call's own error.
        """
        ...

    async def close(self) -> None:
        """Closes the store after all earlier calls. Calling it twice is allowed."""
        ...


class StoreHost:
    """The StoreService on an experience store in the same process."""

    def __init__(self, store: ExperienceStore) -> None:
        self._store = store

    @classmethod
    def join(cls, path: Path) -> Self:
        """Serves the store of a run that another process of this machine owns. Raises StoreError if there is none."""
        return cls(DurableStore.join(path))

    async def answer_all(self, calls: Sequence[tuple[str, bytes]]) -> list[bytes]:
        """Makes the calls at the same time: the store writes together what arrives together."""
        return await asyncio.gather(*(replied(partial(self._call, *call)) for call in calls))

    async def close(self) -> None:
        """Closes the store."""
        await self._store.close()

    def _call(self, method: str, arguments: bytes) -> Any:
        if method not in LANES:
            _refuse(method)
        args, kwargs = pickle.loads(arguments)
        return getattr(self._store, method)(*args, **kwargs)


def store_on_node(path: Path, files: NodeFiles, address: Address) -> ExperienceStore:
    """Opens the run's store for a process of any node: its file at home, elsewhere the resident `store/0`."""
    return DurableStore.join(path) if files.at_home else RemoteStore(address)


class RemoteStore:
    """An ExperienceStore for processes that cannot open its file; it can be pickled. Used from one event loop.

    It reads and writes rows. It refuses, with StoreError, what moves rows through their lives: only the controller does
    that. A call raises StoreError if `store/0` does not answer within the patience; the work may then have been done.
    """

    def __init__(self, address: Address, name: str = "store/0", patience_s: float = PATIENCE_S) -> None:
        """`address` reaches the StoreService; `name` says in errors what that is."""
        self._given = address, name, patience_s
        self._lanes: dict[str, Lane] = {}
        """The lanes in use, by their names in LANES."""
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what it was made of: the copy is open and has no calls under way."""
        return RemoteStore, self._given

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows in the agent's table."""
        await self._call("put", agent, rows)

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Reads rows by sample id, in the order of `ids`."""
        return await self._call("get", ids)

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """Counts the policy's rows by state; a state without rows may be absent."""
        return await self._call("counts", policy)

    async def query(self, sql: str) -> Table:
        """Runs one SELECT over the agents' tables and the shared ones."""
        return await self._call("query", sql)

    async def discard(self, trajectories: Collection[EpisodeId]) -> int:
        """Deletes the OPEN rows of these episodes. Rows that a lost crossing deleted are not counted."""
        return await self._call("discard", trajectories)

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Refused."""
        _refuse("claim")

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Refused."""
        _refuse("settle")

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Refused."""
        _refuse("release")

    async def rewind(self, next_group: GroupId, *, replay: Collection[GroupId] = ()) -> int:
        """Refused."""
        _refuse("rewind")

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Refused."""
        _refuse("prune")

    async def close(self) -> None:
        """Refuses further calls, and waits for those under way. `store/0` stays open: others use it too."""
        self._closed = True
        for lane in self._lanes.values():
            await lane.ended()

    async def _call(self, method: str, *args: Any) -> Any:
        if self._closed:
            raise StoreError("the experience store is closed; open a new one")
        lane = self._lanes.setdefault(LANES[method], Lane(*self._given))
        return await lane.call(method, *args)


@dataclass(slots=True, eq=False)
class CrossingCall:
    """One call on its way to the StoreService."""

    method: str
    arguments: bytes
    """As `packed` packs them: each call alone, so that one that cannot be pickled fails alone."""
    reply: asyncio.Future[bytes]


class Lane:
    """Runs the calls of one kind: one crossing at a time, which takes along all calls that wait."""

    def __init__(self, address: Address, name: str, patience_s: float) -> None:
        self._address, self._name, self._patience_s = address, name, patience_s
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._waiting: deque[CrossingCall] = deque()
        self._sender: asyncio.Task[None] | None = None
        """Exists while there are calls. It is no caller's: a caller that is cancelled leaves the others alone."""

    async def call(self, method: str, *args: Any) -> Any:
        """Returns the result of one call, or raises its error. If the caller is cancelled, it may still be made."""
        async with self._room:
            with boundary(StoreError, f"calling {method!r} of {self._name}"):
                call = CrossingCall(method, packed(*args), asyncio.get_running_loop().create_future())
                self._waiting.append(call)
                if self._sender is None:
                    self._sender = asyncio.create_task(self._send(), name=f"send-{self._name}")
                return answer(await call.reply, name=self._name)

    async def ended(self) -> None:
        """Waits until no call is under way."""
        while self._sender is not None:
            await asyncio.wait([self._sender])

    async def _send(self) -> None:
        """Makes crossings until no call waits."""
        calls: Sequence[CrossingCall] = ()
        try:
            while calls := self._next():
                calls, replies = await self._cross(calls)
                for call, reply in zip(calls, replies, strict=True):
                    if not call.reply.done():
                        call.reply.set_result(reply)
        except BaseException as error:
            self._fail([*calls, *self._waiting], error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._sender = None

    def _next(self) -> Sequence[CrossingCall]:
        """Takes the oldest calls whose callers still wait."""
        calls: list[CrossingCall] = []
        while self._waiting and len(calls) < MAX_TOGETHER:
            call = self._waiting.popleft()
            if not call.reply.done():
                calls.append(call)
        return calls

    async def _cross(self, calls: Sequence[CrossingCall]) -> tuple[Sequence[CrossingCall], Sequence[bytes]]:
        """Crosses until there are replies. Returns them with the calls that they are of: cancelled ones drop out.

        Raises StoreError when the patience is over: it begins with the first crossing that was lost.
        """
        clock, wait_s, until = asyncio.get_running_loop().time, FIRST_WAIT_S, None
        while calls:
            try:
                sent = [(call.method, call.arguments) for call in calls]
                return calls, await self._address.call("answer_all", sent)
            except WorkerError as error:
                until = until or clock() + self._patience_s
                if clock() >= until:
                    raise StoreError(
                        f"the store's process could not be reached for {self._patience_s:g} s ({described(error)}); "
                        f"see why it ended, then go on with --resume"
                    ) from error
                await asyncio.sleep(min(wait_s, until - clock()))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                calls = [call for call in calls if not call.reply.done()]
        return (), ()

    def _fail(self, calls: Sequence[CrossingCall], error: BaseException) -> None:
        """Fails all calls that wait: they would have to wait for the same."""
        self._waiting.clear()
        for call in calls:
            if not call.reply.done():
                failed = StoreError(f"calling {call.method!r} of {self._name}: {described(error)}")
                failed.__cause__ = error
                call.reply.set_exception(failed)


def _refuse(method: str) -> NoReturn:
    raise StoreError(
        f"{method!r} of the experience store does not cross from other nodes: only the controller calls it"
    )
