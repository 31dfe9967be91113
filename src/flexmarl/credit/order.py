"""Decides the credit of rows: shape, penalise, filter, estimate, whiten, balance; in this order.

rows of a task ──► shape ──► decide ──► rows of whole groups ──► credit: estimate, then whiten, then balance
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flexmarl.credit.interface import Credit, CreditRow, Estimator


def credit_of(
    rows: Sequence[CreditRow], memory: Mapping[str, float], *, estimator: Estimator, untrained_in_baseline: bool
) -> Credit:
    """An advantage and a weight for every row; those that do not train have weight 0."""
    seen = [row for row in rows if untrained_in_baseline or row.trains or row.greedy]
    credit = estimator.estimate(seen, memory)
    left_out = [row.sample_id for row in rows if row.greedy or not row.trains]
    nothing = dict.fromkeys(left_out, 0.0)
    return replace(
        credit,
        advantages={**credit.advantages, **nothing},
        weights={**credit.weights, **nothing},
        token_advantages={name: tokens for name, tokens in credit.token_advantages.items() if name not in nothing},
        returns={name: tokens for name, tokens in credit.returns.items() if name not in nothing},
    )
