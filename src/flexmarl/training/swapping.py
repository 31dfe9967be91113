"""Decides which policy's training state comes onto devices, which is set aside for it, and when (FlexMARL section 6).

    away ──resume──► coming ──► here ──suspend──► going ──► away

Of the policies that wait, the next is the one with most ready work per second of swap and training, times its response
ratio (waited + served) / served. That grows with the wait while those who come later begin at 1, so nobody starves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flexmarl.records import PolicyName
from flexmarl.training.settings import ProcessGroupSettings

SHORTEST_S = 1e-3
"""What is not yet measured counts as this: a policy that was never swapped is tried, and then known."""


class Where(StrEnum):
    """Where a policy's state is."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    GOING = "going"


class Need(StrEnum):
    """What a policy wants devices for."""

    NOTHING = "nothing"
    WAITING = "waiting"
    """A micro-batch is due, or the update."""
    HOLDING = "holding"
    """It has them, and nobody may take them."""


class Direction(StrEnum):
    """Of a swap."""

    RESUME = "resume"
    SUSPEND = "suspend"


@dataclass(slots=True, kw_only=True)
class Standing:
    """What the rule knows of one policy."""

    policy: PolicyName
    where: Where = Where.AWAY
    need: Need = Need.NOTHING
    since: float = 0.0
    """When it began to need what it needs."""
    ready: int = 0
    """Rows that its trainer could have now, or that wait for a micro-batch to be full."""
    micro_batch: int = 1
    done: bool = False
    """Its step is over: it needs no devices before the next one's rows are ready."""
    resume_s: float = 0.0
    """What this took last; so do the next two."""
    suspend_s: float = 0.0
    sample_s: float = 0.0

    @property
    def back_s(self) -> float:
        """Seconds of the way off the devices and back."""
        return self.suspend_s + self.resume_s

    def rate(self, now: float) -> float:
        """Ready rows per second of swap and training, times the response ratio; an update counts as one row."""
        rows = max(self.ready, 1)
        served_s = max(self.back_s + rows * self.sample_s, SHORTEST_S)
        return rows / served_s * (1 + (now - self.since) / served_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """What to do with one policy's state, and why."""

    policy: PolicyName
    direction: Direction
    because: str


def next_swap(standings: Sequence[Standing], free: int, settings: ProcessGroupSettings, now: float) -> Swap | None:
    """What to begin now, with so many free places; None: nothing. Ask again after each answer."""
    waiting = [s for s in standings if s.where is Where.AWAY and s.need is Need.WAITING]
    idle = [s for s in standings if s.where is Where.HERE and s.need is Need.NOTHING]
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
    """Why a policy that holds devices and could train on should leave them to another one; empty: it need not."""
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
    """Who is done goes, or else whoever is back soonest, as all must be before the step ends; of several, the one with
    fewest rows on the way, then the one that has rested longest."""
    goes = min(idle, key=lambda s: (not s.done, s.back_s, s.ready, s.since))
    return _suspend(goes, f"'{first.policy}' needs its devices, {goes.ready} rows are ready for it")


def _prefetch(standings: Sequence[Standing], idle: Sequence[Standing], free: int, going: int) -> Swap | None:
    """Before a micro-batch is full: devices that nobody holds, or whose policy has nothing at all on the way."""
    expected = [s for s in standings if s.where is Where.AWAY and s.need is Need.NOTHING and s.ready]
    if not expected:
        return None
    nearest = max(expected, key=lambda s: (s.ready / s.micro_batch, -s.since))
    because = f"{nearest.ready} of {nearest.micro_batch} rows are ready"
    if free:
        return Swap(policy=nearest.policy, direction=Direction.RESUME, because=f"{because}, and devices are free")
    # Putting somebody out for it whose way back is longer gains nothing.
    longest_s = nearest.back_s or math.inf
    unused = [s for s in idle if not s.ready and (s.done or s.back_s <= longest_s)]
    if len(expected) > going and unused:
        return _suspend(
            min(unused, key=lambda s: (not s.done, s.back_s, s.since)), f"'{nearest.policy}' is next, {because}"
        )
    return None


def _suspend(standing: Standing, because: str) -> Swap:
    return Swap(policy=standing.policy, direction=Direction.SUSPEND, because=because)
