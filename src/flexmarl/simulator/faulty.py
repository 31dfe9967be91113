"""Store and task source around others, which break as an injection says."""

from collections.abc import Callable, Collection, Mapping, Sequence

from flexmarl.errors import StoreError
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow, Row, Table
from flexmarl.records import AgentName, GroupId, PolicyName, RowState, SampleId, Task
from flexmarl.simulator.faults import FaultKind
from flexmarl.simulator.injection import Injection
from flexmarl.tasks import SourceExhausted, TaskSource


class FaultyStore:
    """An ExperienceStore that refuses a write, or whose caller is killed right after a call was done.

    `check_alive` raises when the life that reaches the store through this object is over: what tasks of a killed
    process still do while they are torn down must leave no trace.
    """

    def __init__(self, store: ExperienceStore, injection: Injection, check_alive: Callable[[], None]) -> None:
        self._store, self._injection, self._check_alive = store, injection, check_alive

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Opens or fills rows."""
        await self.before(writes=True)
        await self._store.put(agent, rows)
        self._after()

    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        """Leases rows."""
        await self.before(writes=True)
        claimed = await self._store.claim(policy, n, holder=holder)
        self._after()
        return claimed

    async def settle(self, ids: Sequence[SampleId], outcome: Outcome) -> None:
        """Moves rows."""
        await self.before(writes=True)
        await self._store.settle(ids, outcome)
        self._after()

    async def release(self, *, holder: str | None = None, cache: str | None = None) -> list[SampleId]:
        """Returns rows to READY."""
        await self.before(writes=True)
        released = await self._store.release(holder=holder, cache=cache)
        self._after()
        return released

    async def rewind(self, next_group: GroupId, **replay: Collection[GroupId]) -> int:
        """Takes back what was done after a checkpoint."""
        await self.before(writes=True)
        rows = await self._store.rewind(next_group, **replay)
        self._after()
        return rows

    async def prune(self, before_group: GroupId, budget_bytes: int) -> int:
        """Makes room."""
        await self.before(writes=True)
        rows = await self._store.prune(before_group, budget_bytes)
        self._after()
        return rows

    async def get(self, ids: Sequence[SampleId]) -> list[Row]:
        """Rows by sample id."""
        await self.before(writes=False)
        return await self._store.get(ids)

    async def counts(self, policy: PolicyName) -> Mapping[RowState, int]:
        """How many rows are in each state."""
        await self.before(writes=False)
        return await self._store.counts(policy)

    async def query(self, sql: str) -> Table:
        """Any one SELECT."""
        await self.before(writes=False)
        return await self._store.query(sql)

    async def close(self) -> None:
        """The store outlives a life."""

    async def before(self, *, writes: bool) -> None:
        """Comes before every call; for subclasses that also take their time."""
        self._check_alive()
        if writes and self._injection.occurs(FaultKind.STORE_FAILURE):
            raise StoreError("the experience store refused a write, as planned")

    def _after(self) -> None:
        self._injection.store_called()
        self._check_alive()


class FaultySource:
    """A task source that ends too early."""

    def __init__(self, source: TaskSource, injection: Injection) -> None:
        self._source, self._injection = source, injection

    @property
    def num_train(self) -> int | None:
        """What the source says, whatever is to come."""
        return self._source.num_train

    def train(self, index: int) -> Task:
        """The task at position `index`. Raises SourceExhausted past the planned end."""
        if self._injection.exhausts(index):
            raise SourceExhausted(f"tasks: there is no training task at position {index}, as planned")
        return self._source.train(index)

    def held_out(self, n: int) -> tuple[Task, ...]:
        """The first n held-out tasks."""
        return self._source.held_out(n)
