"""Every mode equals its definition, written out row by row."""

from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import TrainingError
from flexmarl.records import Divisors, Sample
from flexmarl.training.aggregation import Aggregation, divisor, divisors_of, token_weights

HORIZON = 7


def closed_form(mode: Aggregation, samples: list[Sample], losses: list[np.ndarray]) -> float:
    rows = [(s, ls) for s, ls in zip(samples, losses, strict=True) if s.num_tokens and s.weight]
    tokens = sum(s.weight * s.num_tokens for s, _ in rows)
    sequences = sum(s.weight for s, _ in rows)
    total = sum(s.weight * ls.sum() for s, ls in rows)
    if mode == "token-mean":
        return total / tokens
    if mode == "seq-mean-token-mean":
        return sum(s.weight * ls.mean() for s, ls in rows) / sequences
    if mode == "seq-mean-token-sum":
        return total / sequences
    if mode == "seq-mean-token-sum-norm":
        return total / (sequences * HORIZON)
    if mode == "token-sum":
        return total
    episodes = {s.turn.episode for s, _ in rows}
    means = []
    for episode in episodes:
        own = [(s, ls) for s, ls in rows if s.turn.episode == episode]
        means.append(sum(s.weight * ls.sum() for s, ls in own) / sum(s.weight * s.num_tokens for s, _ in own))
    return sum(means) / len(episodes)


@pytest.mark.parametrize("mode", get_args(Aggregation))
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 20), max_size=4))
@settings(max_examples=40, deadline=None)
def test_a1_a4_sums_over_any_split_divided_once_equal_the_definition(
    make_samples: Callable[..., list[Sample]], mode: Aggregation, seed: int, cuts: list[int]
) -> None:
    random = np.random.default_rng(seed)
    samples = make_samples(seed)
    samples = [samples[i] for i in random.permutation(len(samples))]
    if divisors_of(samples) == Divisors():
        return
    losses = [random.normal(size=s.num_tokens) for s in samples]
    edges = [0, *sorted(min(cut, len(samples)) for cut in cuts), len(samples)]  # empty micro-batches included
    total = 0.0
    for start, end in pairwise(edges):
        part = samples[start:end]
        horizon = HORIZON if mode == "seq-mean-token-sum-norm" else None
        weights = token_weights(part, mode, horizon)
        total += sum(w * ls.sum() for w, ls in zip(weights, losses[start:end], strict=True))
    expected = closed_form(mode, samples, losses)
    assert total / divisor(divisors_of(samples), mode) == pytest.approx(expected, rel=1e-12, abs=1e-13)


def test_a_batch_without_weight_has_divisor_zero_in_every_mode() -> None:
    assert [divisor(Divisors(), mode) for mode in get_args(Aggregation)] == [0.0] * len(get_args(Aggregation))


def test_trajectory_mean_says_what_is_missing(make_samples: Callable[..., list[Sample]]) -> None:
    (sample, *_) = make_samples(0, weights=(1.0,), empty=0.0)
    bare = Sample(turn=sample.turn, advantage=1.0)
    with pytest.raises(TrainingError, match="task_0_g0e0a0 has no episode_tokens"):
        token_weights([bare], "traj-mean-token-mean")
