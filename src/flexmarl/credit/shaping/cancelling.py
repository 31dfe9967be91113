"""Decides where a potential changes no policy's rank: where phi before and after each call cancels.

Otherwise a potential turns gradients (docs/math.md section 14):

returned to call k    sum of gamma^j F_j = -phi(s_k), known before the call: a baseline
not added up          F_k = gamma phi(s') - phi(s): pays for the step alone, and the sign of the gradient may turn
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from flexmarl.credit.interface import LaterCalls
from flexmarl.records import AgentName

if TYPE_CHECKING:
    from flexmarl.credit.settings import CreditSettings
    from flexmarl.credit.shaping.outcomes import Potential

REMEDY = (
    "use credit.estimator={type: step_gae, lam: 1, scope: agent}, or {type: reinforce} with {type: reward_to_go, "
    "scope: agent} as the last term, or leave potential out"
)


class _Returns(NamedTuple):
    """The setting that adds up the rewards that follow an agent's call, and how it does."""

    by: str
    """Key of the setting that adds them up."""
    later: LaterCalls


def misfits_of(term: Potential, where: str, credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
    """Yields a sentence for each reason why the potential `credit.{where}` does not cancel. `agents` are trained."""
    if agents and not any(map(term.is_for, agents)):
        yield (
            f"credit.{where} is a potential for {', '.join(term.agents)}, which no training changes; name a trained "
            f"agent in its agents ({', '.join(sorted(agents))}), or leave potential out"
        )
        return
    for agent in agents:
        yield from _of_agent(credit, where, term, agent, alone=len(agents) == 1)
    yield from _of_all(credit, where)


def _of_all(credit: CreditSettings, where: str) -> Iterator[str]:
    if credit.whiten is not None:
        yield (
            f"credit.{where} is a potential, but credit.whiten is '{credit.whiten}', which takes a mean off that "
            f"depends on it; use whiten=null, or leave potential out"
        )
    if credit.untrained_finish and not credit.untrained_in_baseline:
        yield (
            f"credit.{where} is a potential, but credit.untrained_finish leaves calls out of what is added up, so that "
            f"phi before and after them does not cancel; use untrained_in_baseline=true, or leave potential out"
        )


def _of_agent(credit: CreditSettings, where: str, term: Potential, agent: AgentName, *, alone: bool) -> Iterator[str]:
    estimator, returns = credit.estimator_of(agent), _returns(credit, agent)
    if not term.is_for(agent):
        if returns is not None and returns.later.scope != "agent":
            by, later = returns
            yield (
                f"credit.{where} is a potential for {', '.join(term.agents)}, but {by} adds up what they earn "
                f"for agent '{agent}' too (scope '{later.scope}'), for which it does not cancel; use scope=agent "
                f"there"
            )
        return
    if returns is None:
        yield (
            f"credit.{where} is a potential, which turns no gradient only where what follows a call is added up, but "
            f"the estimator of agent '{agent}', {estimator.type}, credits a call with its own reward; {REMEDY}"
        )
    elif not estimator.has_fixed_baseline:
        yield (
            f"credit.{where} is a potential, but the estimator of agent '{agent}', {estimator.type}, compares a "
            f"call with rewards that come after it, of which the potential is a part; {REMEDY}"
        )
    else:
        yield from _of_discounts(where, term, agent, returns)
        if not (alone and returns.later.scope == "team"):
            yield from _of_scopes(credit, where, term, agent, returns)


def _of_discounts(where: str, term: Potential, agent: AgentName, returns: _Returns) -> Iterator[str]:
    by, later = returns
    if term.gamma != later.gamma:
        yield (
            f"credit.{where}.gamma is {term.gamma:g}, but what follows a call of agent '{agent}' is discounted by "
            f"{later.gamma:g}, so that an agent could gain by going to and fro; use gamma={later.gamma:g}"
        )
    if by.startswith("credit.shaping") and later.gamma != 1:
        yield (
            f"credit.{where} is a potential, but {by}.gamma is {later.gamma:g} for every call of the team in "
            f"between, which is not what lies between two calls of a chain; use gamma=1 in both"
        )
    if later.lam != 1:
        yield (
            f"credit.{where} is a potential, but {by}.lam is {later.lam:g}, with which a critic that has not "
            f"learned phi lets some of it through; use lam=1"
        )


def _of_scopes(
    credit: CreditSettings, where: str, term: Potential, agent: AgentName, returns: _Returns
) -> Iterator[str]:
    by, later = returns
    if term.scope != later.scope:
        use = "scope=agent in both" if later.scope == "descendants" else f"scope={later.scope}"
        yield (
            f"credit.{where}.scope is '{term.scope}', but {by} adds up what follows by scope "
            f"'{later.scope}', so that phi before and after a call of agent '{agent}' does not cancel; use {use}"
        )
    elif term.scope == "team" and (term.agents or (credit.per_agent and by == "credit.estimator")):
        yield (
            f"credit.{where}.scope is 'team', but not all agents of the team have it, or another estimator has some of "
            f"them, so that phi does not cancel for agent '{agent}'; use scope=agent for the term and in {by}"
        )


def _returns(credit: CreditSettings, agent: AgentName) -> _Returns | None:
    """Returns what adds up an agent's rewards: its estimator, or its reward_to_go term. None if nothing does."""
    if (later := credit.estimator_of(agent).later_calls) is not None:
        if agent in credit.per_agent:  # It sees no other agent's calls.
            return _Returns(f"credit.per_agent.{agent}", replace(later, scope="agent"))
        return _Returns("credit.estimator", later)
    for where, term in credit.terms.items():
        if term.is_for(agent) and (later := term.later_calls) is not None:
            return _Returns(f"credit.{where}", later)
    return None
