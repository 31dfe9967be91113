"""Costs that are fitted to a simulated run's journal are those that it was simulated with."""

import random
from dataclasses import replace

import numpy as np
import pytest

from flexmarl.analysis.costs import CostSettings, EngineCosts, SharedHost, TrainerCosts
from flexmarl.analysis.facts import Facts
from flexmarl.analysis.fit import Fit, fit_costs
from flexmarl.analysis.fit_engines import MOST_SLOWDOWN, pauses_of, slowdowns
from flexmarl.analysis.queues import BusyCount
from flexmarl.errors import ConfigError
from flexmarl.events.serving_events import Called
from flexmarl.records import FinishReason, PolicyName, Version
from tests.unit.analysis.simulated_runs import AGENTS, simulated_run

TRAINER = TrainerCosts(micro_batch_s=0.1, sample_s=0.03, update_s=0.5, publish_s=0.7)
PARALLEL = {"inter_query": 6, "intra_query": 4}
"""24 trajectories at a time, three for each of the 8 slots: calls wait."""


def fitted(engine: EngineCosts, host: SharedHost | None = None) -> Fit:
    costs = {"default": CostSettings(engine=engine, trainer=TRAINER)}
    facts = simulated_run(costs, host, rollout=PARALLEL)
    return fit_costs(facts, dict.fromkeys(AGENTS, engine.slots), origin="a simulated run")


@pytest.mark.parametrize(
    ("more", "half_a_step"),
    [
        ({}, 0.015),
        ({"call_s": 0.05}, 0.015),
        ({"call_s": 0.02, "prefill_token_s": 0.001}, 0.015),
        ({"call_s": 0.02, "decode_kv_s": 1e-5}, 0.015),
    ],
)
def test_engine_costs_are_recovered(more: dict[str, float], half_a_step: float) -> None:
    truth = EngineCosts(slots=8, decode_s=0.01, decode_request_s=0.002, load_s=0.3, **more)
    fit = fitted(truth)
    for policy, costs in fit.costs.items():
        found = costs.engine
        batches = ((1, 20), (4, 160), (8, 500))  # (requests, tokens that they hold)
        for requests, held in batches:
            step = found.decode_s + found.decode_request_s * requests + found.decode_kv_s * held
            true_step = truth.decode_s + truth.decode_request_s * requests + truth.decode_kv_s * held
            assert step == pytest.approx(true_step, rel=0.05)
        assert found.prefill_token_s == pytest.approx(truth.prefill_token_s, rel=0.05, abs=1e-5)
        # A call waits for the step that is under way: that is on its way too.
        assert truth.call_s - 0.005 <= found.call_s <= truth.call_s + half_a_step
        assert (found.load_s, found.slots) == (pytest.approx(0.3), 8)
        assert fit.quality[policy].call_error < 0.03


def test_pauses_are_the_time_between_calls_that_neither_tools_nor_the_pool_took() -> None:
    def called(hop: int, began: float, ended: float, waited_s: float = 0.0) -> Called:
        return Called(
            process="engine/solver/0",  # pyright: ignore[reportArgumentType]
            ended=ended,
            began=began,
            policy=PolicyName("solver"),
            request=f"t_{hop}_g0e0a0",
            version=Version(0),
            prompt_tokens=1,
            reused_tokens=0,
            sampled_tokens=1,
            finish=FinishReason.STOP,
            waited_s=waited_s,
        )

    calls = [called(0, 1.0, 2.0), called(1, 2.5, 3.0), called(2, 6.5, 7.0), called(3, 12.0, 13.0, waited_s=4.0)]
    assert pauses_of(Facts(calls=calls), {"t_2_g0e0a0": 2.0}) == {"solver": pytest.approx((0.5 + 1.5 + 1.0) / 3)}
    assert pauses_of(Facts(calls=calls), {"t_2_g0e0a0": 9.0})["solver"] == pytest.approx((0.5 + 0.0 + 1.0) / 3)


def test_trainer_costs_are_recovered() -> None:
    fit = fitted(EngineCosts(slots=8))
    for policy, costs in fit.costs.items():
        assert costs.trainer.micro_batch_s == pytest.approx(0.1, rel=0.01)
        assert costs.trainer.sample_s == pytest.approx(0.03, rel=0.01)
        assert costs.trainer.update_s == pytest.approx(0.5)
        assert (costs.trainer.resume_s, costs.trainer.suspend_s) == (0, 0), "nothing was swapped"
        assert costs.trainer.publish_s == pytest.approx(0.7, abs=0.01)
        assert fit.quality[policy].micro_batch_error < 1e-6


def test_who_shares_a_host_is_found_out() -> None:
    truth = SharedHost(engine_per_trainer=0.5, engine_per_engine=0.3, trainer_per_engine=0.6)
    fit = fitted(EngineCosts(slots=8, decode_s=0.01, decode_request_s=0.002), truth)
    assert fit.shared_host.engine_per_trainer == pytest.approx(0.5, rel=0.15)
    assert fit.shared_host.engine_per_engine == pytest.approx(0.3, rel=0.15)
    assert fit.shared_host.trainer_per_engine == pytest.approx(0.6, rel=0.1)
    for costs in fit.costs.values():
        assert costs.engine.decode_s + costs.engine.decode_request_s * 8 == pytest.approx(0.026, rel=0.05)


def test_devices_of_their_own_are_not_taken_for_a_shared_host() -> None:
    shared = fitted(EngineCosts(slots=8, decode_s=0.01, decode_request_s=0.002)).shared_host
    assert max(shared.model_dump().values()) < 0.05


def delayed_once() -> Facts:
    """A run of which one policy was trained, while no call was computed but for one, which was delayed by 3 s."""
    facts = simulated_run({"default": CostSettings(engine=EngineCosts(slots=8))}, rollout=PARALLEL, mode="sync")
    rng = random.Random(7)
    facts.micro_batches = [
        replace(batch, ended=batch.ended - rng.random() * (batch.ended - batch.began) / 3)
        for batch in facts.micro_batches
        if batch.policy == "solver"
    ]
    before = facts.micro_batches[0].began
    delayed = max((call for call in facts.calls if call.ended <= before), key=lambda call: call.ended)
    facts.calls[facts.calls.index(delayed)] = replace(delayed, ended=before + 3.0)
    return facts


def test_a_slowdown_without_overlap_is_not_fitted() -> None:
    facts = delayed_once()
    trainers = BusyCount(facts.training().values()).during([(call.began, call.ended) for call in facts.calls])
    assert 1 <= np.count_nonzero(trainers > 1e-3) <= 2, "hardly any call overlaps with training"
    host = fit_costs(facts, dict.fromkeys(AGENTS, 8), origin="a simulated run").shared_host
    assert (host.engine_per_trainer, host.trainer_per_engine, host.trainer_per_trainer) == (0, 0, 0)


def test_a_slowdown_is_bounded() -> None:
    columns, seconds = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([100.0, 0.5])
    assert slowdowns(columns, seconds, np.array([True, True])).tolist() == [0.5, MOST_SLOWDOWN]
    assert slowdowns(columns, seconds, np.array([True, False])).tolist() == [0.5, 0.0]


def test_the_origin_is_said() -> None:
    assert {costs.origin for costs in fitted(EngineCosts(slots=8)).costs.values()} == {"a simulated run"}


def test_a_run_with_too_few_calls_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"runs/a: policy 'solver' has 0 calls .* give a run with more steps"):
        fit_costs(Facts(), {"solver": 8}, origin="runs/a")
