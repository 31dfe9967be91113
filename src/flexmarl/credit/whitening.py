"""Decides whitened advantages: mean 0 and variance 1 over all sampled tokens (docs/math.md section 5)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit.interface import AgentReport, Credit, CreditRow, Tokens, in_order

Scope = Literal["batch", "policy", "agent"]
"""Whose tokens share one mean and variance: all of the step, a policy's, or an agent's."""

EPS = 1e-8
TOO_FEW = "not whitened: fewer than 2 sampled tokens have no variance"


def whiten(credit: Credit, rows: Sequence[CreditRow], scope: Scope) -> Credit:
    """The credit with whitened advantages of the rows that train and have a weight; returns stay as they are.

    Where there are fewer than two tokens all advantages are 0, and the agents' reports say so.
    """
    blocks: dict[str, list[CreditRow]] = {}
    for row in in_order(rows):
        if row.num_tokens and row.trains and not row.greedy and credit.weights.get(row.sample_id):
            blocks.setdefault("" if scope == "batch" else str(row.tag(scope)), []).append(row)
    advantages, tokens, report = dict(credit.advantages), dict(credit.token_advantages), dict(credit.report)
    for members in blocks.values():
        found = whitened(np.concatenate([_tokens_of(row, credit) for row in members]))
        for row, of_row in zip(members, _split(found, members), strict=True):
            advantages[row.sample_id] = float(of_row[0])
            if row.sample_id in tokens:
                tokens[row.sample_id] = Tokens(of_row.tolist())
                advantages[row.sample_id] = float(of_row.mean())
        if len(found) < 2:
            agent = members[0].agent
            report[agent] = report.get(agent, AgentReport()) + AgentReport(notes=(TOO_FEW,))
    return replace(credit, advantages=advantages, token_advantages=tokens, report=report)


def whitened(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """(x - mean) / sqrt(var + 1e-8), the variance with N - 1; 0 for equal numbers, and for a single one.

    >>> whitened(np.array([1.0, 2.0, 3.0])).round(4).tolist()
    [-1.0, 0.0, 1.0]
    """
    # The 1e-8 in the mean leaves equal numbers beside it, which the 1e-8 under the root would magnify.
    if len(x) < 2 or x.min() == x.max():
        return np.zeros_like(x)
    n = len(x)
    centred = x - x.sum() / (n + EPS)
    variance = (centred**2).sum() / (n + EPS) * n / (n - 1)
    return centred / np.sqrt(variance + EPS)


def _tokens_of(row: CreditRow, credit: Credit) -> NDArray[np.float64]:
    tokens = credit.token_advantages.get(row.sample_id)
    return np.full(row.num_tokens, credit.advantages[row.sample_id]) if tokens is None else np.array(tokens, np.float64)


def _split(x: NDArray[np.float64], rows: Sequence[CreditRow]) -> list[NDArray[np.float64]]:
    return np.split(x, np.cumsum([row.num_tokens for row in rows])[:-1])
