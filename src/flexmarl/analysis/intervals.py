"""Decides intervals that hold the true figure in 95 of 100 repetitions.

    share of episodes            Wilson's score interval; of two runs, Newcombe's from both (1998, methods 3 and 10)
    share, task by task          Agresti and Min (2005): half a task is added to each kind of disagreement
    mean                         Student's t; of two runs, Welch's
    mean, task by task           Student's t of the differences

Figures that were played on the same tasks are compared task by task, since most of their spread is the tasks' own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, or a difference of two, with its interval."""

    value: float
    low: float | None
    """None, like `high`, if the numbers give no interval."""
    high: float | None
    how: str
    """The method, and how many numbers it is from."""


def bounds(of: Estimate, shown: str = "{:.3g}") -> str:
    """The interval as a text; "" if there is none. `shown` is the format of a number.

    >>> bounds(Estimate(0.25, 0.125, 0.5, "Wilson, 64 episodes"))
    '[0.125, 0.5]'
    """
    return "" if of.low is None or of.high is None else f"[{shown.format(of.low)}, {shown.format(of.high)}]"


def share(successes: float, n: int) -> Estimate:
    """Wilson's interval of the share of `successes` among n >= 1 episodes."""
    p = successes / n
    middle, half = (p + Z * Z / (2 * n)) / (1 + Z * Z / n), Z / (1 + Z * Z / n)
    half *= math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    low, high = max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))  # Rounding may put p outside.
    return Estimate(p, low, high, f"Wilson, {n} episodes")


def mean(values: Sequence[float], of: str) -> Estimate:
    """Student's interval of the mean of at least one value; `of` names the values.

    There is none from one value, and none from equal values: they do not show how far the next one may lie.
    """
    value, n = fmean(values), len(values)
    if n < 2 or not variance(values):
        return Estimate(value, None, None, f"no spread in {n} {of}" if n > 1 else "no spread in one value")
    half = t_quantile(n - 1) * math.sqrt(variance(values) / n)
    return Estimate(value, value - half, value + half, f"t, {n} {of}")


def shares_differ(before: Estimate, after: Estimate) -> Estimate:
    """Newcombe's interval of the difference of two shares that were played on different tasks."""
    assert None not in (before.low, before.high, after.low, after.high), "shares have intervals"
    p, low_p, high_p = before.value, before.low or 0.0, before.high or 0.0
    q, low_q, high_q = after.value, after.low or 0.0, after.high or 0.0
    return Estimate(
        q - p,
        q - p - math.hypot(q - low_q, high_p - p),
        q - p + math.hypot(high_q - q, p - low_p),
        "Newcombe, not paired",
    )


def paired_shares_differ(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Agresti and Min's interval of the difference of two shares; task by task, each success is 0 or 1."""
    n = len(before)
    won = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    middle = (won - lost) / (n + 2)
    half = Z * math.sqrt(max(0.0, won + lost + 1 - (won - lost) ** 2 / (n + 2))) / (n + 2)
    value = (won - lost) / n
    low, high = max(-1.0, min(value, middle - half)), min(1.0, max(value, middle + half))
    return Estimate(value, low, high, f"Agresti-Min, paired over {n} tasks")


def ratio_values(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    """Values whose mean is the ratio `sum(sums) / sum(counts)`, and whose spread is that of the ratio.

    They are its linearised values (Cochran, Sampling Techniques, 1977, 6.4). All counts are at least 1. If they are
    equal, the values are the ratios themselves. An episode's rewards and the number of its turns give the mean of a
    turn:

    >>> ratio_values([1.0, 1.0], [1, 3])
    (0.75, 0.25)
    """
    if len(set(counts)) == 1:
        return tuple(total / count for total, count in zip(sums, counts, strict=True))
    ratio, mean_count = math.fsum(sums) / sum(counts), fmean(counts)
    return tuple(ratio + (total - ratio * count) / mean_count for total, count in zip(sums, counts, strict=True))


def means_differ(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Welch's interval of the difference of two means."""
    value = fmean(after) - fmean(before)
    if min(len(before), len(after)) < 2:
        return Estimate(value, None, None, "no spread in one value")
    parts = [variance(values) / len(values) for values in (before, after)]
    spread = sum(parts)
    if not spread:
        return Estimate(value, None, None, "no spread in equal values")
    squares = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (before, after), strict=True))
    half = t_quantile(max(1, math.floor(spread**2 / squares))) * math.sqrt(spread)
    return Estimate(value, value - half, value + half, "Welch, not paired")


def paired_means_differ(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Student's interval of the mean difference, task by task."""
    found = mean([b - a for a, b in zip(before, after, strict=True)], "tasks")
    how = found.how if found.low is None else f"t, paired over {len(before)} tasks"
    return Estimate(found.value, found.low, found.high, how)


def t_quantile(degrees: int) -> float:
    """The t above which (1 - LEVEL) / 2 of Student's distribution with so many degrees of freedom lie.

    >>> round(t_quantile(1), 3), round(t_quantile(10), 3)
    (12.706, 2.228)
    """
    low, high = 0.0, 2.0 * Z * 12.0 / min(degrees, 12)
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, degrees) < LEVEL else (low, middle)
    return high


def t_within(t: float, degrees: int) -> float:
    """Probability that Student's t with so many degrees of freedom is at most `t` in size.

    The finite series for whole numbers: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, cosine) if degrees % 2 else (1.0, 1.0)
    for n in range(3 if degrees % 2 else 2, degrees - 1, 2):
        term *= cosine**2 * (n - 1) / n
        total += term
    if degrees % 2:
        return 2 / math.pi * (angle + sine * (total if degrees > 1 else 0.0))
    return sine * total
