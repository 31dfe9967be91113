"""Decides row weights that give the agents of a shared policy equal shares of its step (docs/math.md section 5)."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from flexmarl.credit.interface import Credit, CreditRow, in_order
from flexmarl.records import AgentName, PolicyName


def equal_shares(credit: Credit, rows: Sequence[CreditRow]) -> Credit:
    """The credit with w_i times N / (K N_agent), for a policy of K agents with N tokens in all.

    Then token-mean is the mean over agents of each agent's token-mean, and N_tok is still N. A policy with one agent
    keeps its weights.
    """
    tokens: dict[PolicyName, dict[AgentName, float]] = defaultdict(lambda: defaultdict(float))
    for row in in_order(rows):
        weighted = credit.weights[row.sample_id] * row.num_tokens
        if weighted:
            tokens[row.policy][row.agent] += weighted
    weights = dict(credit.weights)
    for row in rows:
        if weights[row.sample_id]:
            of_agents = tokens[row.policy]
            weights[row.sample_id] *= sum(of_agents.values()) / (len(of_agents) * of_agents[row.agent])
    return replace(credit, weights=weights)
