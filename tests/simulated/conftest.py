"""Random runs for the laws: schedules, what they turn into, and the deaths of a run.

A schedule fixes sizes, modes, latencies and what goes wrong; what happens to an episode hangs on its own random stream.
Every test asserts that its faults really happened, over all examples together (`Witness`). The laws themselves are in
`flexmarl.testing.faults`.
"""

import asyncio
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.errors import EpisodeError
from flexmarl.events.event import Event, Notice
from flexmarl.events.group_events import GroupFailed, GroupFiltered
from flexmarl.events.run_events import StepEnded, StoreRewound
from flexmarl.testing.faults.faulty import AroundStore, SlowStore
from flexmarl.testing.faults.laws import broken
from flexmarl.testing.faults.story import Story
from flexmarl.testing.faults.watched import Killed, MortalEvents, Pulse
from flexmarl.testing.scripted_run import ScriptedRun, watched_trainer
from flexmarl.testing.training import FakeTrainer
from tests.simulated.stories import story_of

FAULTS = ("raised", "no reward", "longer than", "was aborted", "scripted failure", "lost")
AGENTS = {"solver": "solver", "verifier": "verifier", "judge": "frozen"}


@dataclass(frozen=True)
class Schedule:
    """One run: its sizes, its speeds and its faults. The defaults are a run without any."""

    seed: int = 0
    mode: str = "microbatch"
    deterministic: bool = False
    groups: int = 3
    episodes: int = 2
    inter_query: int = 4
    intra_query: int = 16
    micro_batch: int = 3
    shared: bool = False
    """Both trained agents act with one policy."""
    estimator: str = "default"
    filtered: bool = False
    sample_s: float = 0.0
    store_s: float = 0.0
    """Longest time that a call of the store takes."""
    raising: float = 0.0
    """Share of episodes whose workflow raises; and so on."""
    forgetful: float = 0.0
    stuck: float = 0.0
    slow_calls: float = 0.0
    failed_calls: float = 0.0
    engine_lost_at: float | None = None


shares = st.sampled_from([0.0, 0.0, 0.0, 0.15, 0.4])
schedules = st.builds(
    Schedule,
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(["sync", "microbatch"]),
    deterministic=st.booleans(),
    groups=st.integers(1, 4),
    episodes=st.integers(2, 3),
    inter_query=st.integers(1, 4),
    intra_query=st.integers(1, 3),
    micro_batch=st.sampled_from([3, 4, 7, 2, 5, 1]),
    shared=st.booleans(),
    estimator=st.sampled_from(["default", "grpo", "drmas", "dr_grpo"]),
    filtered=st.booleans(),
    sample_s=st.sampled_from([0.0, 0.3, 5.0]),
    store_s=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    raising=shares,
    forgetful=shares,
    stuck=shares,
    slow_calls=shares,
    failed_calls=shares,
    engine_lost_at=st.sampled_from([None, 0.35, 1.5, 4.0]),
)
many = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
"""The same examples in every run, so that a witness that is found once is always found."""


def examples(few: int, many: int) -> Any:
    """Runs a test of a law with so few examples in `make test`, and with so many in `make test-deep`."""
    return pytest.mark.parametrize("num", [few, pytest.param(many, marks=pytest.mark.deep)])


MODES = ("one_step_off", "async", "fifo", "greedy")
pipelines = st.fixed_dictionaries(
    {
        "lag": st.integers(1, 2),
        "window": st.sampled_from([0.1, 0.3, 1.0]),
        "head_deadline_s": st.sampled_from([1800.0, 2.0]),
        "late": st.sampled_from(["expire", "requeue"]),
        "updates": st.sampled_from(["together", "together", "per_policy"]),
        "policy_timeout_s": st.sampled_from([0.5, 600.0]),
    }
)
asynchronous = schedules.map(lambda schedule: replace(schedule, deterministic=False))


@dataclass
class Witness:
    """What really happened, over all examples of a test."""

    seen: Counter = field(default_factory=Counter)

    def of(self, run: ScriptedRun) -> None:
        rows = run.rows()
        self.seen.update(event.name for event in run.events.all)
        self.seen.update(row.state.value for row in rows)
        for word in ("raised", "no reward", "longer than", "was aborted", "scripted failure"):
            self.seen[word] += sum(word in row.reason for row in rows)
        self.seen["lost"] += len(run.world.pool.lost)

    def demand(self, *happened: str) -> None:
        missing = [name for name in happened if not self.seen[name]]
        assert not missing, f"no example showed {missing}; seen: {dict(self.seen)}"


def slowed(store: Any, schedule: Schedule) -> Any:
    return SlowStore(store, longest_s=schedule.store_s, random=random.Random(schedule.seed))


def chance(schedule: Schedule, share: float, *parts: object) -> bool:
    return random.Random(f"{schedule.seed}/{parts}").random() < share


def scripted(schedule: Schedule, **sections) -> ScriptedRun:
    """The run of a schedule: two steps of a team of three, in which the verifier asks a frozen judge."""
    agents = dict.fromkeys(["solver", "verifier"], "solver") | {"judge": "frozen"} if schedule.shared else AGENTS

    async def workflow(task, team) -> None:
        answer = await team.solver.act(task.prompt)
        if team.rng.random() < schedule.stuck:
            await asyncio.sleep(1000)
        verdict, opinion = await asyncio.gather(team.verifier.act(answer.text), team.judge.act(answer.text))
        if team.rng.random() < schedule.raising:
            raise ValueError("the workflow raised")
        team.solver.reward(task.score(answer.text[:1]))
        if team.rng.random() >= schedule.forgetful:
            verdict.reward(float(verdict.text[:1] == opinion.text[:1]))
        team.report(success=task.score(answer.text[:1]))

    def say(prompt, request) -> str:
        words = "ab"[request.seed % 2] * (1 + request.seed % 5)
        return words + "z" * 90 if chance(schedule, schedule.slow_calls / 3, request.request_id) else words

    def fails(request) -> str:
        failing = chance(schedule, schedule.failed_calls / 3, "failed", request.request_id)
        return "scripted failure" if failing else ""

    policy = {"instances": 2, "training": {"micro_batch": schedule.micro_batch}}
    run = ScriptedRun(
        workflow,
        say,
        agents=agents,
        fails=fails,
        seconds_per_sample=schedule.sample_s,
        **{
            "seed": schedule.seed,
            "steps": 2,
            "mode": schedule.mode,
            "deterministic": schedule.deterministic,
            "batch": {"groups": schedule.groups, "episodes": schedule.episodes},
            "rollout": {
                "inter_query": schedule.inter_query,
                "intra_query": schedule.intra_query,
                "episode_timeout_s": 30.0,
                "call_timeout_s": 5.0,
            },
            "credit": {"estimator": {"type": schedule.estimator}, **({} if schedule.filtered else {"filter": None})},
            "policies": dict.fromkeys(agents.values(), policy) | {"frozen": {"trainable": False, "instances": 2}},
            **sections,
        },
    )
    if schedule.store_s:
        run.store = slowed(run.store, schedule)
    return run


def played(schedule: Schedule, **sections) -> ScriptedRun:
    """The run, played to its end: that of its steps, or that of a step in which every group failed."""

    async def lose_an_engine(run: ScriptedRun) -> None:
        await asyncio.sleep(schedule.engine_lost_at or 0.0)
        for engines in run.engines.values():
            engines[0].fail()

    run = scripted(schedule, **sections)
    beside = [] if schedule.engine_lost_at is None else [lose_an_engine]
    with suppress(EpisodeError):  # A step in which every group failed.
        run.play(*beside)
    return run


def keep_every_law(
    *happened: str,
    schedules: Any = schedules,
    look: Callable[[Story], None] = lambda story: None,
    num: int = many.max_examples,
    **sections: Any,
) -> None:
    """Plays `num` random runs, each of which keeps every law, and asserts that the faults `happened`.

    Sections of the config may be strategies; `look` sees each run.
    """
    witness = Witness()
    drawn = {name: value for name, value in sections.items() if isinstance(value, st.SearchStrategy)}
    fixed = {name: value for name, value in sections.items() if name not in drawn}

    @settings(many, max_examples=num)
    @given(schedule=schedules, drawn=st.fixed_dictionaries(drawn))
    def on_any(schedule: Schedule, drawn: dict[str, Any]) -> None:
        run = played(schedule, **fixed, **drawn)
        story = story_of(run)
        assert broken(story) == {}
        witness.of(run)
        witness.seen["whole"] += story.finished
        look(story)

    on_any()
    witness.demand("whole", *happened)


class Life(Pulse):
    """One process. At moment number `ends_at` it ends; what tasks do while they are torn down leaves no trace."""

    def __init__(self, ends_at: int | None) -> None:
        super().__init__()
        self.ends_at = ends_at
        self.moments = 0

    def moment(self) -> None:
        self.check()
        self.moments += 1
        if self.moments == self.ends_at:
            self.stop()
            raise Killed


class MortalStore(AroundStore):
    """The store, as far as this process reaches it."""

    def __init__(self, store: Any, life: Life) -> None:
        super().__init__(store)
        self._life = life

    async def call(self, name: str, do: Any) -> Any:
        self._life.check()
        result = await do()
        self._life.moment()
        return result


class CountedEvents(MortalEvents):
    def __init__(self, life: Life) -> None:
        super().__init__(life)
        self._life = life

    def emit(self, event: Notice) -> None:
        super().emit(event)
        if isinstance(event, Event):  # A notice leaves no trace, so a kill after it is a kill before it.
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
            slow = slowed(store, schedule) if schedule.store_s else store
            run.store = MortalStore(slow, life)  # type: ignore[assignment]
            run.events = CountedEvents(life)
            for policy in run.trainers:
                trainer = watched_trainer(policy, run.objects, MortalTrainer, sample_cost_s=schedule.sample_s)
                trainer.inner.life = life
                run.trainers[policy] = trainer
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
    assert groups_that_ended(lived) == groups_that_ended([whole])
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
            # Of two calls that end at one token boundary without an answer, a slow store decides which one is named.
            re.sub(r"call \S+ of agent '\w+'", "call", row.reason),
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


def groups_that_ended(lived: Sequence[ScriptedRun]) -> list[int]:
    """Groups in the order of their ends, without those that a later life plays again."""
    ended: list[int] = []
    for run in lived:
        for event in run.events.of(StoreRewound):
            ended = [group for group in ended if group < event.next_group]
        for event in run.events.all:
            ended += [event.group] if isinstance(event, GroupFailed | GroupFiltered) else []
            ended += event.trained if isinstance(event, StepEnded) else []
    return sorted(ended)
