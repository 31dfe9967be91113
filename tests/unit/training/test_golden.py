"""Our losses and divergences give what the functions of Dr.MAS, verl and PettingLLMs gave on the same batch."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexmarl.records import AgentName, EpisodeId, FinishReason, PolicyName, Sample, Turn, Version, VersionRun
from flexmarl.records.ids import make_sample_id
from flexmarl.training.aggregation import Aggregation, divisors_of, token_weights
from flexmarl.training.backends.forward import TokenOutputs
from flexmarl.training.backends.objective import Objective
from flexmarl.training.kl import Divergence, divergence
from flexmarl.training.losses import Ppo
from flexmarl.training.settings import TrainingSettings

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
TOLERANCE = 5e-6
ROWS, WIDTH = 31, 6


@cache
def golden(name: str) -> dict[str, Any]:
    with np.load(GOLDEN / f"{name}_seed0.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def samples_with(advantages: np.ndarray) -> list[Sample]:
    """The batch's rows, sampled a version ago with the log-probabilities `old`."""
    batch, samples = golden("batch"), []
    for i, length in enumerate(batch["mask"].sum(1).astype(int)):
        episode = EpisodeId(f"g0e{i}a0")
        old = batch["old"][i, :length].copy()
        turn = Turn(
            sample_id=make_sample_id(str(batch["uid"][i]), 0, episode),
            episode=episode,
            agent=AgentName(str(batch["agent"][i])),
            policy=PolicyName("one"),
            prompt_ids=np.zeros(1, np.int32),
            response_ids=np.zeros(length, np.int32),
            logprobs=old,
            raw_logprobs=old,
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.STOP,
        )
        samples.append(Sample(turn=turn, advantage=0.0, advantages=advantages[i, :length].astype(np.float64)))
    return samples


def loss_of(samples: list[Sample], mode: Aggregation, dual_clip: float | None) -> float:
    horizon = WIDTH if mode == "seq-mean-token-sum-norm" else None
    loss = Ppo(aggregation=mode, horizon_tokens=horizon, dual_clip=dual_clip)
    objective, batch = Objective(TrainingSettings(loss=loss)), golden("batch")
    logprobs = torch.from_numpy(batch["new"][batch["mask"] == 1].astype(np.float64))
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs))
    weights = token_weights(samples, mode, horizon).tolist()
    summed, _ = objective(samples, weights, outputs, version=Version(1))
    return summed.item() / objective.divisor(divisors_of(samples), [])


@pytest.mark.parametrize("peer", ["drmas", "verl", "pettingllms"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_ppo_gives_the_numbers_of_others_in_their_conventions(peer: str, mode: Aggregation) -> None:
    samples = samples_with(golden(peer)["grpo__agent__stdTrue"])
    ours = loss_of(samples, mode, dual_clip=None if peer == "pettingllms" else 3.0)
    # Two of them leave the number of rows out of the norm mode; one divides a sum over tokens by the padded width.
    if mode == "seq-mean-token-sum-norm" and peer != "verl":
        ours *= ROWS
    elif mode == "seq-mean-token-sum" and peer == "pettingllms":
        ours /= WIDTH
    assert ours == pytest.approx(float(golden(peer)[f"loss__{mode}"]), abs=TOLERANCE)


def test_the_arrays_tell_the_modes_and_the_projects_apart() -> None:
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    found = {round(float(golden(peer)[f"loss__{mode}"]), 5) for peer in ("drmas", "pettingllms") for mode in modes}
    assert len(found) == 8


@pytest.mark.parametrize("peer", ["drmas", "verl", "pettingllms"])
@pytest.mark.parametrize(
    ("kind", "name"), [("k1", "kl"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3+", "low_var_kl")]
)
def test_divergences_are_those_of_others(peer: str, kind: Divergence, name: str) -> None:
    new, ref = (torch.from_numpy(golden("batch")[side].astype(np.float64)) for side in ("new", "ref"))
    assert np.abs(divergence(kind, new, ref).numpy() - golden(peer)[f"kl__{name}"]).max() <= TOLERANCE
