"""Staleness of version runs, publish lag, and how lengths that were trained on differ from those admitted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.experience.staleness import LengthBias, PublishLag, Staleness, length_bias, staleness_of
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    PolicyName,
    SampleId,
    Turn,
    Version,
    VersionRun,
)

lengths = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=40)


def turn_of(tokens: int, *runs: tuple[int, int]) -> Turn:
    """Runs are (first token, version)."""
    return Turn(
        sample_id=SampleId("t_0_g0e0a0"),
        episode=EpisodeId("g0e0a0"),
        agent=AgentName("solver"),
        policy=PolicyName("solver"),
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        raw_logprobs=np.zeros(tokens, np.float32),
        versions=tuple(VersionRun(start, Version(version)) for start, version in runs),
        finish=FinishReason.STOP,
    )


def test_staleness_counts_tokens_by_the_version_that_sampled_them() -> None:
    turns = [turn_of(10, (0, 3), (4, 5)), turn_of(10, (0, 5))]
    assert staleness_of(turns, Version(5)) == Staleness(mean=4 * 2 / 20, max=2)


def test_a_version_that_sampled_no_token_does_not_count() -> None:
    assert staleness_of([turn_of(4, (0, 1), (0, 2), (4, 3))], Version(3)) == Staleness(mean=1.0, max=1)
    assert staleness_of([turn_of(0, (0, 1))], Version(3)) is None


def test_the_publish_lag_is_the_time_from_making_a_version_to_serving_it_everywhere() -> None:
    lag = PublishLag()
    lag.made(PolicyName("solver"), Version(1), 10.0)
    lag.made(PolicyName("judge"), Version(7), 12.0)
    assert lag.served(PolicyName("solver"), Version(1), 13.5) == pytest.approx(3.5)


def test_training_on_the_short_half_only_shows() -> None:
    assert length_bias([10, 20], [10, 20, 90, 120]) == LengthBias(ratio=0.25, ks=0.5)


@pytest.mark.parametrize(("trained", "admitted"), [([], [1.0]), ([1.0], []), ([1.0], [0.0])])
def test_nothing_is_said_of_empty_samples(trained: list[float], admitted: list[float]) -> None:
    assert length_bias(trained, admitted) is None


@given(lengths, lengths)
def test_the_distance_is_the_largest_gap_at_any_length(trained: list[float], admitted: list[float]) -> None:
    def below(sample: list[float], x: float) -> float:
        return sum(length <= x for length in sample) / len(sample)

    found = length_bias(trained, admitted)
    assert found is not None
    assert found.ks == pytest.approx(max(abs(below(trained, x) - below(admitted, x)) for x in range(51)))
    assert found.ratio == pytest.approx(sum(trained) / len(trained) / (sum(admitted) / len(admitted)))


@given(lengths)
def test_the_same_lengths_have_no_bias(sample: list[float]) -> None:
    found = length_bias(sample, sample[::-1])
    assert found is not None
    assert (found.ratio, found.ks) == (pytest.approx(1.0), 0.0)
