"""The laws of the system, on the production loops in virtual time, under random schedules and injected faults.

A schedule fixes sizes, modes, latencies and what goes wrong; what happens to an episode hangs on its own random stream.
Every test asserts that its faults really happened, over all examples together (`Witness`).
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.agents.seeds import context_hash
from flexmarl.errors import EpisodeError
from flexmarl.records import FinishReason, RowState, split_sample_id, split_trajectory_id
from flexmarl.testing.run import ScriptedRun
from flexmarl.testing.training import FakeTrainer

ENDS = ("trained", "filtered", "failed")
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


@dataclass
class Witness:
    """What really happened, over all examples of a test."""

    seen: Counter = field(default_factory=Counter)

    def of(self, run: ScriptedRun) -> None:
        rows = run.rows()
        self.seen.update(event["event"] for event in run.events())
        self.seen.update(row.state.value for row in rows)
        for word in ("raised", "no reward", "longer than", "was aborted", "scripted failure"):
            self.seen[word] += sum(word in row.reason for row in rows)
        self.seen["lost"] += len(run.world.pool.lost)

    def demand(self, *happened: str) -> None:
        missing = [name for name in happened if not self.seen[name]]
        assert not missing, f"no example showed {missing}; seen: {dict(self.seen)}"


class SlowStore:
    """The run's store behind a delay: every call may be overtaken by others before it is done."""

    def __init__(self, store, longest_s: float, seed: int) -> None:
        self._store, self._longest_s, self._random = store, longest_s, random.Random(seed)

    def __getattr__(self, name: str):
        async def call(*args, **kwargs):
            await asyncio.sleep(self._random.uniform(0, self._longest_s))
            return await getattr(self._store, name)(*args, **kwargs)

        return call


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
        run.store = SlowStore(run.store, schedule.store_s, schedule.seed)
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


def whole_steps(run: ScriptedRun) -> int:
    return len(run.events("step_ended"))


def law(check: Callable[[ScriptedRun, Schedule], None], *happened: str, **fixed: object) -> None:
    """Checks a law on many random runs, and that the faults `happened`."""
    witness = Witness()

    @many
    @given(schedule=schedules)
    def on_any(schedule: Schedule) -> None:
        schedule = replace(schedule, **fixed)  # type: ignore[arg-type]
        run = played(schedule)
        witness.of(run)
        check(run, schedule)

    on_any()
    witness.demand(*happened)


FAULTS = ("raised", "no reward", "longer than", "was aborted", "scripted failure", "lost")
ENDINGS = ("group_retried", "group_failed", "group_filtered", "group_ready", "trained")


def test_law_1_every_admitted_group_ends_exactly_once_and_so_does_every_row() -> None:
    def check(run: ScriptedRun, schedule: Schedule) -> None:
        ended = [event["group"] for name in ("group_failed", "group_filtered") for event in run.events(name)]
        ended += [group for event in run.events("step_ended") for group in event["trained"]]
        admitted = [event["group"] for event in run.events("group_admitted")]
        if whole_steps(run) == 2:
            assert sorted(ended) == admitted == list(range(2 * schedule.groups))
            assert {row.state for row in run.rows()} <= {RowState.TRAINED, RowState.FILTERED, RowState.FAILED}
        assert len(set(ended)) == len(ended)

    law(check, *FAULTS, *ENDINGS)


def test_law_3_every_token_of_a_step_was_sampled_at_the_version_the_step_began_with() -> None:
    def check(run: ScriptedRun, schedule: Schedule) -> None:
        served = {event["step"]: event["versions"] for event in run.events("step_started")}
        for row in run.rows():
            if row.version is not None:
                version = served[group_of(row.sample_id) // schedule.groups][row.policy]
                assert row.values["version_runs"] == [[0, version]]

    law(check, "lost", "published", "update_skipped", "group_retried")


@pytest.mark.parametrize("mode", ["sync", "microbatch"])
def test_law_5_every_ready_sample_enters_exactly_one_applied_update(mode: str) -> None:
    def check(run: ScriptedRun, schedule: Schedule) -> None:
        made_ready: Counter[str] = Counter()
        for event in run.events("group_ready"):
            made_ready.update(event["samples"])
        for policy, trainer in run.trainers.items():
            used = {s.turn.sample_id: batch.micro_batch_id for batch in trainer.accumulated for s in batch.samples}
            trained = [row for row in run.rows() if row.policy == policy and row.state is RowState.TRAINED]
            assert len(trained_ids_of(trainer)) == len(used) == len(trained) == made_ready[policy]
            for row in trained:
                _, version, _ = used[row.sample_id].split("/")
                assert row.settled_version == int(version) + 1 == row.version + 1
            assert max((row.settled_version for row in trained), default=0) == trainer.version
            assert all(0 < len(batch.samples) <= schedule.micro_batch for batch in trainer.accumulated)
            remainders.update(len(batch.samples) for batch in trainer.accumulated if schedule.micro_batch > 1)

    remainders: Counter[int] = Counter()
    law(check, *FAULTS, "trained", "group_filtered", mode=mode)
    assert remainders[1], "no step ended with a single sample left over"


def test_law_7_ids_and_logprobs_in_the_store_are_those_the_engine_sampled() -> None:
    def check(run: ScriptedRun, schedule: Schedule) -> None:
        engines = [engine for engines in run.engines.values() for engine in engines]
        prompts = {request.request_id: request.prompt_ids for engine in engines for request in engine.requests}
        sampled = {answer.request_id: answer for engine in engines for answer in engine.generations}
        for row in run.rows():
            assert same(row.values["prompt_ids"], prompts[row.sample_id])
            if row.version is not None:
                answer = sampled[row.sample_id]
                assert same(row.values["response_ids"], answer.response_ids)
                assert same(row.values["logprobs"], answer.logprobs)
                assert same(row.values["raw_logprobs"], answer.raw_logprobs)

    law(check, "lost", "trained", "failed", "filtered")


def test_law_8_credit_compares_turns_of_one_task_and_equal_context_hashes_mean_equal_contexts() -> None:
    def check(run: ScriptedRun, schedule: Schedule) -> None:
        advantages: dict[tuple[str, str], list[float]] = defaultdict(list)
        contexts: dict[tuple[str, str], bytes] = {}
        for row in run.rows():
            if row.version is None:
                continue
            tags = row.values["tags"]
            assert tags["task"] == f"task-{group_of(row.sample_id)}"
            assert tags["context_hash"] == context_hash(row.policy, row.values["prompt_ids"])
            prompt = row.values["prompt_ids"].tobytes()
            assert contexts.setdefault((row.policy, tags["context_hash"]), prompt) == prompt
            if row.state is RowState.TRAINED:
                advantages[tags["task"], row.agent].append(row.values["advantage"])
        # Centred in every group: had any row been compared with another task's, these sums would not be 0.
        assert all(abs(sum(values)) < 1e-9 for values in advantages.values() if len(values) > 1)
        spread.extend(value for values in advantages.values() for value in values)

    spread: list[float] = []
    law(check, "trained", "group_retried", "failed", estimator="drmas")
    assert max(spread) > 0.4, "no example had rewards that differ"


def test_law_11_a_failed_call_is_never_trained_on_and_a_missing_reward_is_a_state() -> None:
    def check(run: ScriptedRun, schedule: Schedule) -> None:
        answers = [answer for engines in run.engines.values() for e in engines for answer in e.generations]
        bad = {a.request_id for a in answers if a.finish in (FinishReason.ERROR, FinishReason.ABORT)}
        used = {sample_id for trainer in run.trainers.values() for sample_id in trained_ids_of(trainer)}
        assert not bad & used
        failed_episodes = set[str]()
        for row in run.rows():
            if row.sample_id in bad or "no reward" in row.reason:
                failed_episodes.add(split_sample_id(row.sample_id)[2])
            if row.state is RowState.FAILED:
                assert row.reason
                assert "reward" not in row.values
        assert not failed_episodes & {split_sample_id(sample_id)[2] for sample_id in used}
        for trainer in run.trainers.values():
            for sample in (sample for batch in trainer.accumulated for sample in batch.samples):
                assert sample.turn.finish in (FinishReason.STOP, FinishReason.LENGTH)
                assert sample.turn.policy != "frozen"

    law(check, "no reward", "was aborted", "scripted failure", "trained")


def test_law_12_a_slow_collector_slows_the_feed_and_loses_nothing() -> None:
    most: Counter[int] = Counter()

    def check(run: ScriptedRun, schedule: Schedule) -> None:
        open_groups = set[int]()
        for event in run.events():
            if event["event"] == "group_admitted":
                open_groups.add(event["group"])
            elif event["event"] in ("group_ready", "group_filtered", "group_failed"):
                open_groups.discard(event["group"])
            # One group more than plays: the feed has admitted it, and it waits for its slot.
            assert len(open_groups) <= schedule.inter_query + 1
            most[schedule.inter_query] = max(most[schedule.inter_query], len(open_groups))
        used = [sample_id for trainer in run.trainers.values() for sample_id in trained_ids_of(trainer)]
        assert sorted(used) == sorted(row.sample_id for row in run.rows() if row.state is RowState.TRAINED)

    law(check, "trained", store_s=3.0, groups=6, mode="microbatch", deterministic=False)
    assert most[1] == 2, "the bound was not reached, so it was not tested"


def test_law_13_every_token_that_an_engine_sampled_is_trained_filtered_or_failed_with_the_reason() -> None:
    """Of a call that was aborted, failed, or left by its workflow, too; but for what a lost engine takes with it."""

    def check(run: ScriptedRun, schedule: Schedule) -> None:
        rows = {row.sample_id: row for row in run.rows()}
        if whole_steps(run) < 2:
            return
        for engine in (engine for engines in run.engines.values() for engine in engines):
            for answer in engine.generations:
                if len(answer.response_ids):
                    row = rows[answer.request_id]
                    assert row.state in (RowState.TRAINED, RowState.FILTERED, RowState.FAILED)
                    assert row.state is not RowState.FAILED or row.reason
                    assert same(row.values["response_ids"], answer.response_ids)
                    assert same(row.values["logprobs"], answer.logprobs)
                    seen[answer.finish] += 1

    seen: Counter[str] = Counter()
    law(check, *FAULTS)
    assert seen["abort"], "no example had an aborted call with tokens"
    assert seen["error"], "no example had a failed call with tokens"


def test_in_deterministic_mode_the_same_micro_batches_are_trained_at_any_speed() -> None:
    @settings(many, max_examples=10)
    @given(schedule=schedules)
    def on_any(schedule: Schedule) -> None:
        schedule = replace(schedule, deterministic=True, stuck=0.0, slow_calls=0.0, engine_lost_at=None)
        other = replace(
            schedule, store_s=0.7 - 0.7 * bool(schedule.store_s), sample_s=1.0, inter_query=5 - schedule.inter_query
        )
        one, two = played(schedule), played(other)
        for policy, trainer in one.trainers.items():
            assert batches_of(trainer) == batches_of(two.trainers[policy])
            assert trainer.weight == two.trainers[policy].weight
        seen["orders"] += orders(one) != orders(two)
        seen["batches"] += sum(len(batches_of(trainer)) for trainer in one.trainers.values())

    seen: Counter[str] = Counter()
    on_any()
    assert seen["orders"], "groups never finished in another order: nothing was tested"
    assert seen["batches"] > 20


def group_of(sample_id: str) -> int:
    return split_trajectory_id(split_sample_id(sample_id)[2])[0]


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def trained_ids_of(trainer: FakeTrainer) -> list[str]:
    return [sample.turn.sample_id for batch in trainer.accumulated for sample in batch.samples]


def batches_of(trainer: FakeTrainer) -> list[list[str]]:
    return [[sample.turn.sample_id for sample in batch.samples] for batch in trainer.accumulated]


def orders(run: ScriptedRun) -> list[str]:
    """Sample ids in the order in which engines answered."""
    return [a.request_id for engines in run.engines.values() for engine in engines for a in engine.generations]
