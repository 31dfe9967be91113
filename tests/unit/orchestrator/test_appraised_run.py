"""Whole runs that ask their trainers before credit: in every mode, and across a resume."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.agents import Team
from flexmarl.events.training_events import DivergenceCharged
from flexmarl.records import PolicyName, RowState, SampleId, Task, Turn
from flexmarl.testing.scripted_run import ScriptedRun
from flexmarl.training.interface import Appraised

SOLVER = PolicyName("solver")
KL = {"type": "k1", "where": "reward", "coef": 0.1, "target": 0.1, "horizon": 40}


def appraisal(turn: Turn) -> Appraised:
    """A critic that expects a quarter, and a reference half a nat away."""
    values, divergence = np.full(turn.num_tokens, 0.25, np.float32), np.full(turn.num_tokens, 0.5)
    return Appraised(values=values, reference=turn.raw_logprobs - np.float32(0.5), divergence=divergence)


async def appraise(trainer: Any, ids: Sequence[SampleId]) -> list[Appraised]:
    return [appraisal(turn) for turn in await trainer.rows.turns(ids)]


def run_of(folder: Path, *, estimator: str = "gae", critic: bool = True, steps: int = 3, **more: Any) -> ScriptedRun:
    training: dict[str, Any] = {"kl": KL, **({"critic": {}} if critic else {})}
    run = ScriptedRun(
        steps=steps,
        folder=folder,
        checkpoint={"every": 1},
        credit={"filter": None, "estimator": {"type": estimator}},
        policies={SOLVER: {"training": training}},
        **more,
    )
    for trainer in run.trainers.values():
        trainer.appraise = partial(appraise, trainer)
    return run


MODES: list[dict[str, Any]] = [
    {"mode": "microbatch"},
    {"mode": "sync"},
    {"mode": "async", "pipeline": {"lag": 1}},
    {"mode": "async", "pipeline": {"lag": 1, "updates": "per_policy"}, "estimator": "reinforce", "critic": False},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.get("pipeline", {}).get("updates", mode["mode"]))
def test_rewards_pay_more_from_batch_to_batch_while_the_divergence_is_above_its_target(
    tmp_path: Path, mode: dict[str, Any]
) -> None:
    run = run_of(tmp_path, **mode).play()
    coefs = [event.next_coef for event in run.events.of(DivergenceCharged)]
    assert len(coefs) >= 3
    assert coefs == sorted(coefs)
    assert coefs[0] > 0.1
    assert {row.state for row in run.rows()} <= {RowState.TRAINED, RowState.EXPIRED}


def test_the_batch_of_a_policy_ends_for_that_policy_alone(tmp_path: Path) -> None:
    """A coefficient must not depend on the pace of other policies: it adapts once per batch of its own."""

    async def writer_is_rare(task: Task, team: Team) -> None:
        rare = int(task.prompt.split()[1]) % 4 == 0
        for reply in await asyncio.gather(*(seat.act(task.prompt) for seat in (team.solver, team.writer)[: 1 + rare])):
            reply.reward(1.0)

    run = ScriptedRun(
        writer_is_rare,
        mode="async",
        agents={"solver": "solver", "writer": "writer"},
        pipeline={"lag": 3, "updates": "per_policy"},
        steps=6,
        credit={"filter": None, "estimator": {"type": "reinforce"}},
        policies={policy: {"training": {"kl": KL}} for policy in ("solver", "writer")},
    )
    for trainer in run.trainers.values():
        trainer.appraise = partial(appraise, trainer)
    run.play()
    for policy, other in (("solver", "writer"), ("writer", "solver")):
        ended = [event.name for event in run.events.all if getattr(event, "policy", None) == policy]
        steps = [event for event in ended if event in ("kl_in_reward", "batch_filled")]
        assert len(steps) >= 4, "or nothing was seen"
        assert steps == ["kl_in_reward", "batch_filled"] * (len(steps) // 2), f"{other} ended a batch of {policy}"


def test_the_divergence_and_its_price_are_figures_of_the_step(tmp_path: Path) -> None:
    run = run_of(tmp_path).play()
    events = run.events.of(DivergenceCharged)
    for step, event in enumerate(events, start=1):
        figures = run.metrics[step]
        assert figures["train/solver/kl_to_reference"] == pytest.approx(0.5, abs=1e-6)
        assert figures["train/solver/kl_coef"] == event.coef


def test_a_critics_values_and_returns_reach_the_trainer(tmp_path: Path) -> None:
    for batch in run_of(tmp_path).play().trainers[SOLVER].accumulated:
        for sample in batch.samples:
            assert sample.values is not None
            assert sample.returns is not None
            assert sample.advantages is not None
            assert set(sample.values.tolist()) == {0.25}


def test_a_resumed_run_goes_on_with_the_coefficient_it_had(tmp_path: Path) -> None:
    whole = run_of(tmp_path / "whole", steps=4).play()
    run_of(tmp_path / "cut", steps=2).play()
    again = run_of(tmp_path / "cut", steps=4).play()
    coefs = [[event.next_coef for event in run.events.of(DivergenceCharged)] for run in (whole, again)]
    assert coefs[1] == coefs[0][2:]
    assert whole.trainers[SOLVER].weight == again.trainers[SOLVER].weight
