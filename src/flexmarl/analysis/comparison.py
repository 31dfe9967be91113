"""Figures of runs side by side, read from their folders: each with an interval, and its difference to the first run's.

kept evaluations ──► success, rewards         differences task by task where the tasks are the same
metrics.jsonl    ──► tokens, failures         by step
journal.jsonl    ──► seconds of steps, staleness; results of evaluations that were not kept

Nothing is called better: an interval that holds 0 says that the difference may be chance.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from flexmarl.analysis import intervals
from flexmarl.analysis.conversations import open_conversations
from flexmarl.analysis.facts import read_facts
from flexmarl.analysis.figures import staleness
from flexmarl.analysis.intervals import Estimate
from flexmarl.events.journal import read_run
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_events import Evaluated
from flexmarl.events.run_folder import RunFolder
from flexmarl.records import EpisodeStatus

ROUNDING = 1e-12
"""A difference of at most this part of the largest number is one of rounding. A sum of a thousand float64 is off by
less: each addition rounds at 1.1e-16 of the sum."""
REWARD = "reward/"
"""Begins the name of an agent's reward among the figures of an evaluation."""
FIRST = (
    *(r"mode", r"tasks\b.*", r"policies\.[^.]+(\.(model|trainable)\b.*)?", r"team\.agents\.[^.]+", r"batch\b.*"),
    *(r".*\.learning_rate", r"credit\b.*", r"team\.workflow\b.*", r"seed"),
)
"""Patterns of the settings that explain most, the first ones first; others come after them."""
NAMED = {"policies": "model", "team.agents": "policy"}
"""Sections whose keys are names that the user chose, with the key that says most of one."""
OF_THE_RUN = ("name", "out", "steps")
"""Settings that say nothing about what a run does, or, as `steps` of a resumed run, less than a figure does."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure of one run, as the numbers that it is the mean of."""

    values: tuple[float, ...]
    of: str
    """The things that have one value each: `episodes` or `steps`."""
    tasks: tuple[str, ...] = ()
    """The held-out task of each value; empty if the values are not of tasks."""
    known: Estimate | None = None
    """The figure itself, where it is not the mean of the values, or where these are not known."""

    @property
    def is_share(self) -> bool:
        """True if every value is 0 or 1, and is of an episode."""
        return self.of == "episodes" and set(self.values) <= {0.0, 1.0}

    def interval(self) -> Estimate:
        """The mean with its interval."""
        if self.known is not None:
            return self.known
        return intervals.share(sum(self.values), len(self.values)) if self.is_share else self._mean()

    def _mean(self) -> Estimate:
        # Episodes of one task are alike, so the tasks are what is drawn by chance.
        values, of = ([*self.by_task().values()], "tasks") if self.tasks else (self.values, self.of)
        found = intervals.mean(values, of)
        if found.low is None or found.high is None or (found.low >= 0 and found.high <= 1):
            return found
        # Numbers from 0 to 1 vary at most as zeros and ones with their mean do.
        return intervals.share(sum(values), len(values)) if all(0 <= value <= 1 for value in values) else found

    def by_task(self) -> dict[str, float]:
        """Mean value by task."""
        values: dict[str, list[float]] = defaultdict(list)
        for task, value in zip(self.tasks, self.values, strict=True):
            values[task].append(value)
        return {task: fmean(of) for task, of in values.items()}


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run."""

    name: str
    figures: Mapping[str, Measured]
    tasks: Any = None
    """The settings `tasks`: held-out tasks with equal ids are the same only if these are equal."""


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure of every run."""

    name: str
    values: tuple[Estimate | None, ...]
    """By run; None if the run lacks it."""
    differences: tuple[Estimate | None, ...]
    """By run, the difference to the first run; None for the first one, and if a run lacks the figure."""


def compare_runs(runs: Sequence[RunFigures]) -> list[ComparedFigure]:
    """Puts the figures of at least one run side by side, in the order of the first run that has them."""
    compared: list[ComparedFigure] = []
    for name in dict.fromkeys(name for run in runs for name in run.figures):
        measured = [run.figures.get(name) for run in runs]
        first = measured[0]
        differences = [
            difference(first, one, same_tasks=runs[0].tasks == run.tasks) if first and one and index else None
            for index, (run, one) in enumerate(zip(runs, measured, strict=True))
        ]
        compared.append(ComparedFigure(name, tuple(one and one.interval() for one in measured), tuple(differences)))
    return compared


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """The settings that differ between runs, by dotted key: the value in each run, None where it has none.

    Name, folder and number of steps do not count.

    >>> differing_settings([{"name": "a", "batch": {"groups": 4}}, {"name": "b", "batch": {"groups": 8}}])
    {'batch.groups': (4, 8)}
    """
    flat = [dict(_leaves(settings)) for settings in runs]
    found = {key: tuple(one.get(key) for one in flat) for one in flat for key in one}
    return {key: found[key] for key in sorted(found) if key not in OF_THE_RUN and len(set(map(repr, found[key]))) > 1}


def settings_in_short(
    runs: Sequence[Mapping[str, Any]], differing: Mapping[str, tuple[Any, ...]]
) -> dict[str, tuple[Any, ...]]:
    """The findings of `differing_settings` for a table: the settings that explain most come first (`FIRST`).

    A policy or an agent that some runs lack is one setting: its model or its policy, None where it is not.

    >>> runs = [{"policies": {"a": {"model": "m", "instances": 2}}}, {"policies": {"b": {"model": "n"}}, "seed": 1}]
    >>> settings_in_short(runs, differing_settings(runs))
    {'policies.a': ('m', None), 'policies.b': (None, 'n'), 'seed': (None, 1)}
    """
    flat = [dict(_leaves(settings)) for settings in runs]
    short: dict[str, tuple[Any, ...]] = {}
    for key, values in differing.items():
        name, says = _named(key)
        there = [any(one == name or one.startswith(f"{name}.") for one in leaves) for leaves in flat] if name else []
        if all(there):
            short[key] = values
        else:
            of = (leaves.get(f"{name}.{says}", "there") for leaves in flat)
            short[name] = tuple(value if is_there else None for value, is_there in zip(of, there, strict=True))
    return dict(sorted(short.items(), key=lambda one: (_rank(one[0]), one[0])))


def _named(key: str) -> tuple[str, str]:
    """The policy or agent that a dotted key is of, and the key that says most of it; empty if it is of none."""
    for section, says in NAMED.items():
        if key.startswith(f"{section}."):
            return f"{section}.{key.removeprefix(f'{section}.').partition('.')[0]}", says
    return "", ""


def _rank(key: str) -> int:
    return next((place for place, pattern in enumerate(FIRST) if re.fullmatch(pattern, key)), len(FIRST))


def _leaves(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def difference(before: Measured, after: Measured, *, same_tasks: bool) -> Estimate:
    """The second figure less the first, with the interval that fits: see intervals.py.

    Sums of equal numbers in another order differ in their last digits. Such differences are 0.
    """
    found = _difference(before, after, same_tasks=same_tasks)
    scale = ROUNDING * max(abs(number) for number in (*_numbers(before), *_numbers(after)))
    value, low, high = (
        0.0 if number is not None and abs(number) <= scale else number
        for number in (found.value, found.low, found.high)
    )
    return replace(found, value=value or 0.0, low=low, high=high)


def _numbers(measured: Measured) -> Sequence[float]:
    return measured.values or (measured.interval().value,)


def _difference(before: Measured, after: Measured, *, same_tasks: bool) -> Estimate:
    if not before.values or not after.values:
        return _of_known(before.interval(), after.interval())
    if before.tasks and same_tasks and set(before.tasks) == set(after.tasks):
        by_task, then = before.by_task(), after.by_task()
        values, others = [*by_task.values()], [then[task] for task in by_task]
        if {*values, *others} <= {0.0, 1.0}:
            return intervals.paired_shares_differ(values, others)
        return intervals.paired_means_differ(values, others)
    if before.is_share and after.is_share:
        return intervals.shares_differ(before.interval(), after.interval())
    return intervals.means_differ(before.values, after.values)


def _of_known(before: Estimate, after: Estimate) -> Estimate:
    if before.how.startswith("Wilson") and after.how.startswith("Wilson"):
        return intervals.shares_differ(before, after)
    return Estimate(after.value - before.value, None, None, "")


def change(before: Measured, after: Measured) -> Measured:
    """The change of a figure in one run; by task, if both evaluations played the same tasks."""
    of, then = before.by_task(), after.by_task()
    same = before.tasks and of.keys() == then.keys()
    values = {task: then[task] - of[task] for task in of} if same else {}
    return Measured(tuple(values.values()), "tasks", tuple(values), difference(before, after, same_tasks=True))


def read_figures(folder: RunFolder, tasks: Any = None) -> RunFigures:
    """Reads the figures of a run. `tasks`: its settings of that name.

    Raises FlexmarlError if the run is of another format.
    """
    figures: dict[str, Measured] = {}
    events = [*read_run(folder.journal)] if folder.journal.exists() else []
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    for when in ("before", "after"):
        of = [event for event in evaluations if event.when == when]
        for name, measured in held_out_figures(folder, of[-1]).items() if of else ():
            if name == "success" or name.startswith(REWARD):
                figures[f"{name.replace(REWARD, 'reward of ')}, {when}"] = measured
    ordered = {name: figures[name] for name in sorted(figures, key=_order)}
    for name in [name for name in ordered if name.endswith(", before")]:
        stem = name.removesuffix(", before")
        if (after := ordered.get(f"{stem}, after")) is not None:
            ordered[f"{stem}, after - before"] = change(ordered[name], after)
    ordered = {name: ordered[name] for name in sorted(ordered, key=_order)}
    return RunFigures(folder.path.name, ordered | _step_figures(folder, events), tasks)


def _order(name: str) -> tuple[bool, str, int]:
    stem, _, when = name.rpartition(", ")
    return (not stem.startswith("success"), stem, ("before", "after", "after - before").index(when))


def held_out_figures(folder: RunFolder, evaluated: Evaluated) -> dict[str, Measured]:
    """Every figure of one evaluation of a run: what the workflow reported, and the rewards as `reward/AGENT`.

    They are from its episodes if these are kept, otherwise the means that the journal has.
    """
    for path in reversed(folder.evaluations_of_steps()):
        journal = RunFolder(path).journal
        ends = [event for event in read_run(journal) if isinstance(event, Evaluated)] if journal.exists() else []
        # There is no end if the run was killed while it was played.
        if ends and (ends[-1].when, ends[-1].step) == (evaluated.when, evaluated.step):
            return evaluation_figures(path)
    return _results(evaluated.evaluation)


def evaluation_figures(path: Path) -> dict[str, Measured]:
    """Figures of a kept evaluation. A failed episode has success 0 and nothing else. Rewards are means over turns."""
    with open_conversations(RunFolder(path)) as conversations:
        lines = conversations.lines()
    values: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
    for line in lines:
        if line.status != EpisodeStatus.FINISHED:
            values["success"].append((0.0, 1, line.task))
            continue
        for name, number in line.metrics.items():
            values[name].append((number, 1, line.task))
        for agent, reward in line.rewards.items():
            turns = line.rewarded[agent]
            values[f"{REWARD}{agent}"].append((reward * turns, turns, line.task))
    figures: dict[str, Measured] = {}
    for name, of in values.items():
        sums, counts, tasks = zip(*of, strict=True)
        figures[name] = Measured(intervals.ratio_values(sums, counts), "episodes", tasks)
    return figures


def _results(evaluation: Mapping[str, Any]) -> dict[str, Measured]:
    """The means that the journal has of an evaluation."""
    episodes = evaluation["episodes"]
    found = {name: _bare(value) for name, value in evaluation["metrics"].items()}
    found |= {f"{REWARD}{agent}": _bare(reward) for agent, reward in evaluation["rewards"].items()}
    if (success := evaluation["metrics"].get("success")) is not None:
        # A mean of zeros and ones is a whole number of successes. Any other has no interval.
        whole = abs(success * episodes - round(success * episodes)) < 1e-6
        found["success"] = intervals.share(round(success * episodes), episodes) if whole else _bare(success)
    return {name: Measured((), "episodes", known=of) for name, of in found.items()}


def _bare(value: float) -> Estimate:
    return Estimate(value, None, None, "episodes are not kept")


def _step_figures(folder: RunFolder, events: Sequence[Any]) -> dict[str, Measured]:
    """Figures of the training steps."""
    figures: dict[str, Measured] = {}
    metrics = read_metrics(folder.metrics) if folder.metrics.exists() else {}
    steps = [values for values in metrics.values() if values.get("rollout/turns")]
    facts = read_facts(events)
    if facts.steps:
        figures["seconds per step"] = Measured(tuple(step.ended - step.began for step in facts.steps), "steps")
    tenth = max(1, len(steps) // 10)
    for which, chosen in (("first", steps[:tenth]), ("last", steps[-tenth:])):
        if chosen:
            per_turn = tuple(values["rollout/tokens"] / values["rollout/turns"] for values in chosen)
            figures[f"tokens per turn, {which} tenth of the steps"] = Measured(per_turn, "steps")
    if episodes := sum(values.get("rollout/episodes", 0.0) for values in steps):
        failed = sum(values.get("rollout/failed_episodes", 0.0) for values in steps)
        figures["failed episodes"] = Measured((), "episodes", known=intervals.share(failed, int(episodes)))
    if facts.steps:
        of, most = staleness(facts)
        figures["staleness of a token, in updates"] = Measured((), "", known=Estimate(of, None, None, f"most {most}"))
        figures["steps"] = Measured((), "", known=Estimate(len(facts.steps), None, None, ""))
    return figures
