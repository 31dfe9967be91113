"""Decides whether credit fits the team: the agents that it names, the branches that it compares, its terms."""

from collections.abc import Collection, Iterator, Mapping

from flexmarl.agents.settings import TeamSettings
from flexmarl.credit.interface import GroupKey
from flexmarl.credit.settings import CreditSettings, divides_by_mean
from flexmarl.records import AgentName


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
    for where, term in credit.terms.items():
        yield from term.misfits(where, credit, agents)
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


def _negative_rewards_are_not_divided_by(
    credit: CreditSettings, team: TeamSettings, pays_divergence: Collection[str]
) -> Iterator[str]:
    """Checks rewards that a policy's divergence may make negative. Terms are checked in CreditSettings."""
    for agent, seat in team.agents.items():
        if seat.policy in pays_divergence and divides_by_mean(credit.estimator_of(agent)):
            yield (
                f"policies.{seat.policy}.training.kl.where is 'reward', which may make rewards of agent '{agent}' "
                f"negative, but its estimator, {credit.estimator_of(agent).type}, divides by their mean; use "
                f"kl.where=loss, or another estimator"
            )
