"""The life of rows against a dictionary: whatever is done in whatever order, no row is lost, doubled or half-moved."""

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexmarl.errors import StoreError, TransitionError
from flexmarl.experience.backends.sqlite import DurableStore, SqliteStore
from flexmarl.experience.interface import Column, ColumnKind, ExperienceStore, Outcome, PartialRow
from flexmarl.experience.ledger import claim_order
from flexmarl.records import (
    ROW_MOVES,
    ROW_TERMINAL,
    AgentName,
    GroupId,
    PolicyName,
    RowState,
    SampleId,
    Version,
)
from flexmarl.simulator.virtual_time import VirtualTimeLoop

AGENTS = {
    AgentName("solver"): PolicyName("p"),
    AgentName("critic"): PolicyName("p"),
    AgentName("judge"): PolicyName("q"),
}
IDS = [SampleId(f"t_{hop}_g{group}e{episode}a0") for group in (2, 10) for episode in (0, 3, 11) for hop in (1, 3, 20)]
COLUMNS = [Column("reward", ColumnKind.FLOAT), Column("text", ColumnKind.TEXT)]
OWNER = dict(zip(IDS, [*AGENTS] * len(IDS), strict=False))
READY = Outcome(state=RowState.READY)
NAMES = st.sampled_from(["a", "b"])
OUTCOMES = st.one_of(
    st.sampled_from([state for state in RowState if state not in (RowState.ACCUMULATED, RowState.TRAINED)]).map(
        lambda state: Outcome(state=state, reason=f"because {state}")
    ),
    NAMES.map(lambda cache: Outcome(state=RowState.ACCUMULATED, cache=cache)),
    st.integers(1, 3).map(lambda version: Outcome(state=RowState.TRAINED, version=Version(version))),
)


@dataclass(frozen=True)
class Modelled:
    state: RowState = RowState.OPEN
    version: int | None = None
    holder: str | None = None
    cache: str | None = None
    settled_version: int | None = None
    reward: float | None = None
    text: str | None = None


class RowLife(RuleBasedStateMachine):
    """In memory and in virtual time."""

    loop_factory: type[asyncio.AbstractEventLoop] = VirtualTimeLoop

    def new_store(self) -> ExperienceStore:
        return SqliteStore(agents=list(AGENTS), columns=COLUMNS)

    @initialize()
    def open_store(self):
        self.runner = asyncio.Runner(loop_factory=self.loop_factory)
        self.run = self.runner.run
        self.store = self.new_store()
        self.pruned_before = 0
        self.model: dict[SampleId, Modelled] = {}
        self.claims: dict[SampleId, int] = {}
        """Claims of a row not yet given back: never more than one."""

    @rule(
        ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=6),
        version=st.sampled_from([0, 0, 0, 0, 1, None]),
        reward=st.none() | st.just(1.0),
    )
    def put(self, ids, version, reward):
        for agent in AGENTS:
            mine = [sample_id for sample_id in ids if OWNER[sample_id] == agent]
            values = {} if reward is None else {"reward": reward, "text": "said"}
            if not mine:
                continue
            rows = [PartialRow(sample_id=i, policy=AGENTS[agent], version=version, values=values) for i in mine]
            there = {self.model[i].version for i in mine if i in self.model} - {None}
            if version is not None and there - {version}:
                with pytest.raises(StoreError, match="policy_version"):
                    self.run(self.store.put(agent, rows))
                continue
            self.run(self.store.put(agent, rows))
            for i in mine:
                row = self.model.get(i, Modelled())
                self.model[i] = replace(
                    row,
                    version=row.version if version is None else version,
                    reward=row.reward if reward is None else reward,
                    text=row.text if reward is None else "said",
                )

    def _in(self, state, **of):
        return [
            i
            for i, row in self.model.items()
            if row.state is state and all(getattr(row, k) == v for k, v in of.items())
        ]

    @precondition(lambda self: self._complete())
    @rule()
    def make_all_ready(self):
        self._settle(self._complete(), READY)

    @rule(ids=st.lists(st.sampled_from(IDS), min_size=2, max_size=6, unique=True))
    def play_turns(self, ids):
        self.put([i for i in ids if i not in self.model], version=0, reward=1.0)
        self.make_all_ready()

    def _complete(self):
        return [i for i in self._in(RowState.OPEN) if self.model[i].version is not None]

    @precondition(lambda self: self._in(RowState.CLAIMED))
    @rule(data=st.data(), cache=NAMES)
    def accumulate(self, data, cache):
        ids = data.draw(st.lists(st.sampled_from(self._in(RowState.CLAIMED)), min_size=1, unique=True))
        self._settle(ids, Outcome(state=RowState.ACCUMULATED, cache=cache))

    @precondition(lambda self: self._in(RowState.ACCUMULATED))
    @rule(data=st.data(), version=st.integers(1, 3))
    def train(self, data, version):
        ids = data.draw(st.lists(st.sampled_from(self._in(RowState.ACCUMULATED)), min_size=1, unique=True))
        self._settle(ids, Outcome(state=RowState.TRAINED, version=Version(version)))

    @rule(ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=2, unique=True), outcome=OUTCOMES)
    def settle_anything(self, ids, outcome):
        self._settle(ids, outcome)

    def _settle(self, ids, outcome):
        if outcome.state is RowState.CLAIMED or not all(self._may_move(i, outcome) for i in ids):
            with pytest.raises(TransitionError if set(ids) <= self.model.keys() else StoreError):
                self.run(self.store.settle(ids, outcome))
            return
        self.run(self.store.settle(ids, outcome))
        for i in ids:
            self.model[i] = replace(
                self.model[i], state=outcome.state, holder=None, cache=outcome.cache, settled_version=outcome.version
            )
            if outcome.state is RowState.READY:
                self.claims.pop(i, None)

    def _may_move(self, sample_id, outcome):
        row = self.model.get(sample_id)
        if row is None or outcome.state not in ROW_MOVES[row.state]:
            return False
        return outcome.state is not RowState.READY or row.version is not None

    @precondition(lambda self: self._in(RowState.READY))
    @rule(policy=st.sampled_from(sorted(set(AGENTS.values()))), n=st.integers(0, 6), holder=NAMES)
    def claim(self, policy, n, holder):
        claimable = [i for i, r in self.model.items() if r.state is RowState.READY and AGENTS[OWNER[i]] == policy]
        claimed = self.run(self.store.claim(policy, n, holder=holder))
        assert claimed == sorted(claimable, key=claim_order)[:n]
        for sample_id in claimed:
            self.claims[sample_id] = self.claims.get(sample_id, 0) + 1
            assert self.claims[sample_id] == 1, "claimed twice without having been given back"
            self.model[sample_id] = replace(self.model[sample_id], state=RowState.CLAIMED, holder=holder)

    @precondition(lambda self: self._in(RowState.CLAIMED))
    @rule(holder=NAMES)
    def lose_a_holder(self, holder):
        self._release(self._in(RowState.CLAIMED, holder=holder), holder=holder)

    @precondition(lambda self: self._in(RowState.ACCUMULATED))
    @rule(cache=NAMES)
    def lose_a_cache(self, cache):
        self._release(self._in(RowState.ACCUMULATED, cache=cache), cache=cache)

    def _release(self, its_rows, **lost):
        assert self.run(self.store.release(**lost)) == sorted(its_rows, key=claim_order)
        for i in its_rows:
            self.model[i] = replace(self.model[i], state=RowState.READY, holder=None, cache=None)
            self.claims.pop(i)

    @precondition(lambda self: self.model)
    @rule(next_group=st.sampled_from([0, 3, 10, 11]))
    def rewind(self, next_group):
        kept = {i: row for i, row in self.model.items() if claim_order(i).group_id < next_group}
        if any(row.state not in ROW_TERMINAL for row in kept.values()):
            with pytest.raises(StoreError, match="another run"):
                self.run(self.store.rewind(GroupId(next_group)))
            return
        assert self.run(self.store.rewind(GroupId(next_group))) == len(self.model) - len(kept)
        self.model = kept
        self.claims = {i: n for i, n in self.claims.items() if i in kept}
        self.pruned_before = min(self.pruned_before, next_group)

    @precondition(lambda self: any(row.state in ROW_TERMINAL for row in self.model.values()))
    @rule(before_group=st.sampled_from([2, 3, 11]))
    def prune(self, before_group):
        old = [
            i
            for i, row in self.model.items()
            if self.pruned_before <= claim_order(i).group_id < before_group and row.state in ROW_TERMINAL
        ]
        assert self.run(self.store.prune(GroupId(before_group), 0)) == len(old)
        self.model |= {i: replace(self.model[i], text=None) for i in old}
        self.pruned_before = max(self.pruned_before, before_group)

    @invariant()
    def every_row_is_where_the_model_has_it(self):
        rows = self.run(self.store.get(list(self.model)))
        seen = {
            row.sample_id: (
                row.agent,
                Modelled(
                    state=row.state,
                    version=row.version,
                    holder=self.model[row.sample_id].holder,  # no reader sees it; `release` shows it
                    cache=row.cache,
                    settled_version=row.settled_version,
                    reward=row.values.get("reward"),
                    text=row.values.get("text"),
                ),
            )
            for row in rows
        }
        assert seen == {i: (OWNER[i], row) for i, row in self.model.items()}

    @invariant()
    def every_row_is_counted_once(self):
        for policy in set(AGENTS.values()):
            states = [row.state for i, row in self.model.items() if AGENTS[OWNER[i]] == policy]
            assert self.run(self.store.counts(policy)) == {state: states.count(state) for state in states}

    @invariant()
    def every_payload_is_some_rows(self):
        texts = sum(row.text is not None for row in self.model.values())
        assert self.run(self.store.query("SELECT count(*) FROM payloads")).rows == ((texts,),)

    def teardown(self):
        self.run(self.store.close())
        self.runner.close()


class DurableRowLife(RowLife):
    """On a file that is closed and opened in between."""

    loop_factory = asyncio.SelectorEventLoop

    def new_store(self) -> ExperienceStore:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "experience.sqlite"
        return DurableStore.create(path, agents=list(AGENTS), columns=COLUMNS)

    @rule()
    def close_and_open(self):
        path = Path(self.folder.name) / "experience.sqlite"
        self.run(self.store.close())
        self.store = DurableStore.open(path)

    def teardown(self):
        super().teardown()
        self.folder.cleanup()


RowLife.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestRowLife = RowLife.TestCase
DurableRowLife.TestCase.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
TestDurableRowLife = DurableRowLife.TestCase
