"""Intervals hold the true figure in 95 of 100 repetitions, and agree with printed tables."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.analysis import intervals
from flexmarl.analysis.intervals import Estimate

SHARES = st.tuples(st.integers(1, 300), st.floats(0, 1)).map(lambda drawn: (round(drawn[0] * drawn[1]), drawn[0]))
OUTCOMES = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=1, max_size=50)


def holds(estimate: Estimate, value: float) -> bool:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= value <= estimate.high


@pytest.mark.parametrize(
    ("degrees", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_students_quantiles_are_those_of_the_printed_table(degrees: int, t: float) -> None:
    assert intervals.t_quantile(degrees) == pytest.approx(t, abs=5e-4)


def test_wilsons_interval_is_that_of_newcombes_paper() -> None:
    """Newcombe 1998, Statistics in Medicine 17, 857-872, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        found = intervals.share(successes, n)
        assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_the_difference_of_two_shares_is_that_of_newcombes_paper() -> None:
    """Newcombe 1998, Statistics in Medicine 17, 873-890, table II, method 10: 56 of 70 less 48 of 80."""
    found = intervals.shares_differ(intervals.share(48, 80), intervals.share(56, 70))
    assert (found.value, found.low, found.high) == (
        pytest.approx(0.2),
        pytest.approx(0.0524, abs=5e-5),
        pytest.approx(0.3339, abs=5e-5),
    )


@given(SHARES, SHARES)
def test_a_share_and_a_difference_lie_in_their_intervals_and_these_in_the_possible(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    shares = intervals.share(*one), intervals.share(*other)
    for found in shares:
        assert holds(found, found.value)
        assert 0 <= found.low <= found.high <= 1  # pyright: ignore[reportOptionalOperand]
    assert holds(intervals.shares_differ(*shares), shares[1].value - shares[0].value)


@given(OUTCOMES)
def test_a_paired_difference_turns_its_sign_when_the_runs_change_places(outcomes: list[tuple[float, float]]) -> None:
    before, after = ([pair[which] for pair in outcomes] for which in (0, 1))
    there, back = intervals.paired_shares_differ(before, after), intervals.paired_shares_differ(after, before)
    assert holds(there, there.value)
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low))  # pyright: ignore


def test_equal_values_and_single_ones_give_no_interval() -> None:
    for values in ([0.5], [0.5, 0.5, 0.5]):
        assert (intervals.mean(values, "steps").low, intervals.means_differ(values, values).high) == (None, None)


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 9)), min_size=1, max_size=30))
def test_the_values_of_a_ratio_have_it_as_their_mean(drawn: list[tuple[float, int]]) -> None:
    sums, counts = zip(*drawn, strict=True)
    values = intervals.ratio_values(sums, counts)
    assert math.fsum(values) / len(values) == pytest.approx(math.fsum(sums) / sum(counts), abs=1e-9)
    if len(set(counts)) == 1:
        assert values == tuple(total / counts[0] for total in sums)


@pytest.mark.parametrize("kind", ["share", "mean", "shares", "paired", "means", "ratio"])
def test_about_95_of_100_intervals_hold_the_true_figure(kind: str) -> None:
    draw, held, rounds = random.Random(7), 0, 2000
    for _ in range(rounds):
        if kind == "share":
            held += holds(intervals.share(sum(draw.random() < 0.7 for _ in range(40)), 40), 0.7)
        elif kind == "mean":
            held += holds(intervals.mean([draw.gauss(2, 3) for _ in range(8)], "steps"), 2)
        elif kind == "shares":
            two = [intervals.share(sum(draw.random() < p for _ in range(40)), 40) for p in (0.7, 0.5)]
            held += holds(intervals.shares_differ(*two), -0.2)
        elif kind == "paired":
            hard = [draw.random() for _ in range(60)]  # Tasks of their own difficulty, the same for both runs.
            two = [[float(draw.random() < min(1.0, h + more)) for h in hard] for more in (0.0, 0.1)]
            held += holds(intervals.paired_shares_differ(*two), 0.1 - 0.1**2 / 2)
        elif kind == "ratio":  # Episodes of 1, 2 or 3 turns, whose rewards add up to 2.
            counts = [draw.randint(1, 3) for _ in range(60)]
            sums = [count * draw.gauss(2 / count, 1) for count in counts]
            values = intervals.ratio_values(sums, counts)
            held += holds(intervals.mean(values, "episodes"), (2 + 2 + 2) / (1 + 2 + 3))
        else:
            two = [[draw.gauss(mean, mean) for _ in range(6)] for mean in (1, 3)]
            held += holds(intervals.means_differ(*two), 2)
    off = 4 * math.sqrt(0.95 * 0.05 / rounds)
    assert 0.95 - off < held / rounds < (1 if kind in ("paired", "means") else 0.95 + off)
