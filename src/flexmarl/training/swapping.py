"""Decides when a policy's training state comes onto devices, and when it is set aside (FlexMARL section 6).

    away ──resume──► coming ──► here ──suspend──► going ──► away

Of the policies that wait, the next is the one with the most ready rows per second of swap and training, times its
response ratio (waited + served) / served. The ratio is 1 for a newcomer and grows with the wait, so no policy starves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flexmarl.records import PolicyName
from flexmarl.training.settings import ProcessGroupSettings

SHORTEST_S = 1e-3
"""Least time in a rate. A policy without measured times thus looks quick, is tried, and is measured."""


class Where(StrEnum):
    """Place of a policy's training state."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    GOING = "going"


class Need(StrEnum):
    """Need of a policy for devices."""

    NOTHING = "nothing"
    WAITING = "waiting"
    """A micro-batch or the update is due."""
    HOLDING = "holding"
    """It has devices, and they may not be taken from it."""


class Direction(StrEnum):
    """Direction of a swap."""

    RESUME = "resume"
    SUSPEND = "suspend"


@dataclass(slots=True, kw_only=True)
class Standing:
    """State of one policy, as far as the rule needs it."""

    policy: PolicyName
    where: Where = Where.AWAY
    need: Need = Need.NOTHING
    since: float = 0.0
    """Time at which its present need began."""
    ready: int = 0
    """Rows that its trainer could have now, or that wait for a full micro-batch."""
    micro_batch: int = 1
    due: bool = False
    """True if its step takes no more rows and some are ready: it is about to need devices."""
    done: bool = False
    """True when its step is over: it needs no devices before rows of the next step are ready."""
    resume_s: float = 0.0
    """Seconds of the last resume."""
    suspend_s: float = 0.0
    """Seconds of the last suspend."""
    sample_s: float = 0.0
    """Seconds of training per row, in the last micro-batch."""

    @property
    def back_s(self) -> float:
        """Seconds to leave the devices and come back."""
        return self.suspend_s + self.resume_s

    def rate(self, now: float) -> float:
        """Ready rows per second of swap and training, times the response ratio. An update counts as one row."""
        rows = max(self.ready, 1)
        served_s = max(self.back_s + rows * self.sample_s, SHORTEST_S)
        return rows / served_s * (1 + (now - self.since) / served_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Decision to swap one policy's state, with its reason."""

    policy: PolicyName
    direction: Direction
    because: str


def next_swap(standings: Sequence[Standing], free: int, settings: ProcessGroupSettings, now: float) -> Swap | None:
    """The swap to begin now, or None. Call it again after each swap that has begun.

    `free`: places for one policy each that no policy holds. `now`: seconds, on the clock of `Standing.since`.
    """
    waiting = [s for s in standings if s.where is Where.AWAY and s.need is Need.WAITING]
    idle = [s for s in standings if s.where is Where.HERE and s.need is Need.NOTHING and not s.due]
    going = sum(s.where is Where.GOING for s in standings)
    if waiting and free:
        return _resume_next(waiting, now)
    if len(waiting) > going and idle:
        return _make_room(idle, _first(waiting, now))
    if settings.suspend == "eager" and (done := [s for s in idle if not s.ready]):
        return _suspend(done[0], "nothing is ready for it")
    if settings.prefetch and not waiting:
        return _prefetch(standings, idle, free, going)
    return None


def gives_way(holder: Standing, standings: Sequence[Standing], free: int, now: float) -> str:
    """Reason why `holder`, which could continue training, should leave its devices to another policy; empty if none."""
    waiting = [s for s in standings if s.where is Where.AWAY and s.need is Need.WAITING]
    if len(waiting) <= free + sum(s.where is Where.GOING for s in standings):
        return ""
    first = _first(waiting, now)
    mine, its = 1 / max(holder.sample_s, SHORTEST_S), first.rate(now)
    return f"'{first.policy}' has waited {now - first.since:.1f} s: {its:.3g}/s against {mine:.3g}/s" * (its > mine)


def _resume_next(waiting: Sequence[Standing], now: float) -> Swap:
    first = _first(waiting, now)
    because = f"{first.ready} rows are ready" if first.ready else "its update is due"
    if len(waiting) > 1:
        because += f": {first.rate(now):.3g}/s, most of {len(waiting)} that wait"
    return Swap(policy=first.policy, direction=Direction.RESUME, because=because)


def _first(waiting: Sequence[Standing], now: float) -> Standing:
    return max(waiting, key=lambda s: (s.rate(now), -s.since))


def _make_room(idle: Sequence[Standing], first: Standing) -> Swap:
    """Chooses which idle policy leaves. One whose step is over goes first. Then the one that can be back soonest, since
    all must be back before the step ends; then the one with the fewest rows ready, then the one idle longest."""
    goes = min(idle, key=lambda s: (not s.done, s.back_s, s.ready, s.since))
    return _suspend(goes, f"'{first.policy}' needs its devices, {goes.ready} rows are ready for it")


def _prefetch(standings: Sequence[Standing], idle: Sequence[Standing], free: int, going: int) -> Swap | None:
    """Swap before a micro-batch is full. It uses free devices, or those of a policy without ready rows."""
    expected = [s for s in standings if s.where is Where.AWAY and s.need is Need.NOTHING and s.ready]
    if not expected:
        return None
    nearest = max(expected, key=lambda s: (s.ready / s.micro_batch, -s.since))
    because = f"{nearest.ready} of {nearest.micro_batch} rows are ready"
    if free:
        return Swap(policy=nearest.policy, direction=Direction.RESUME, because=f"{because}, and devices are free")
    # Suspending a policy that takes longer to come back gains nothing.
    longest_s = nearest.back_s or math.inf
    unused = [s for s in idle if not s.ready and (s.done or s.back_s <= longest_s)]
    if len(expected) > going and unused:
        return _suspend(
            min(unused, key=lambda s: (not s.done, s.back_s, s.since)), f"'{nearest.policy}' is next, {because}"
        )
    return None


def _suspend(standing: Standing, because: str) -> Swap:
    return Swap(policy=standing.policy, direction=Direction.SUSPEND, because=because)
