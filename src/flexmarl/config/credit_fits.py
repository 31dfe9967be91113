"""Decides whether credit fits the team: the agents that it names, the branches and the discounts that it counts on."""

from collections.abc import Collection, Iterator, Mapping

from flexmarl.agents.settings import TeamSettings
from flexmarl.config.potentials import potentials_cancel, type_of
from flexmarl.credit.estimators.gdpo import Gdpo
from flexmarl.credit.interface import GroupKey
from flexmarl.credit.settings import CreditSettings, divides_by_mean
from flexmarl.credit.shaping.step_rewards import RewardToGo
from flexmarl.records import AgentName


def misfits(
    credit: CreditSettings, team: TeamSettings, trained: Collection[str], *, pays_divergence: Collection[str]
) -> Iterator[str]:
    """What does not fit, a sentence each.

    `trained` are the policies that are updated, `pays_divergence` those of them whose rewards pay for a divergence.
    """
    agents = [AgentName(agent) for agent, seat in team.agents.items() if seat.policy in trained]
    yield from _names_are_of_the_team(credit, team)
    yield from _every_agent_has_a_key(credit, team, trained)
    yield from _branches_are_where_they_are_compared(credit, team)
    yield from returns_are_added_up_once(credit, agents)
    yield from potentials_cancel(credit, agents)
    yield from _negative_rewards_are_not_divided_by(credit, team, pays_divergence)


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


def returns_are_added_up_once(credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
    """What would add up what follows a call a second time, a sentence each; `agents` are those that are trained."""
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
    """Terms are looked at where credit is, which does not know what policies pay."""
    for agent, seat in team.agents.items():
        if seat.policy in pays_divergence and divides_by_mean(credit.estimator_of(agent)):
            yield (
                f"policies.{seat.policy}.training.kl.where is 'reward', which may make rewards of agent '{agent}' "
                f"negative, but its estimator, {type_of(credit.estimator_of(agent))}, divides by their mean; use "
                f"kl.where=loss, or another estimator"
            )
