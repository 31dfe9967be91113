"""Decides the numbers that one policy's update is divided by (docs/math.md section 1)."""

import math
from collections.abc import Iterable

from flexmarl.records import CreditedTurn, Divisors


def divisors_of(samples: Iterable[CreditedTurn]) -> Divisors:
    """Counts the weighted tokens, rows and episodes of one policy's samples, which must be whole groups.

    Each sum is exact until one rounding at its end, so the order of the samples cannot change its last bit.
    """
    rows = [sample for sample in samples if sample.num_tokens and sample.weight]
    return Divisors(
        num_tokens=math.fsum(sample.weight * sample.num_tokens for sample in rows),
        num_sequences=math.fsum(sample.weight for sample in rows),
        num_trajectories=float(len({sample.turn.episode for sample in rows})),
    )
