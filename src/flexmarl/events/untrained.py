"""Decides how what was played and is not trained on is counted and worded: failed episodes, filtered groups, updates.

failed 16/32: ValueError: boom (team.py:61) | filtered 3/4: 2 too_easy, 1 flat | no update: solver

Tool calls that were not run, or answered with an error, are counted beside it, because an agent learns nothing about a
tool that never helps.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flexmarl.events.safe_json import masked
from flexmarl.records.episode import Failure

TOOL_FAULTS = {
    "bad_tool_calls": "unreadable tool calls",
    "tool_errors": "tool errors",
    "dropped_tool_calls": "dropped tool calls",
}
"""Metrics that count the turns of an agent with such a tool call, by first part of the name, in words."""
MOST_SHOWN = 2
"""Reasons that a line of the screen names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTrained:
    """The part of a step that is not trained on, by reason."""

    episodes: int = 0
    """Episodes that were played."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Number of them that failed, by reason, most frequent first."""
    groups: int = 0
    """Groups that were played."""
    filtered: Mapping[str, int] = field(default_factory=dict)
    """Number of them that were filtered, by reason, most frequent first."""
    skipped: Sequence[str] = ()
    """Trained policies without an update."""
    tool_faults: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Turns of each agent with faulty tool calls, by a key of `TOOL_FAULTS`."""

    @property
    def lines(self) -> list[str]:
        """The same in words; empty if everything was trained on.

        >>> NotTrained(episodes=32, failed={"ValueError: boom (team.py:61)": 16}, skipped=["solver"]).lines
        ['failed 16/32: ValueError: boom (team.py:61)', 'no update: solver']
        """
        lines: list[str] = []
        if self.failed:
            lines.append(f"failed {sum(self.failed.values())}/{self.episodes}: {in_words(self.failed)}")
        if self.filtered:
            lines.append(f"filtered {sum(self.filtered.values())}/{self.groups}: {in_words(self.filtered, 4)}")
        if self.skipped:
            lines.append(f"no update: {', '.join(self.skipped)}")
        return lines + [f"{said}: {turns}" for said, turns in faults_in_words(self.tool_faults)]


def tool_faults(values: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """Turns with faulty tool calls, by a key of `TOOL_FAULTS` and by agent, most first, from metrics by name."""
    return {figure: by_agent(values, figure) for figure in TOOL_FAULTS}


def faults_in_words(faults: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """Each kind of fault that there is, and its turns, in words. `faults` may lack kinds, and have other keys.

    >>> faults_in_words({"tool_errors": {"solver": 9}, "bad_tool_calls": {}})
    [('tool errors', 'solver in 9 turns')]
    """
    return [(said, turns_in_words(turns)) for figure, said in TOOL_FAULTS.items() if (turns := faults.get(figure))]


def turns_in_words(turns: Mapping[str, int]) -> str:
    """Numbers of turns by agent.

    >>> turns_in_words({"solver": 2, "verifier": 1})
    'solver in 2 turns, verifier in 1 turn'
    """
    return ", ".join(f"{agent} in {count} turn{'s' if count > 1 else ''}" for agent, count in turns.items())


def by_agent(values: Mapping[str, float], figure: str) -> dict[str, int]:
    """The counts of a figure by agent, most first, from metrics by name.

    >>> by_agent({"bad_tool_calls/solver": 3.0, "cut/solver": 0.5}, "bad_tool_calls")
    {'solver': 3}
    """
    counts = {name.partition("/")[2]: int(value) for name, value in values.items() if name.startswith(f"{figure}/")}
    return dict(Counter(counts).most_common())


def counted(failures: Iterable[Failure | None]) -> dict[str, int]:
    """Counts failures by kind and place, most frequent first. A kind has the words of its first failure.

    >>> counted([Failure(kind="KeyError", text="1"), Failure(kind="KeyError", text="2"), None])
    {'KeyError: 1': 2}
    """
    counts: Counter[tuple[str, str]] = Counter()
    words: dict[tuple[str, str], str] = {}
    for failure in failures:
        if failure is not None:
            counts[failure.kind, failure.place] += 1
            words.setdefault((failure.kind, failure.place), masked(str(failure)))
    found: Counter[str] = Counter()
    for key, count in counts.items():
        found[words[key]] += count
    return dict(found.most_common())


def in_words(counts: Mapping[str, int], most: int = MOST_SHOWN) -> str:
    """The most frequent reasons, with counts unless there is one reason only.

    >>> in_words({"ValueError: boom (team.py:61)": 12, "KeyError: 3 (team.py:9)": 3, "timed_out": 1})
    '12 ValueError: boom (team.py:61), 3 KeyError: 3 (team.py:9), 1 other'
    """
    shown: Sequence[tuple[str, int]] = list(counts.items())[:most]
    if len(counts) == 1:
        return shown[0][0]
    parts = [f"{count} {reason}" for reason, count in shown]
    if others := sum(counts.values()) - sum(count for _, count in shown):
        parts.append(f"{others} other{'s' if others > 1 else ''}")
    return ", ".join(parts)
