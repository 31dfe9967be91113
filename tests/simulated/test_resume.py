"""A run that is killed at any moment and resumed ends as an undisturbed one: same samples, same weights, same rows.

A moment is whatever a later process could notice: an event in the journal, a call of the store that has been done, a
trainer's part of a checkpoint. The store and the folder of checkpoints outlive a kill; nothing else does.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import EpisodeError
from flexmarl.observability.journal import MemoryJournal
from flexmarl.testing.run import ScriptedRun
from flexmarl.testing.training import FakeTrainer
from tests.simulated.test_laws import Schedule, SlowStore, many, schedules, scripted

pytestmark = pytest.mark.filterwarnings(
    # Half of a workflow's `gather` may outlive the other half, and then find the pool closed: a real kill takes both.
    "ignore:coroutine .* was never awaited:RuntimeWarning"
)


class Killed(BaseException):
    """No handler of errors sees it, as with kill -9."""


class Life:
    """Of one process. At moment number `ends_at` it ends; what tasks do while they are torn down leaves no trace."""

    def __init__(self, ends_at: int | None) -> None:
        self.ends_at = ends_at
        self.moments = 0
        self.over = False

    def check(self) -> None:
        if self.over:
            raise Killed

    def moment(self) -> None:
        self.check()
        self.moments += 1
        if self.moments == self.ends_at:
            self.over = True
            raise Killed


class MortalStore:
    """The store, as far as this process reaches it."""

    def __init__(self, store, life: Life) -> None:
        self._store, self._life = store, life

    def __getattr__(self, name: str):
        async def call(*args, **kwargs):
            self._life.check()
            result = await getattr(self._store, name)(*args, **kwargs)
            self._life.moment()
            return result

        return call


class MortalJournal(MemoryJournal):
    def __init__(self, life: Life) -> None:
        super().__init__(lambda: asyncio.get_running_loop().time())
        self._life = life

    def event(self, event, /, **fields) -> None:
        self._life.check()
        super().event(event, **fields)
        self._life.moment()


class MortalTrainer(FakeTrainer):
    life: Life

    async def save(self, path: Path) -> None:
        self.life.moment()
        await super().save(path)
        self.life.moment()


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where checkpoints are flushed at once: on a disk, thousands of them would take minutes."""


def lives(schedule: Schedule, kills: Sequence[int], **sections) -> list[ScriptedRun]:
    """One run, killed at these moments of its lives one after the other, and at last played to its end."""
    played: list[ScriptedRun] = []
    store = None
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for ends_at in (*kills, None):
            life = Life(ends_at)
            run = scripted(replace(schedule, store_s=0.0), folder=Path(folder), store=store, **sections)
            store = run.store
            slow = SlowStore(store, schedule.store_s, schedule.seed) if schedule.store_s else store
            run.store = MortalStore(slow, life)
            run.journal = MortalJournal(life)
            for policy in run.trainers:
                run.trainers[policy] = trainer = MortalTrainer(policy, run.objects, sample_cost_s=schedule.sample_s)
                trainer.life = life
            played.append(run)
            try:
                with suppress(EpisodeError):  # A step in which every group failed.
                    run.play()
                life.ends_at = None
                break
            except BaseException:
                if not life.over:
                    raise
    return played


def undisturbed(schedule: Schedule, **sections) -> ScriptedRun:
    run = scripted(schedule, **sections)
    with suppress(EpisodeError):
        run.play()
    return run


def check_equal(lived: Sequence[ScriptedRun], whole: ScriptedRun, schedule: Schedule) -> None:
    last = lived[-1]
    assert rows_of(last) == rows_of(whole)
    assert ended_groups(lived) == ended_groups([whole])
    for policy, trainer in whole.trainers.items():
        found, expected = batches(lived, policy), batches([whole], policy)
        if schedule.deterministic:
            assert found == expected
            assert last.trainers[policy].weight == trainer.weight
        else:
            assert {version: ids_of(of_one) for version, of_one in found.items()} == {
                version: ids_of(of_one) for version, of_one in expected.items()
            }
            assert last.trainers[policy].weight == pytest.approx(trainer.weight, abs=1e-9)
        assert last.trainers[policy].version == trainer.version
    assert (last.outcome is None) == (whole.outcome is None)
    if last.outcome and whole.outcome:
        assert (last.outcome.before, last.outcome.after) == (whole.outcome.before, whole.outcome.after)


def rows_of(run: ScriptedRun) -> list:
    return [
        (
            row.sample_id,
            row.state,
            row.settled_version,
            row.reason,
            row.values.get("reward"),
            row.values.get("advantage"),
        )
        for row in run.rows()
    ]


def batches(lived: Sequence[ScriptedRun], policy) -> dict[str, list[list[str]]]:
    """What went into the update of each version; a later life plays again what an earlier one had not saved."""
    found: dict[str, list[list[str]]] = {}
    for run in lived:
        of_this: dict[str, list[list[str]]] = {}
        for batch in run.trainers[policy].accumulated:
            version = batch.micro_batch_id.split("/")[1]
            of_this.setdefault(version, []).append([sample.turn.sample_id for sample in batch.samples])
        found |= of_this
    return found


def ids_of(of_one_update: list[list[str]]) -> list[str]:
    return sorted(sample_id for batch in of_one_update for sample_id in batch)


def ended_groups(lived: Sequence[ScriptedRun]) -> list[int]:
    """Groups in the order of their ends, without those that a later life plays again."""
    ended: list[int] = []
    for run in lived:
        for event in run.events("store_rewound"):
            ended = [group for group in ended if group < event["next_group"]]
        for event in run.events():
            ended += [event["group"]] if event["event"] in ("group_failed", "group_filtered") else []
            ended += event["trained"] if event["event"] == "step_ended" else []
    return sorted(ended)


def test_killed_at_every_single_moment_it_ends_as_if_undisturbed() -> None:
    schedule = Schedule(seed=3, groups=2, micro_batch=2, filtered=True, deterministic=True, raising=0.15)
    sections = {"steps": 2, "evaluate": {"tasks": 1}}
    whole = undisturbed(schedule, **sections)
    assert ended_groups([whole]) == [0, 1, 2, 3]
    last_events, went_back_to = Counter[str](), Counter[int]()
    for moment in count(1):
        lived = lives(schedule, [moment], checkpoint={"every": 1}, **sections)
        check_equal(lived, whole, schedule)
        if len(lived) == 1:  # It ended before that moment came.
            break
        last_events.update(event["event"] for event in lived[0].events()[-1:])
        went_back_to.update(event["next_group"] for event in lived[1].events("store_rewound"))
    assert set(went_back_to) == {0, 2, 4}
    missing = {"group_admitted", "group_ready", "updated", "published", "step_ended", "checkpoint"} - set(last_events)
    assert not missing, f"no kill came right after {missing}"


def test_killed_again_and_again_it_ends_as_if_undisturbed() -> None:
    seen = Counter[str]()

    @settings(many, max_examples=25)
    @given(
        schedule=schedules,
        kills=st.lists(st.integers(1, 120), min_size=1, max_size=4),
        every=st.integers(1, 2),
    )
    def on_any(schedule: Schedule, kills: list[int], every: int) -> None:
        schedule = replace(schedule, engine_lost_at=None)
        sections = {"steps": 3, "evaluate": {"tasks": 2}}
        lived = lives(schedule, kills, checkpoint={"every": every}, **sections)
        seen["kills"] += len(lived) - 1
        seen["lives"] = max(seen["lives"], len(lived))
        for run in lived:
            seen["discarded"] += sum(event["rows"] for event in run.events("store_rewound"))
            seen["began again"] += sum("begins again" in line for line in run.said)
            seen.update(event["event"] for event in run.events())
        check_equal(lived, undisturbed(schedule, **sections), schedule)

    on_any()
    assert seen["kills"] > 25
    assert seen["lives"] == 5
    for witness in ("discarded", "began again", "resumed", "group_retried", "group_filtered", "update_skipped"):
        assert seen[witness], f"no example showed: {witness}; {seen}"
