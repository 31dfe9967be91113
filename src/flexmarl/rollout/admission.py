"""Decides which groups may be played, and keeps the state of each one until its single end.

    admit()   allowed iff fewer than B groups are active; only the end of a group frees its slot, not its being taken
    move()    moves a group along its life cycle; a group that is played again returns to WAITING under the SAME id
    expire()  ends a group that took too long; its task may be admitted again under a new id, a bounded number of times

B = (S + 1) P, for P groups a step and S steps of lag (docs/math.md, section 9).
"""

from collections import Counter, deque
from dataclasses import dataclass

from flexmarl.errors import TransitionError
from flexmarl.records import GROUP_MOVES, GROUP_TERMINAL, GroupId, GroupState


@dataclass(frozen=True, slots=True)
class AdmissionLaw:
    """The numbers that define a pipeline mode (docs/math.md, section 9)."""

    groups: int
    """P: number of groups in a step."""
    lag: int
    """S: number of steps that rollout may be ahead."""
    window: int | None
    """W: the next group is taken from the W group ids that begin at the oldest one not yet taken; None: no window."""
    steps_in_order: bool = False
    """True if each step consists of the P oldest groups, in any order among themselves."""
    ahead: bool = False
    """True if a step's groups may play while the policies of the previous step still make their versions. Each call
    waits for its own policy's version, so this adds no staleness."""
    unpublished: int = 0
    """U: most updates that the served version may be behind the trained one when a group is admitted."""

    @property
    def slots(self) -> int:
        """B = (S + 1) P: maximum number of active groups; P more if `ahead`."""
        return (self.lag + 1 + self.ahead) * self.groups

    @property
    def max_staleness(self) -> int | None:
        """S + ceil((W - 1) / P) + U: most versions between sampling a token and training on it; None: unbounded.

        S + U if steps are in order.
        """
        if self.steps_in_order:
            return self.lag + self.unpublished
        overtaking = None if self.window is None else -(-(self.window - 1) // self.groups)
        return None if overtaking is None else self.lag + overtaking + self.unpublished


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a yes-or-no question, with its reason."""

    allowed: bool
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveGroup:
    """An admitted group that has not ended, as a checkpoint stores it."""

    group: GroupId
    position: int
    """Position of its task in the task source."""
    attempt: int
    """How often it returned to WAITING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """The state of admission, as a checkpoint stores it."""

    next_group: int
    next_position: int
    """Position of the first task that was never admitted."""
    again: tuple[int, ...] = ()
    """Positions of tasks that wait to be admitted again."""
    active: tuple[ActiveGroup, ...] = ()
    expiries: tuple[tuple[int, int], ...] = ()
    """(position, how often it took too long) of each task that is or will be admitted again."""
    lag: int = 1
    """S, for a run that measures it; elsewhere the settings say it."""


class Admission:
    """The ledger of groups: every admitted group ends exactly once, as TRAINED, FILTERED, FAILED or EXPIRED."""

    def __init__(self, law: AdmissionLaw, next_group: int = 0) -> None:
        self.law = law
        self._earlier: list[tuple[int, AdmissionLaw]] = []
        """Laws before this one, each with the first group that was admitted after it."""
        self.next_group = next_group
        """Id of the next group."""
        self._new = next_group
        self._again: deque[int] = deque()
        self._expiries: Counter[int] = Counter()
        """How often each task took too long, by its position."""
        self._active: dict[GroupId, GroupState] = {}
        self._attempts: dict[GroupId, int] = {}
        self._positions: dict[GroupId, int] = {}
        self.ended: Counter[GroupState] = Counter()

    @classmethod
    def resumed(cls, law: AdmissionLaw, state: AdmissionState) -> "Admission":
        """The ledger of a checkpoint. Groups that were active then are WAITING, with the same attempt."""
        admission = cls(law, state.next_group)
        admission._new = state.next_position
        admission._again.extend(state.again)
        admission._expiries.update(dict(state.expiries))
        for one in state.active:
            admission._enter(one.group, one.position, one.attempt)
        return admission

    @property
    def slots(self) -> int:
        """Maximum number of active groups."""
        return self.law.slots

    def change(self, law: AdmissionLaw) -> None:
        """Replaces the law. Groups that are more than a smaller lag allows stay active; none is admitted meanwhile."""
        self._earlier.append((self.next_group, self.law))
        self.law = law

    @property
    def max_staleness(self) -> int | None:
        """Bound on the staleness of every active group: that of the loosest law of its life. None: unbounded."""
        oldest = min(self._active, default=self.next_group)
        self._earlier = [(end, law) for end, law in self._earlier if oldest < end]
        bounds = [law.max_staleness for law in (self.law, *(law for _, law in self._earlier))]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)

    @property
    def next_position(self) -> int:
        """Position of the next group's task in the task source.

        This is the first task that waits to be admitted again, or a new one if none waits.
        """
        return self._again[0] if self._again else self._new

    def may_admit(self) -> Verdict:
        """Decides whether another group may be admitted now."""
        active = len(self._active)
        if active < self.slots:
            return Verdict(True, f"{active} of {self.slots} slots are active")
        return Verdict(False, f"all {self.slots} slots are active; one is freed when a group ends")

    def admit(self) -> GroupId:
        """Admits the next group as WAITING, with the task at `next_position`. TransitionError if no slot is free."""
        verdict = self.may_admit()
        if not verdict.allowed:
            raise TransitionError(f"group {self.next_group} may not be admitted: {verdict.because}")
        group = GroupId(self.next_group)
        self.next_group += 1
        if self._again:
            position = self._again.popleft()
        else:
            position, self._new = self._new, self._new + 1
        self._enter(group, position, attempt=0)
        return group

    def move(self, group: GroupId, state: GroupState) -> None:
        """Moves a group to `state`; a terminal state frees its slot. TransitionError if GROUP_MOVES lacks the move."""
        now = self.state(group)
        if state not in GROUP_MOVES[now]:
            allowed = ", ".join(sorted(GROUP_MOVES[now]))
            raise TransitionError(f"group {group} is {now} and cannot become {state}; it can become: {allowed}")
        if state is GroupState.WAITING:
            self._attempts[group] += 1
        self._active[group] = state
        if state in GROUP_TERMINAL:
            self._expiries.pop(self._positions[group], None)
            del self._active[group], self._attempts[group], self._positions[group]
            self.ended[state] += 1

    def expire(self, group: GroupId, *, again: bool) -> None:
        """Ends a group that took too long, in any state; if `again`, its task waits to be admitted in a new group."""
        position = self.position(group)
        expiries = self._expiries[position] + 1
        self.move(group, GroupState.EXPIRED)
        if again:
            self._again.append(position)
            self._expiries[position] = expiries

    def after_expiry(self, group: GroupId, *, retries: int) -> Verdict:
        """Decides whether the task of a group that took too long is admitted again, at most `retries` times."""
        before = self._expiries[self.position(group)]
        if before < retries:
            return Verdict(True, f"group {before + 1} of {retries + 1} of its task took too long")
        return Verdict(False, f"all {before + 1} groups of its task took too long")

    def after_failure(self, group: GroupId, *, retries: int) -> Verdict:
        """Decides whether a group without a finished episode is played again, at most `retries` times."""
        attempt = self.attempt(group)
        if attempt < retries:
            return Verdict(True, f"attempt {attempt + 1} of {retries + 1} had no finished episode")
        return Verdict(False, f"none of {attempt + 1} attempts had a finished episode")

    def state(self, group: GroupId) -> GroupState:
        """State of an active group."""
        self._check_active(group)
        return self._active[group]

    def attempt(self, group: GroupId) -> int:
        """How often the active group returned to WAITING."""
        self._check_active(group)
        return self._attempts[group]

    def position(self, group: GroupId) -> int:
        """Position in the task source of the task that the active group plays."""
        self._check_active(group)
        return self._positions[group]

    @property
    def active(self) -> tuple[GroupId, ...]:
        """Admitted groups that have not ended, oldest first."""
        return tuple(sorted(self._active))

    def snapshot(self) -> AdmissionState:
        """The state from which `resumed` continues."""
        active = [
            ActiveGroup(group=group, position=self._positions[group], attempt=self._attempts[group])
            for group in self.active
        ]
        return AdmissionState(
            next_group=self.next_group,
            next_position=self._new,
            again=tuple(self._again),
            active=tuple(active),
            expiries=tuple(sorted(self._expiries.items())),
            lag=max(1, self.law.lag),
        )

    def _enter(self, group: GroupId, position: int, attempt: int) -> None:
        self._active[group] = GroupState.WAITING
        self._positions[group] = position
        self._attempts[group] = attempt

    def _check_active(self, group: GroupId) -> None:
        if group not in self._active:
            raise TransitionError(f"group {group} is not active; active: {sorted(self._active) or 'none'}")
