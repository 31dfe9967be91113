"""Decides what went wrong in a run, from its events: failures by reason, groups that taught nothing, alarms.

`Troubles` reads the journal of all commands of a run. A group that a resumed command played again counts twice.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flexmarl.events.event import Event
from flexmarl.events.group_events import EpisodeFailed, GroupFiltered
from flexmarl.events.run_events import AlarmRaised, Evaluated
from flexmarl.events.training_events import UpdateSkipped
from flexmarl.events.untrained import faults_in_words, in_words, tool_faults
from flexmarl.records import Failure, Purpose

MOST_REASONS = 20
"""Reasons that a summary names, most frequent first."""


class Troubles:
    """Failures, filtered groups, skipped updates and alarms of a run so far."""

    def __init__(self) -> None:
        self._failures: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], Failure] = {}
        self.filtered: Counter[str] = Counter()
        """Groups that were not trained on, by reason."""
        self.skipped: Counter[str] = Counter()
        """Updates that were left out, by policy."""
        self.alarms: list[AlarmRaised] = []
        """All alarms, in order."""
        self.evaluation: Mapping[str, Any] = {}
        """`episodes`, `failed` and `failures` of the last evaluation; empty without one."""

    def note(self, event: Event) -> None:
        """Counts an event."""
        match event:
            case EpisodeFailed() if event.purpose is not Purpose.EVALUATION:
                key = (event.kind, event.place)
                self._failures[key] += 1
                first = Failure(kind=event.kind or event.status, text=event.text, place=event.place)
                self._first.setdefault(key, first)
            case GroupFiltered():
                self.filtered[event.reason] += 1
            case UpdateSkipped():
                self.skipped[event.policy] += 1
            case AlarmRaised():
                self.alarms.append(event)
            case Evaluated():
                found = event.evaluation
                self.evaluation = {
                    "episodes": found["episodes"],
                    "failed": found["failed"],
                    "failures": dict(found.get("failures", {})),
                }
            case _:
                pass

    def noting(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yields the events, and counts them."""
        for event in events:
            self.note(event)
            yield event

    @property
    def failures(self) -> dict[str, int]:
        """Failed episodes of training by reason, most frequent first. Plays of groups that were retried are in it."""
        counts: Counter[str] = Counter()
        for key, count in self._failures.items():
            counts[str(self._first[key])] += count
        return dict(counts.most_common(MOST_REASONS))

    def as_json(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """The troubles as a section of summary.json. `totals` are sums of metrics over all steps."""
        return {
            "episodes": int(totals.get("rollout/episodes", 0)),
            "failed": int(totals.get("rollout/failed_episodes", 0)),
            "failures": self.failures,
            "stopped": int(totals.get("rollout/stopped_episodes", 0)),
            "groups": int(totals.get("rollout/groups", 0)),
            "filtered": dict(self.filtered.most_common()),
            "skipped": dict(self.skipped.most_common()),
            "evaluation": dict(self.evaluation),
            **tool_faults(totals),
            "alarms": [
                {"step": one.step, "alarm": one.alarm, "subject": one.subject, "value": one.value}
                | {"limit": one.limit, "because": one.because, "remedy": one.remedy}
                for one in self.alarms
            ],
        }


def all_failed(troubles: Mapping[str, Any]) -> str:
    """Says that no episode of the run, or of its last evaluation, was finished, and why; "" if one was.

    `troubles` is the section of summary.json.
    """
    if not troubles:
        return ""
    evaluation: Mapping[str, Any] = troubles["evaluation"]
    if troubles["failed"] and troubles["failed"] == troubles["episodes"]:
        return f"all {troubles['episodes']} episodes of the run failed: {in_words(troubles['failures'], 5)}"
    if evaluation and evaluation["failed"] and evaluation["failed"] == evaluation["episodes"]:
        reasons = in_words(evaluation["failures"], 5)
        return f"all {evaluation['episodes']} episodes of the last evaluation failed: {reasons}"
    return ""


def trouble_rows(troubles: Mapping[str, Any]) -> dict[str, str]:
    """The troubles in words, by name of a row; empty if nothing went wrong. `troubles` is as in summary.json."""
    rows: dict[str, str] = {}
    if not troubles:
        return rows
    if troubles["failed"] or troubles["failures"]:
        reasons, again = in_words(troubles["failures"], 5), sum(troubles["failures"].values()) - troubles["failed"]
        others = f", and {again} of groups that were played again" if again > 0 else ""
        rows["failed"] = f"{troubles['failed']} of {troubles['episodes']} episodes{others}: {reasons}"
    if (evaluation := troubles["evaluation"]) and evaluation["failed"]:
        reasons = in_words(evaluation["failures"], 5)
        rows["last evaluation"] = f"{evaluation['failed']} of {evaluation['episodes']} episodes failed: {reasons}"
    if stopped := troubles.get("stopped"):
        rows["stopped"] = f"{stopped} episodes that played when their group came too late, or when the run was done"
    if troubles["filtered"]:
        reasons = in_words(troubles["filtered"], 6)
        rows["filtered"] = f"{sum(troubles['filtered'].values())} of {troubles['groups']} groups: {reasons}"
    if troubles["skipped"]:
        rows["no update"] = ", ".join(f"{name} in {count} steps" for name, count in troubles["skipped"].items())
    rows |= faults_in_words(troubles)
    for number, alarm in enumerate(troubles["alarms"], start=1):
        rows[f"alarm {number}"] = f"{alarm['because']}; {alarm['remedy']}"
    return rows
