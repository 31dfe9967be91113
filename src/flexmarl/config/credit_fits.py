"""Decides whether credit fits the team: the agents that it names, the branches and the discounts that it counts on."""

from collections.abc import Collection, Iterator, Mapping

from flexmarl.agents.settings import TeamSettings
from flexmarl.credit.estimators.step_gae import StepGae
from flexmarl.credit.interface import GroupKey
from flexmarl.credit.settings import CreditSettings
from flexmarl.credit.shaping.potential import Potential
from flexmarl.credit.shaping.reward_to_go import RewardToGo
from flexmarl.records import AgentName


def misfits(credit: CreditSettings, team: TeamSettings, trained: Collection[str]) -> Iterator[str]:
    """What does not fit, a sentence each; `trained` are the policies that are updated."""
    yield from _names_are_of_the_team(credit, team)
    yield from _every_agent_has_a_key(credit, team, trained)
    yield from _branches_are_where_they_are_compared(credit, team)
    yield from _terms_fit_estimators(credit, team, trained)


def has_key(agent: str, key: GroupKey) -> bool:
    """Whether it says what the agent's rows are grouped by."""
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
    """A workflow of the user's own may fork its team itself."""
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


def _terms_fit_estimators(credit: CreditSettings, team: TeamSettings, trained: Collection[str]) -> Iterator[str]:
    agents = [AgentName(agent) for agent, seat in team.agents.items() if seat.policy in trained]
    for where, term in credit.terms.items():
        for agent in filter(term.is_for, agents):
            estimator = credit.estimator_of(agent)
            discount = getattr(estimator, "gamma", 1.0) if getattr(estimator, "follows_calls", False) else 1.0
            if isinstance(term, Potential) and term.gamma != discount:
                yield (
                    f"credit.{where}.gamma is {term.gamma:g}, but what follows a call of agent '{agent}' is discounted "
                    f"by {discount:g}, so that an agent could gain by going to and fro; use gamma={discount:g}"
                )
            if isinstance(term, RewardToGo) and isinstance(estimator, StepGae):
                yield (
                    f"credit.{where} adds up what follows each call of agent '{agent}', and so does its estimator, "
                    f"step_gae: it would count twice; leave reward_to_go out, or use another estimator"
                )
