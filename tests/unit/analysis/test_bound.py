"""The lower bound: by hand where its parts can be counted, and below every simulated step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.analysis.bound import bounds_of, mean_bound, path_s, step_bound
from flexmarl.analysis.costs import CostSettings, EngineCosts, TrainerCosts
from flexmarl.events.serving_events import Called
from flexmarl.events.training_events import MicroBatchDone
from flexmarl.records import PolicyName, WorkerId
from tests.calls import a_call
from tests.unit.analysis.simulated_runs import simulated_run

ONE_SECOND = {
    "default": CostSettings(
        engine=EngineCosts(slots=4, decode_s=1.0, decode_request_s=0.0, load_s=2.0),
        trainer=TrainerCosts(micro_batch_s=3.0, sample_s=1.0, update_s=4.0, publish_s=1.0),
    )
}
"""A token takes a second alone, and a quarter of it in a full batch."""


def call(began: float, ended: float, sampled: int, *, trajectory: str = "g0e0a0") -> Called:
    return a_call(began=began, ended=ended, sampled_tokens=sampled, trajectory=trajectory)


def batch(policy: str, began: float, ended: float) -> MicroBatchDone:
    return MicroBatchDone(
        process=WorkerId.trainer(policy), began=began, ended=ended, policy=PolicyName(policy), micro_batch="m", rows=2,
        tokens=16.0, duration_s=ended - began,
    )  # fmt: skip


def test_calls_in_a_row_add_up() -> None:
    assert path_s([call(0, 10, 10), call(10, 15, 5)], ONE_SECOND) == 15.0


def test_of_calls_side_by_side_the_longer_one_counts() -> None:
    assert path_s([call(0, 10, 10), call(0, 30, 20), call(30, 32, 2)], ONE_SECOND) == 22.0


def test_parts_of_a_step() -> None:
    calls = [call(0, 10, 10), call(0, 40, 6, trajectory="g0e1a0")]
    batches = [batch("solver", 40, 45)]
    bound = step_bound(calls, batches, ONE_SECOND, instances=1, trained=["solver"])
    assert (bound.path_s, bound.decode_s, bound.training_s) == (10.0, 4.0, 6.0 + 5.0)
    assert (bound.share_s, bound.end_s) == (4.0, 4.0 + 1.0 + 2.0)
    assert bound.total_s == 10.0 + 4.0 + 7.0
    assert bound.because == "the longest trajectory"


def test_rows_that_were_not_trained_leave_the_last_trajectory_nothing_to_wait_for() -> None:
    bound = step_bound([call(0, 10, 10)], [], ONE_SECOND, instances=1, trained=["solver"])
    assert bound.share_s == bound.end_s == 0.0


def test_trainers_that_take_turns_need_the_sum() -> None:
    batches = [batch(policy, 0, 5) for policy in ("solver", "verifier")]
    bounds = [
        step_bound([], batches, ONE_SECOND, instances=1, trained=["solver"], trainers_at_once=at_once)
        for at_once in (1, None)
    ]
    assert [bound.training_s for bound in bounds] == [10.0, 5.0]


def test_ahead_nothing_counts_that_may_lie_beside_the_next_rollout() -> None:
    batches = [batch("solver", 40, 45)]
    bound = step_bound([call(0, 10, 10)], batches, ONE_SECOND, instances=1, trained=["solver"], ahead=True)
    assert (bound.path_s, bound.training_s, bound.share_s, bound.end_s) == (10.0, 5.0, 0.0, 0.0)
    assert bound.total_s == 10.0


def test_no_steps_have_no_bound() -> None:
    assert mean_bound([]) is None


costs = st.builds(
    CostSettings,
    engine=st.builds(
        EngineCosts,
        slots=st.integers(1, 16),
        decode_s=st.floats(0.001, 0.1),
        decode_request_s=st.floats(0, 0.02),
        decode_kv_s=st.sampled_from([0.0, 1e-5]),
        prefill_token_s=st.sampled_from([0.0, 1e-3]),
        prefill_steps=st.sampled_from([0.0, 3.0]),
        call_s=st.floats(0, 0.1),
        load_s=st.floats(0, 1),
    ),
    trainer=st.builds(
        TrainerCosts,
        micro_batch_s=st.floats(0, 1),
        sample_s=st.floats(0, 0.2),
        token_s=st.sampled_from([0.0, 1e-3]),
        update_s=st.floats(0, 1),
        publish_s=st.floats(0, 1),
    ),
)


@settings(max_examples=20, deadline=None)
@given(
    solver=costs,
    verifier=costs,
    instances=st.integers(1, 3),
    mode=st.sampled_from(["sync", "microbatch"]),
    episodes=st.integers(2, 4),
    parallel=st.integers(1, 8),
)
def test_no_simulated_step_beats_its_bound(
    solver: CostSettings, verifier: CostSettings, instances: int, mode: str, episodes: int, parallel: int
) -> None:
    devices = {"solver": solver, "verifier": verifier}
    facts = simulated_run(
        devices,
        steps=2,
        mode=mode,
        batch={"groups": 3, "episodes": episodes},
        rollout={"inter_query": parallel, "intra_query": parallel},
        policies={policy: {"instances": instances, "training": {"micro_batch": 4}} for policy in devices},
    )
    bounds = bounds_of(
        facts, devices, instances=len(facts.instances), trainers_at_once=None, trained=list(devices), ahead=False
    )
    assert len(facts.instances) == 2 * instances
    for step, bound in zip(facts.steps, bounds, strict=True):
        assert step.ended - step.began >= bound.total_s - 1e-5  # The journal has microseconds.
    mean = mean_bound(bounds)
    assert mean is not None
    assert mean.total_s <= sum(bound.total_s for bound in bounds) / 2 + 1e-9


@settings(max_examples=20, deadline=None)
@given(
    solver=costs,
    verifier=costs,
    instances=st.integers(1, 3),
    mode=st.sampled_from(["sync", "microbatch"]),
    episodes=st.integers(2, 4),
    parallel=st.integers(1, 8),
)
def test_no_mean_step_beats_the_mean_bound_when_rollout_is_ahead(
    solver: CostSettings, verifier: CostSettings, instances: int, mode: str, episodes: int, parallel: int
) -> None:
    devices = {"solver": solver, "verifier": verifier}
    facts = simulated_run(
        devices,
        steps=4,
        mode=mode,
        pipeline={"ahead": True},
        batch={"groups": 3, "episodes": episodes},
        rollout={"inter_query": parallel, "intra_query": parallel},
        policies={policy: {"instances": instances, "training": {"micro_batch": 4}} for policy in devices},
    )
    bounds = bounds_of(
        facts, devices, instances=len(facts.instances), trainers_at_once=None, trained=list(devices), ahead=True
    )
    mean = mean_bound(bounds)
    assert mean is not None
    assert facts.makespan_s / len(facts.steps) >= mean.total_s - 1e-5
