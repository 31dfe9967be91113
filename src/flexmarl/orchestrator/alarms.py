"""Decides when the figures of a run say that its training goes wrong. Each alarm has a figure, and what to try.

| alarm     | about    | condition, of the figures of each step                              | setting            |
|-----------|----------|---------------------------------------------------------------------|--------------------|
| untrained | a policy | no update                                                           | `alarms.untrained` |
| no_spread | the team | the rewards of this share of the groups, dropped or kept, are equal | `alarms.no_spread` |
|           | an agent | its own are, of the groups judged and of those trained on in the    |                    |
|           |          | step, not all of them the best, while those of others differ        |                    |
| failed    | the team | this share of the episodes failed                                   | `alarms.failed`    |
| cut       | an agent | `max_tokens` ended this share of its replies                        | `alarms.cut`       |
| entropy   | a policy | its entropy is below this share of that of the first update         | `alarms.entropy`   |
| drift     | a policy | engine and trainer differ: the divergence per token is above this   | `alarms.drift`     |

A condition must hold for some steps in a row. Each alarm sounds once for each subject in a command: a line for every
step would hide the others.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.events.event import Events
from flexmarl.events.notices import FiguresWritten
from flexmarl.events.run_events import AlarmKind, AlarmRaised
from flexmarl.orchestrator.settings import AlarmSettings
from flexmarl.records import NO_SPREAD, FilterReason, PolicyName

_SIZE = re.compile("credit/[^/]+/group_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """An alarm's condition, looked at in the figures of one step."""

    subject: str
    """The agent or the policy; empty for the team."""
    holds: bool
    value: float
    """The figure."""
    says: str
    """The figure in words."""
    remedy: str
    """Something to try."""
    steps: int | None = None
    """Steps in a row in which it must hold; None for `alarms.steps`."""


class AlarmRules:
    """Decides which alarms sound after each step of one command."""

    def __init__(self, settings: AlarmSettings, trained: Collection[PolicyName]) -> None:
        self._settings, self._trained = settings, sorted(trained)
        self._held: defaultdict[tuple[AlarmKind, str], dict[int, Mapping[str, float]]] = defaultdict(dict)
        """The steps in a row in which a condition held, and their metrics. A step that says nothing is left out."""
        self._sounded: set[tuple[AlarmKind, str]] = set()
        self._first_entropy: dict[PolicyName, float] = {}
        self._fewest_equal: dict[str, float] = {}
        """Smallest share of groups with equal rewards in an earlier step, by subject of `no_spread`."""

    def after_step(self, step: int, values: Mapping[str, float]) -> list[AlarmRaised]:
        """Returns the alarms that sound now. `step`: steps done; `values`: the metrics of the last one, by name."""
        sounds: list[AlarmRaised] = []
        for alarm, limit, one in self._conditions(values):
            key = (alarm, one.subject)
            if key in self._sounded:
                continue
            held = self._held[key]
            held[step] = values
            if not one.holds:
                held.clear()
            elif len(held) == (one.steps or self._settings.steps):
                self._sounded.add(key)
                whole = self._of_all(alarm, one, [*held.values()])
                sounds.append(
                    AlarmRaised(
                        step=step,
                        alarm=alarm,
                        subject=one.subject,
                        value=whole.value,
                        limit=limit,
                        because=f"{whole.says}, {_in_steps([*held])}",
                        remedy=f"{one.remedy} (alarms.{alarm}={limit:g}; null turns it off)",
                    )
                )
                held.clear()
        return sounds

    def _of_all(self, alarm: AlarmKind, one: Condition, steps: Sequence[Mapping[str, float]]) -> Condition:
        """The condition, as the metrics of all these steps together show it; `one` is that of the last."""
        together = _together(steps)
        conditions = (found for kind, _, found in self._conditions(together) if kind == alarm)
        return next((found for found in conditions if found.subject == one.subject), one)

    def _conditions(self, values: Mapping[str, float]) -> Iterator[tuple[AlarmKind, float, Condition]]:
        """Yields the conditions of the alarms that are on, each with its alarm and the setting it is compared with."""
        rules: dict[AlarmKind, Callable[[Mapping[str, float], Any], Iterator[Condition]]] = {
            AlarmKind.UNTRAINED: self._untrained,
            AlarmKind.NO_SPREAD: self._no_spread,
            AlarmKind.FAILED: _failed,
            AlarmKind.CUT: _cut,
            AlarmKind.ENTROPY: self._entropy,
            AlarmKind.DRIFT: self._drift,
        }
        for alarm, rule in rules.items():
            limit = getattr(self._settings, alarm)
            if limit is not None:
                yield from ((alarm, limit, condition) for condition in rule(values, limit))

    def _untrained(self, values: Mapping[str, float], limit: int) -> Iterator[Condition]:
        for policy in self._trained:
            samples = values.get(f"train/{policy}/samples", 0.0)
            unasked = values.get(f"filtered/{FilterReason.NO_TRAINED_TURN}", 0.0)
            yield Condition(
                subject=policy,
                holds=not samples and not values.get(f"train/{policy}/rested"),
                value=samples,
                steps=limit,
                says=f"policy '{policy}' was not updated: no row of it had a weight",
                remedy="in groups filtered as no_trained_turn no agent of a trained policy was asked: let the workflow "
                "await an act of one in each episode"
                if 2 * unasked >= max(1.0, values.get("rollout/groups", 0.0))
                else "look at the reasons of failed episodes and filtered groups in the lines above; choose tasks "
                "that are neither too easy nor too hard, or set credit.filter.refill=true",
            )

    def _no_spread(self, values: Mapping[str, float], limit: float) -> Iterator[Condition]:
        groups = values.get("rollout/groups", 0.0)
        if not groups:
            return
        dropped = {reason: values.get(f"filtered/{reason}", 0.0) for reason in NO_SPREAD}
        share = sum(dropped.values()) / groups
        verdicts = f"{_counts(dropped)}{_by_agent(values)}"
        said = [f"{share:.0%} of {groups:.0f} groups have equal rewards by credit.filter ({verdicts})"] if share else []
        compared, alike = _credit_groups(values)
        if equal := sum(alike.values()):  # Groups that are trained on although their rewards are equal.
            share += (1 - share) * equal / compared
            said.append(f"the rewards of {equal:.0f} of {compared:.0f} credit groups did not differ ({_counts(alike)})")
            dropped = {reason: dropped[reason] + alike[reason] for reason in NO_SPREAD}
        yield Condition(
            subject="",
            holds=share >= limit,
            value=share,
            says=f"{' and '.join(said)}, so nothing can be learned from comparing them",
            remedy=self._spread_remedy("", share, limit, dropped),
        )
        for agent, (judged, equal_by) in _verdicts(values).items():
            # One that always does best has nothing left to learn. If no agent's rewards differ, it is said above.
            alone = share < limit and 2 * equal_by[FilterReason.TOO_EASY] <= sum(equal_by.values())
            # In the asynchronous modes a step trains on groups that were judged in earlier ones.
            trained, differ = (values.get(f"credit/{agent}/{kind}", 0.0) for kind in ("groups", "effective"))
            equal_share = sum(equal_by.values()) / judged
            yield Condition(
                subject=agent,
                holds=alone and equal_share >= limit and differ <= (1 - limit) * trained,
                value=equal_share,
                says=f"the rewards of agent '{agent}' did not differ, so it learns nothing ({_counts(equal_by)})",
                remedy=self._spread_remedy(agent, equal_share, limit, equal_by),
            )

    def _spread_remedy(self, subject: str, share: float, limit: float, equal_by: Mapping[FilterReason, float]) -> str:
        """The remedy for equal rewards of the subject, by what earlier steps showed; notes the share of this step."""
        fewest = self._fewest_equal.get(subject, 1.0)
        self._fewest_equal[subject] = now = min(fewest, share)
        before = ""
        if now == 1:
            before = "they have not differed since this command began; "
        elif fewest < limit and 2 * equal_by[FilterReason.TOO_EASY] <= sum(equal_by.values()):
            before = (
                "rewards differed in earlier steps: look at the replies with `flexmarl show`; if an update has ruined "
                "them, lower training.optimizer.learning_rate and begin anew; "
            )
        return (
            f"{before}too_hard: give easier tasks or partial rewards (if they are parts of their own, with "
            "credit.filter.filter_on=final); too_easy: give harder tasks; flat: look whether the reward depends on the "
            "replies; raise batch.episodes or sampling.temperature"
        )

    def _entropy(self, values: Mapping[str, float], limit: float) -> Iterator[Condition]:
        for policy in self._trained:
            entropy = values.get(f"train/{policy}/entropy")
            if entropy is None:
                continue
            first = self._first_entropy.setdefault(policy, entropy)
            share = entropy / first if first > 0 else 1.0
            yield Condition(
                subject=policy,
                holds=share < limit,
                value=share,
                says=f"entropy of policy '{policy}' is {entropy:.3g} nats per token, {share:.1%} of the first update's",
                remedy=f"it hardly tries anything new; if its reward is not yet good: lower policies.{policy}.training."
                f"optimizer.learning_rate, raise its entropy_coef, or add kl to it; go back to an older checkpoint",
            )

    def _drift(self, values: Mapping[str, float], limit: float) -> Iterator[Condition]:
        for policy in self._trained:
            kl = values.get(f"train/{policy}/kl_to_sampler")
            if kl is None:
                continue
            yield Condition(
                subject=policy,
                holds=not kl <= limit,
                value=kl,
                says=f"trainer and engine of policy '{policy}' differ by {kl:.3g} nats per sampled token",
                remedy=f"use one dtype for policies.{policy}.training and .engine; in an asynchronous mode lower "
                f"pipeline.lag, or set policies.{policy}.training.correction={{type: tis}}",
            )


def _together(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several steps as of one: counts add up, shares of replies are averaged, others are the newest."""
    together: dict[str, float] = {}
    for name in dict.fromkeys(name for values in steps for name in values):
        found = [values[name] for values in steps if name in values]
        counts = name.startswith(("filter/", "filtered/", "credit/", "rollout/")) and not _SIZE.fullmatch(name)
        together[name] = sum(found) if counts else found[-1]
        if name.startswith("cut/"):
            together[name] = sum(found) / len(found)
    return together


def _in_steps(steps: Sequence[int]) -> str:
    """The steps in words.

    >>> _in_steps([3]), _in_steps([3, 4]), _in_steps([3, 5])
    ('in step 3', 'in steps 3 to 4', 'in steps 3, 5')
    """
    if len(steps) == 1:
        return f"in step {steps[0]}"
    in_a_row = steps[-1] - steps[0] == len(steps) - 1
    return f"in steps {steps[0]} to {steps[-1]}" if in_a_row else f"in steps {', '.join(map(str, steps))}"


def _credit_groups(values: Mapping[str, float]) -> tuple[float, dict[FilterReason, float]]:
    """Number of credit groups with something to compare, and of those whose rewards are equal, by reason."""
    agents = [name.split("/")[1] for name, size in values.items() if _SIZE.fullmatch(name) and size > 1]
    compared = sum(values.get(f"credit/{agent}/groups", 0.0) for agent in agents)
    alike = {reason: sum(values.get(f"credit/{agent}/{reason}", 0.0) for agent in agents) for reason in NO_SPREAD}
    return compared, alike


def _counts(groups: Mapping[FilterReason, float]) -> str:
    return ", ".join(f"{count:.0f} {reason}" for reason, count in groups.items() if count)


def _by_agent(values: Mapping[str, float]) -> str:
    """The verdicts of each agent, if they differ: a group is flat, too, if one agent's task is too hard for it and
    another's too easy."""
    said = {agent: _counts(equal) for agent, (_, equal) in _verdicts(values).items() if any(equal.values())}
    return "".join(f"; {agent}: {counts}" for agent, counts in said.items()) if len({*said.values()}) > 1 else ""


def _verdicts(values: Mapping[str, float]) -> dict[str, tuple[float, dict[FilterReason, float]]]:
    """Number of groups of each agent that credit.filter judged, and of those whose rewards are equal, by reason."""
    judged = defaultdict[str, float](float)
    for name, groups in values.items():
        if name.startswith("filter/"):
            judged[name.split("/")[1]] += groups
    by_reason = {
        agent: {reason: values.get(f"filter/{agent}/{reason}", 0.0) for reason in NO_SPREAD} for agent in judged
    }
    return {agent: (groups, by_reason[agent]) for agent, groups in sorted(judged.items()) if groups}


def _failed(values: Mapping[str, float], limit: float) -> Iterator[Condition]:
    episodes, failed = values.get("rollout/episodes", 0.0), values.get("rollout/failed_episodes", 0.0)
    if episodes:
        yield Condition(
            subject="",
            holds=failed >= limit * episodes,
            value=failed / episodes,
            says=f"{failed:.0f} of {episodes:.0f} episodes failed",
            remedy="read the first traceback of each kind in the run folder, failures/; `flexmarl show RUN --failed` "
            "prints the conversations that failed",
        )


def _cut(values: Mapping[str, float], limit: float) -> Iterator[Condition]:
    for name, share in values.items():
        if name.startswith("cut/"):
            agent = name.removeprefix("cut/")
            yield Condition(
                subject=agent,
                holds=share >= limit,
                value=share,
                says=f"{share:.0%} of the replies of agent '{agent}' were cut off",
                remedy=f"raise team.agents.{agent}.sampling.max_tokens (and engine.max_len of its policy), ask for "
                f"shorter answers, or leave cut replies out of training",
            )


class Alarms:
    """Emits the alarms of a run, after the figures of each step."""

    def __init__(self, rules: AlarmRules, events: Events) -> None:
        """Listens to `events` from now on."""
        self._rules, self._events = rules, events
        events.listen(FiguresWritten, self._figures_written)

    def _figures_written(self, figures: FiguresWritten) -> None:
        """Asks the rules. The figures of the evaluation before the first step have no training in them."""
        if figures.step:
            for alarm in self._rules.after_step(figures.step, figures.values):
                self._events.emit(alarm)
