"""The laws of the system in the asynchronous modes, on the production loops in virtual time, under random faults.

What they add to the synchronous ones (test_laws.py): a bound on staleness, the window, and life with stragglers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.orchestrator.law import law_of
from flexmarl.orchestrator.settings import Mode, PipelineSettings
from flexmarl.records import ROW_TERMINAL, RowState, split_sample_id, split_trajectory_id
from flexmarl.rollout.admission import AdmissionLaw
from flexmarl.testing.run import ScriptedRun
from tests.simulated.test_laws import FAULTS, Schedule, Witness, many, played, same, schedules, trained_ids_of

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


def law(check: Callable[[ScriptedRun, Schedule, AdmissionLaw], None], *happened: str, **pipeline: object) -> None:
    """Checks a law on many random runs, and that the faults `happened`."""
    witness = Witness()

    @many
    @given(schedule=asynchronous, mode=st.sampled_from(MODES), settings=pipelines)
    def on_any(schedule: Schedule, mode: str, settings: dict) -> None:
        settings |= pipeline
        run = played(replace(schedule, mode=mode), pipeline=settings, steps=4)
        witness.of(run)
        witness.seen["whole"] += run.outcome is not None
        check(run, schedule, law_of(Mode(mode), PipelineSettings(**settings), groups=schedule.groups))

    on_any()
    witness.demand("whole", *happened)


def ended_groups(run: ScriptedRun) -> list[int]:
    names = ("group_failed", "group_filtered", "group_expired")
    ended = [event["group"] for name in names for event in run.events(name)]
    return ended + [group for event in run.events("step_ended") for group in event["trained"]]


def group_of(sample_id: str) -> int:
    return split_trajectory_id(split_sample_id(sample_id)[2])[0]


def test_law_1_every_admitted_group_ends_exactly_once_and_so_does_every_row() -> None:
    def check(run: ScriptedRun, schedule: Schedule, admission: AdmissionLaw) -> None:
        ended = ended_groups(run)
        assert len(set(ended)) == len(ended)
        if run.outcome:
            admitted = [event["group"] for event in run.events("group_admitted")]
            assert sorted(ended) == admitted == list(range(len(admitted)))
            assert {row.state for row in run.rows()} <= ROW_TERMINAL
            assert all(len(event["trained"]) >= schedule.groups for event in run.events("step_ended"))

    law(check, *FAULTS, "group_retried", "group_failed", "group_filtered", "group_expired", "trained", "expired")


def test_law_3_no_token_is_trained_on_that_is_older_than_the_bound() -> None:
    def check(run: ScriptedRun, schedule: Schedule, admission: AdmissionLaw) -> None:
        for row in run.rows():
            if row.state is RowState.TRAINED:
                assert row.settled_version
                staleness = row.settled_version - 1 - min(version for _, version in row.values["version_runs"])
                assert staleness >= 0
                assert admission.max_staleness is None or staleness <= admission.max_staleness
                seen[staleness] += 1

    seen: Counter[int] = Counter()
    law(check, "trained", updates="together")
    assert seen[0]
    assert seen[1]
    assert seen[2]


def test_law_5_every_ready_sample_enters_exactly_one_applied_update() -> None:
    def check(run: ScriptedRun, schedule: Schedule, admission: AdmissionLaw) -> None:
        if run.outcome is None:
            return
        made_ready: Counter[str] = Counter()
        for event in run.events("group_ready"):
            made_ready.update(event["samples"])
        for policy, trainer in run.trainers.items():
            used = {s.turn.sample_id: batch.micro_batch_id for batch in trainer.accumulated for s in batch.samples}
            trained = [row for row in run.rows() if row.policy == policy and row.state is RowState.TRAINED]
            assert len(trained_ids_of(trainer)) == len(used) == len(trained) == made_ready[policy]
            for row in trained:
                assert row.settled_version == int(used[row.sample_id].split("/")[1]) + 1
            assert max((row.settled_version or 0 for row in trained), default=0) == trainer.version

    law(check, *FAULTS, "trained", "group_filtered", "group_expired")


def test_law_12_slots_are_freed_by_ends_only_and_never_more_groups_are_active_than_there_are_slots() -> None:
    def check(run: ScriptedRun, schedule: Schedule, admission: AdmissionLaw) -> None:
        active: set[int] = set()
        for event in run.events():
            if event["event"] == "group_admitted":
                active.add(event["group"])
                assert len(active) <= admission.slots
                most[admission.lag] = max(most[admission.lag], len(active) / schedule.groups)
            elif event["event"] in ("group_failed", "group_filtered", "group_expired"):
                active.discard(event["group"])
            elif event["event"] == "step_ended":
                active -= set(event["trained"])

    most: defaultdict[int, float] = defaultdict(float)
    law(check, "trained", updates="together")
    assert most[2] > 2, "rollout was never more than a step ahead"


def test_groups_are_taken_from_the_window_only_and_fifo_takes_them_in_order() -> None:
    def check(run: ScriptedRun, schedule: Schedule, admission: AdmissionLaw) -> None:
        open_groups: list[int] = []
        for event in run.events():
            if event["event"] == "group_admitted":
                open_groups.append(event["group"])
            elif event["event"] == "group_taken":
                assert admission.window is None or event["group"] < open_groups[0] + admission.window
                assert event["because"]
                beyond_head[admission.window == 1] += event["group"] != open_groups[0]
            if event["event"] in ("group_taken", "group_failed", "group_stopped", "group_expired"):
                open_groups = [group for group in open_groups if group != event["group"]]
            if event["event"] == "group_filtered" and event["group"] in open_groups:
                open_groups.remove(event["group"])

    beyond_head: Counter[bool] = Counter()
    law(check, "group_taken", head_deadline_s=1800.0)
    assert beyond_head == {False: beyond_head[False], True: 0}
    assert beyond_head[False]


def test_law_7_ids_and_logprobs_in_the_store_are_those_the_engine_sampled() -> None:
    def check(run: ScriptedRun, schedule: Schedule, admission: AdmissionLaw) -> None:
        answers = {a.request_id: a for engines in run.engines.values() for e in engines for a in e.generations}
        for row in run.rows():
            if row.state is RowState.TRAINED:
                assert same(row.values["response_ids"], answers[row.sample_id].response_ids)

    law(check, "trained", "group_expired")


def test_the_same_seed_gives_the_same_journal_in_every_mode() -> None:
    for mode in MODES:
        schedule = Schedule(seed=5, mode=mode, groups=3, raising=0.15, sample_s=0.3)
        one, two = played(schedule, steps=3), played(schedule, steps=3)
        assert one.events() == two.events()
        assert one.outcome


@pytest.mark.parametrize("updates", ["together", "per_policy"])
def test_every_mode_makes_the_number_of_steps_asked_for(updates: str) -> None:
    for mode in MODES:
        run = played(Schedule(mode=mode, sample_s=0.3), steps=5, pipeline={"updates": updates})
        assert run.outcome is not None
        assert len(run.events("step_ended")) == run.outcome.steps == 5
        assert sorted(run.metrics) == list(range(6))
