"""Decides what a recorded workload asks of its agents: what the journal of a run says that its episodes did.

Each policy of the run is one agent of its name, since the journal knows no other. The calls of an episode are played
one after another, by hop; the pause behind one is what passed until the next was sent: tools, and the workflow's own
time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flexmarl.errors import ConfigError
from flexmarl.observability.journal import read_run
from flexmarl.observability.run_folder import RunFolder
from flexmarl.orchestrator.evaluate import EVALUATION_GROUPS
from flexmarl.records import split_sample_id, split_trajectory_id
from flexmarl.simulator.plan import PlannedCall

Calls = tuple[PlannedCall, ...]
COMPLETE = frozenset({"stop", "length"})
"""Finish reasons of calls that were answered."""


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """The plan of one task: the episodes that a recorded group had."""

    episodes: tuple[Calls, ...]

    def calls(self, trajectory: int) -> Calls:
        """Those of one episode; where the run had fewer episodes, from the first one again."""
        return self.episodes[trajectory % len(self.episodes)]


def recorded_plan(run: Path, index: int) -> RecordedPlan:
    """The plan of task number `index`; where the run had fewer groups, from the first one again. Raises ConfigError."""
    plans = _plans_of(run)
    return plans[index % len(plans)]


@cache
def _plans_of(run: Path) -> tuple[RecordedPlan, ...]:
    journal = RunFolder(run).journal
    if not journal.is_file():
        raise ConfigError(f"tasks.params.recorded: '{run}' is no run folder ({journal} does not exist)")
    plans = plans_in(read_run(journal))
    if not plans:
        raise ConfigError(f"tasks.params.recorded: {journal} has no answered call of a training step; use another run")
    return plans


def plans_in(events: Iterable[Mapping[str, Any]]) -> tuple[RecordedPlan, ...]:
    """The plan of each group of training, in order of admission; of a group that was played again, the last attempt."""
    groups: dict[int, dict[tuple[int, int], dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for event in events:
        if event["event"] == "call" and event["finish"] in COMPLETE and event["sampled_tokens"]:
            _, hop, trajectory = split_sample_id(event["request"])
            group, index, attempt = split_trajectory_id(trajectory)
            if group < EVALUATION_GROUPS:
                groups[group][attempt, index][hop] = event
    return tuple(_plan(groups[group]) for group in sorted(groups))


def _plan(episodes: Mapping[tuple[int, int], Mapping[int, Mapping[str, Any]]]) -> RecordedPlan:
    last = max(attempt for attempt, _ in episodes)
    return RecordedPlan(tuple(_calls(episodes[place]) for place in sorted(episodes) if place[0] == last))


def _calls(by_hop: Mapping[int, Mapping[str, Any]]) -> Calls:
    events = [by_hop[hop] for hop in sorted(by_hop)]
    began = [event["began"] for event in events[1:]]
    ended = [event.get("ended", event["t"]) for event in events]
    # Calls of one episode may overlap: the pause between two such is none.
    pauses = [max(0.0, after - before) for after, before in zip(began, ended, strict=False)]
    return tuple(
        PlannedCall(event["policy"], event["sampled_tokens"], pause)
        for event, pause in zip(events, [*pauses, 0.0], strict=True)
    )
