"""Decides the credit of rows: shape, penalise, filter, estimate, whiten, balance; in this order.

  rows of a task ──► shape ──► penalise ──► decide
                                            ╰──► rows of whole groups ──► estimate ──► whiten ──► (penalise) ──► balance

What does not train has weight 0 before anything is whitened or balanced, and only what comes out here is padded, packed
or split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flexmarl.credit.interface import AgentReport, Credit, CreditRow, Estimator
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD

LARGEST_CREDITED = 1e6 * LARGEST_REWARD
"""Of a reward after all terms: room for the sum of what a million calls earned, and squares are far from overflow."""


def counted(rows: Sequence[CreditRow], *, untrained_in_baseline: bool) -> list[CreditRow]:
    """The rows that others are compared with; those of a greedy play are for estimators that use them."""
    return [row for row in rows if row.greedy or row.trains or untrained_in_baseline]


def estimated(
    rows: Sequence[CreditRow], memory: Mapping[str, float], *, estimator: Estimator, untrained_in_baseline: bool
) -> Credit:
    """An advantage and a weight for every row; greedy ones, and those that do not train, have weight 0."""
    _check_size(rows)
    credit = estimator.estimate(counted(rows, untrained_in_baseline=untrained_in_baseline), memory)
    _check_finite(credit, rows)
    nothing = {row.sample_id: 0.0 for row in rows if row.greedy or not row.trains}
    report = dict(credit.report)
    for row in rows:
        report[row.agent] = report.get(row.agent, AgentReport()) + AgentReport(untrained=not row.trains)
    return replace(
        credit,
        advantages={**credit.advantages, **nothing},
        weights={**credit.weights, **nothing},
        report=report,
        token_advantages={name: tokens for name, tokens in credit.token_advantages.items() if name not in nothing},
        returns={name: tokens for name, tokens in credit.returns.items() if name not in nothing},
    )


def _check_size(rows: Sequence[CreditRow]) -> None:
    for row in rows:
        if row.reward is not None and abs(row.reward) > LARGEST_CREDITED:
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has reward {row.reward:g} after all terms; it must be at "
                f"most {LARGEST_CREDITED:g}, else what it is compared with is lost: give rewards on a smaller scale"
            )


def _check_finite(credit: Credit, rows: Sequence[CreditRow]) -> None:
    for row in rows:
        found = (credit.advantages.get(row.sample_id, 0.0), *credit.token_advantages.get(row.sample_id, ()))
        if not all(map(math.isfinite, found)):
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has reward {row.reward} and an advantage that is not "
                f"finite; rewards, the tags that terms read and the settings of terms must be smaller"
            )
