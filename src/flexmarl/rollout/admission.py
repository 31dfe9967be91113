"""Decides which groups may be played, and knows where each one is until its single end.

    admit()  allowed iff fewer than `slots` groups are active; a slot is freed by the end of a group, never by "taken"
    move()   along the life cycle; a group that is played again goes back to WAITING under the SAME id

With P groups a step and no allowed lag, `slots` is P (docs/math.md, section 9: B = (S + 1) P, S = 0).
"""

from collections import Counter
from dataclasses import dataclass

from flexmarl.errors import TransitionError
from flexmarl.records import GROUP_MOVES, GROUP_TERMINAL, GroupId, GroupState


@dataclass(frozen=True, slots=True)
class AdmissionLaw:
    """The three numbers that every mode is a setting of (docs/math.md, section 9)."""

    groups: int
    """P: groups that make a step."""
    lag: int
    """S: steps that rollout may be ahead."""
    window: int | None
    """W: groups, from the oldest that was not taken, among which the next one is; None: no window."""

    @property
    def slots(self) -> int:
        """B = (S + 1) P: groups that may be active."""
        return (self.lag + 1) * self.groups

    @property
    def max_staleness(self) -> int | None:
        """S + ceil((W - 1) / P): versions between sampling a token and training on it; None: unbounded."""
        return None if self.window is None else self.lag + -(-(self.window - 1) // self.groups)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something may happen, and why."""

    allowed: bool
    because: str


class Admission:
    """The ledger of groups: every admitted group ends exactly once, as TRAINED, FILTERED, FAILED or EXPIRED."""

    def __init__(self, *, slots: int, next_group: int = 0) -> None:
        self.slots = slots
        self.next_group = next_group
        """The id the next group gets; also its position in the task source."""
        self._active: dict[GroupId, GroupState] = {}
        self._attempts: dict[GroupId, int] = {}
        self.ended: Counter[GroupState] = Counter()

    def may_admit(self) -> Verdict:
        """Whether another group may be admitted now."""
        active = len(self._active)
        if active < self.slots:
            return Verdict(True, f"{active} of {self.slots} slots are active")
        return Verdict(False, f"all {self.slots} slots are active; one is freed when a group ends")

    def admit(self) -> GroupId:
        """Admits the next group as WAITING."""
        verdict = self.may_admit()
        if not verdict.allowed:
            raise TransitionError(f"group {self.next_group} may not be admitted: {verdict.because}")
        group = GroupId(self.next_group)
        self.next_group += 1
        self._active[group] = GroupState.WAITING
        self._attempts[group] = 0
        return group

    def move(self, group: GroupId, state: GroupState) -> None:
        """Makes one move of the group's life cycle; a terminal one frees its slot."""
        now = self.state(group)
        if state not in GROUP_MOVES[now]:
            allowed = ", ".join(sorted(GROUP_MOVES[now]))
            raise TransitionError(f"group {group} is {now} and cannot become {state}; it can become: {allowed}")
        if state is GroupState.WAITING:
            self._attempts[group] += 1
        self._active[group] = state
        if state in GROUP_TERMINAL:
            del self._active[group], self._attempts[group]
            self.ended[state] += 1

    def after_failure(self, group: GroupId, *, retries: int) -> Verdict:
        """Whether a group without a finished episode is played again."""
        attempt = self._attempts[group]
        if attempt < retries:
            return Verdict(True, f"attempt {attempt + 1} of {retries + 1} had no finished episode")
        return Verdict(False, f"none of {attempt + 1} attempts had a finished episode")

    def state(self, group: GroupId) -> GroupState:
        """Where an active group is."""
        if group not in self._active:
            raise TransitionError(f"group {group} is not active; active: {sorted(self._active) or 'none'}")
        return self._active[group]

    def attempt(self, group: GroupId) -> int:
        """How often the group was put back."""
        return self._attempts[group]

    @property
    def active(self) -> tuple[GroupId, ...]:
        """Admitted groups that have not ended, oldest first."""
        return tuple(sorted(self._active))
