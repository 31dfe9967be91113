"""Decides whether credit fits the team: the agents that it names, the branches that it compares, and its potentials.

A potential phi leaves the ranking of policies as it is only if phi before and after each call cancels (docs/math.md
section 14):

returned to call k    sum of gamma^j F_j = -phi(s_k), known before the call: a baseline
not added up          F_k = gamma phi(s') - phi(s): pays for the step alone, and the sign of the gradient may turn
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from flexmarl.agents.settings import TeamSettings
from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.gdpo import Gdpo
from flexmarl.credit.interface import GroupKey
from flexmarl.credit.settings import CreditSettings, divides_by_mean
from flexmarl.credit.shaping.step_rewards import Potential, RewardToGo
from flexmarl.records import AgentName

REMEDY = (
    "use credit.estimator={type: step_gae, lam: 1, scope: agent}, or {type: reinforce} with {type: reward_to_go, "
    "scope: agent} as the last term, or leave potential out"
)


class _Returns(NamedTuple):
    """How the rewards that follow an agent's call are added up."""

    by: str
    """Key of the setting that adds them up."""
    scope: str
    """The calls whose rewards count: those of the `agent`, of the `team`, or the call's `descendants`."""
    gamma: float
    lam: float


def type_of(estimator: AnyEstimator) -> str:
    """Returns the estimator's name in the table."""
    return str(getattr(estimator, "type", ""))


def potentials_cancel(credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
    """Yields a sentence for each reason why a potential does not cancel. `agents` are the trained ones."""
    for where, term in credit.terms.items():
        if isinstance(term, Potential):
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
        if returns is not None and returns.scope != "agent":
            yield (
                f"credit.{where} is a potential for {', '.join(term.agents)}, but {returns.by} adds up what they earn "
                f"for agent '{agent}' too (scope '{returns.scope}'), for which it does not cancel; use scope=agent "
                f"there"
            )
        return
    if returns is None:
        yield (
            f"credit.{where} is a potential, which turns no gradient only where what follows a call is added up, but "
            f"the estimator of agent '{agent}', {type_of(estimator)}, credits a call with its own reward; {REMEDY}"
        )
    elif not estimator.has_fixed_baseline:
        yield (
            f"credit.{where} is a potential, but the estimator of agent '{agent}', {type_of(estimator)}, compares a "
            f"call with rewards that come after it, of which the potential is a part; {REMEDY}"
        )
    else:
        yield from _of_discounts(where, term, agent, returns)
        if not (alone and returns.scope == "team"):
            yield from _of_scopes(credit, where, term, agent, returns)


def _of_discounts(where: str, term: Potential, agent: AgentName, returns: _Returns) -> Iterator[str]:
    if term.gamma != returns.gamma:
        yield (
            f"credit.{where}.gamma is {term.gamma:g}, but what follows a call of agent '{agent}' is discounted by "
            f"{returns.gamma:g}, so that an agent could gain by going to and fro; use gamma={returns.gamma:g}"
        )
    if returns.by.startswith("credit.shaping") and returns.gamma != 1:
        yield (
            f"credit.{where} is a potential, but {returns.by}.gamma is {returns.gamma:g} for every call of the team in "
            f"between, which is not what lies between two calls of a chain; use gamma=1 in both"
        )
    if returns.lam != 1:
        yield (
            f"credit.{where} is a potential, but {returns.by}.lam is {returns.lam:g}, with which a critic that has not "
            f"learned phi lets some of it through; use lam=1"
        )


def _of_scopes(
    credit: CreditSettings, where: str, term: Potential, agent: AgentName, returns: _Returns
) -> Iterator[str]:
    if term.scope != returns.scope:
        use = "scope=agent in both" if returns.scope == "descendants" else f"scope={returns.scope}"
        yield (
            f"credit.{where}.scope is '{term.scope}', but {returns.by} adds up what follows by scope "
            f"'{returns.scope}', so that phi before and after a call of agent '{agent}' does not cancel; use {use}"
        )
    elif term.scope == "team" and (term.agents or (credit.per_agent and returns.by == "credit.estimator")):
        yield (
            f"credit.{where}.scope is 'team', but not all agents of the team have it, or another estimator has some of "
            f"them, so that phi does not cancel for agent '{agent}'; use scope=agent for the term and in {returns.by}"
        )


def _returns(credit: CreditSettings, agent: AgentName) -> _Returns | None:
    """Returns what adds up an agent's rewards: its estimator, or its reward_to_go term. None if nothing does."""
    estimator = credit.estimator_of(agent)
    if estimator.adds_up_calls:
        gamma, lam = (getattr(estimator, name, 1.0) for name in ("gamma", "lam"))
        if agent in credit.per_agent:  # It sees no other agent's calls.
            return _Returns(f"credit.per_agent.{agent}", "agent", gamma, lam)
        return _Returns("credit.estimator", getattr(estimator, "scope", "team"), gamma, lam)
    for where, term in credit.terms.items():
        if isinstance(term, RewardToGo) and term.is_for(agent):
            return _Returns(f"credit.{where}", term.scope, term.gamma, 1.0)
    return None


def misfits(
    credit: CreditSettings, team: TeamSettings, trained: Collection[str], *, pays_divergence: Collection[str]
) -> Iterator[str]:
    """Yields a sentence for each setting that does not fit.

    `trained` are the policies that are updated. `pays_divergence` are those whose rewards pay for a divergence.
    """
    agents = [AgentName(agent) for agent, seat in team.agents.items() if seat.policy in trained]
    yield from _names_are_of_the_team(credit, team)
    yield from _every_agent_has_a_key(credit, team, trained)
    yield from _branches_are_where_they_are_compared(credit, team)
    yield from returns_are_added_up_once(credit, agents)
    yield from potentials_cancel(credit, agents)
    yield from _negative_rewards_are_not_divided_by(credit, team, pays_divergence)


def has_key(agent: str, key: GroupKey) -> bool:
    """Returns True if `key` says what the agent's rows are grouped by."""
    return not isinstance(key, Mapping) or bool({agent, "*"} & {*key})


def _names_are_of_the_team(credit: CreditSettings, team: TeamSettings) -> Iterator[str]:
    named = {f"per_agent.{agent}": {str(agent)} for agent in credit.per_agent}
    for where, term in credit.terms.items():
        named[where] = {*term.agents, *getattr(term, "solvers", ())}
    for where, estimator in credit.estimators.items():
        named[f"{where}.episode_roles"] = roles = {*getattr(estimator, "episode_roles", ())}
        named[f"{where}.key"] = {*estimator.key} - {"*"} - roles if isinstance(estimator.key, Mapping) else set()
    for where, agents in named.items():
        for agent in sorted(agents - set(team.agents)):
            yield f"credit.{where} is for agent '{agent}'; the team has: {', '.join(team.agents)}"


def _every_agent_has_a_key(credit: CreditSettings, team: TeamSettings, trained: Collection[str]) -> Iterator[str]:
    for agent, seat in team.agents.items():
        key = credit.estimator_of(agent).key
        if seat.policy in trained and not has_key(agent, key):
            yield (
                f"credit has a key for {', '.join(key)}, but none for agent '{agent}'; add it to the estimator's key, "
                f"or '*' for all others"
            )


def _branches_are_where_they_are_compared(credit: CreditSettings, team: TeamSettings) -> Iterator[str]:
    """Checks that episodes branch only if credit allows it, and do so if credit compares branches.

    A custom workflow may fork its team itself, so it needs no `candidates`.
    """
    candidates = getattr(team.workflow, "candidates", 1)
    for where in credit.follows_calls if candidates > 1 else ():
        yield (
            f"credit.{where} goes from call to call, but team.workflow.candidates is {candidates}, so that an "
            f"episode branches at every turn; use team.workflow.candidates=1, or compare the candidates of a turn "
            f"(credit.estimator.type=atgrpo or c3, shaping type tree)"
        )
    for where in credit.needs_branches if candidates == 1 and team.workflow.type != "custom" else ():
        yield (
            f"credit.{where} compares the candidates of a turn, but team.workflow of type '{team.workflow.type}' plays "
            f"each turn once; use team.workflow.type=turns with candidates=4, or leave credit.{where} out"
        )


def returns_are_added_up_once(credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
    """Yields a sentence for each term that adds up rewards a second time. `agents` are the trained ones."""
    for where, term in credit.terms.items():
        for agent in filter(term.is_for, agents if isinstance(term, RewardToGo) else ()):
            estimator = credit.estimator_of(agent)
            if estimator.adds_up_calls:
                yield (
                    f"credit.{where} adds up what follows each call of agent '{agent}', and so does its estimator, "
                    f"{type_of(estimator)}: it would count twice; leave reward_to_go out, or use another estimator"
                )
            if isinstance(estimator, Gdpo):
                yield (
                    f"credit.{where} adds up all parts of the rewards that follow each call of agent '{agent}', but "
                    f"its estimator, gdpo, compares them one by one; leave reward_to_go out, or use another estimator"
                )


def _negative_rewards_are_not_divided_by(
    credit: CreditSettings, team: TeamSettings, pays_divergence: Collection[str]
) -> Iterator[str]:
    """Checks rewards that a policy's divergence may make negative. Terms are checked in CreditSettings."""
    for agent, seat in team.agents.items():
        if seat.policy in pays_divergence and divides_by_mean(credit.estimator_of(agent)):
            yield (
                f"policies.{seat.policy}.training.kl.where is 'reward', which may make rewards of agent '{agent}' "
                f"negative, but its estimator, {type_of(credit.estimator_of(agent))}, divides by their mean; use "
                f"kl.where=loss, or another estimator"
            )
