"""Decides again what the balancer of a run decided, from the loads in its journal: by the same rules, or by others.

    journal of a real run ──► balance_decided: loads, moves ──► the rule of a config ──► the same moves?

With the run's own `balance`, every decision comes out as it was made. A simulated run decides by these rules, too, so
where its loads are those of a real run, so are its moves.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexmarl.events.event import Event
from flexmarl.events.serving_events import BalanceDecided
from flexmarl.inference.growing import GROW, growth
from flexmarl.inference.scaling import RULES, STARTS, Expectation, Loads, Move, PolicyLoad
from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import InstanceId, PolicyName


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one look of the balancer: moves, or the policy that gets a further instance."""

    moves: Sequence[Move] = ()
    grows: str = ""

    def __str__(self) -> str:
        """As a table shows it: `one/0 to two`, or `nothing`."""
        parts = [f"{move.instance} to {move.to}" for move in self.moves]
        return ", ".join(parts + [f"{self.grows} grows"] * bool(self.grows)) or "nothing"


@dataclass(slots=True)
class DecisionCounts:
    """The decisions of a run by one rule, and how many of them come out the same."""

    decisions: int = 0
    same: int = 0
    moves: Counter[str] = field(default_factory=Counter)
    """Instances that moved or were added, in the `run` and decided `again`."""
    first: str = ""
    """The first decision that differs, in words; empty if none does."""


def recorded(event: BalanceDecided) -> Decision:
    """The decision that was made."""
    moves = [Move(InstanceId.parse(one["instance"]), PolicyName(one["to"]), one["because"]) for one in event.moves]
    return Decision(tuple(moves), event.grows)


def decided_again(event: BalanceDecided, settings: BalanceSettings) -> Decision:
    """The decision of the rules of `settings`, from the same loads.

    A look at the queues is decided by `settings.rule`, a look for room by whether `settings.grow`. The end of a rollout
    is decided by the rule that the run had: another one would need another basis.
    """
    loads = loads_of(event.loads)
    if event.rule == GROW:
        decided = growth(loads, room=event.room if settings.grow else ())
        return Decision(grows=decided.policy if decided else "")
    if event.rule in STARTS:
        return Decision(tuple(STARTS[event.rule](event.basis, loads)))
    return Decision(tuple(RULES[settings.rule](settings).decide(loads, move_s=event.move_s)))


def compare_decisions(events: Iterable[Event], settings: BalanceSettings) -> Mapping[str, DecisionCounts]:
    """By the run's rule, its decisions against those of `settings`. Equal means equal in every word of the reasons."""
    found: dict[str, DecisionCounts] = {}
    for event in events:
        if isinstance(event, BalanceDecided):
            was, again = recorded(event), decided_again(event, settings)
            one = found.setdefault(event.rule, DecisionCounts())
            one.decisions += 1
            one.same += was == again
            one.moves.update(run=len(was.moves) + bool(was.grows), again=len(again.moves) + bool(again.grows))
            if was != again and not one.first:
                one.first = f"at {event.t:.2f} s: {was}; again: {again}"
    return found


def loads_of(recorded: Mapping[PolicyName, Any]) -> Loads:
    """The loads that a line of the journal holds."""
    return {
        policy: PolicyLoad(
            **{
                **load,
                "instances": {InstanceId.parse(name): count for name, count in load["instances"].items()},
                "expected": load["expected"] and Expectation(**load["expected"]),
            }
        )
        for policy, load in recorded.items()
    }
