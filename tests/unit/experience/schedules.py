"""A small simulation of asynchronous training: admission, window, updates and publications, in random order.

    admitted -> played -> done -> taken into the step's batch -> trained (update) -> slot freed (publication)
                  ^ retried   '-> filtered       any time: expired while it is the head, killed and resumed

It keeps books of its own, by which the laws are checked at every move (I1 to I5, named where they are).
"""

import random
from dataclasses import dataclass, field, replace

from flexmarl.experience.window import Window
from flexmarl.records import GroupId, GroupState
from flexmarl.rollout.admission import Admission, AdmissionLaw, AdmissionState


@dataclass
class Books:
    """What a checkpoint would hold besides admission, and the checks' own account of each group."""

    published: int = 0
    """The version that instances serve."""
    born: dict[int, int] = field(default_factory=dict)
    """Version that was served when a group was admitted: no token of it is older."""
    ends: list[int] = field(default_factory=list)
    """Groups in the order in which they ended."""
    open: set[int] = field(default_factory=set)
    """Admitted, and neither taken nor ended."""
    done: set[int] = field(default_factory=set)
    """Of these, the finished ones."""

    def copy(self) -> "Books":
        return replace(self, born=dict(self.born), ends=list(self.ends), open=set(self.open), done=set(self.done))


class Schedule:
    """One run; `step` makes one random move that is possible."""

    def __init__(
        self,
        law: AdmissionLaw,
        rng: random.Random,
        *,
        retries: int = 1,
        deadline: float = 40.0,
        weightless: float = 0.0,
        defers: bool = False,
    ) -> None:
        """`weightless`: how often a group that was taken turns out to have nothing to train on.

        `defers`: publications are deferred for as long as the law allows, not by chance.
        """
        self.law, self.retries, self.deadline, self._rng = law, retries, deadline, rng
        self.weightless, self.defers = weightless, defers
        self.admission, self.window, self.books = Admission(law), self._window(), Books()
        self.batch: list[GroupId] = []
        self.trained: list[GroupId] = []
        """Updated; their slots are free when the publication has come, or was deferred."""
        self.unpublished = 0
        """Updates since the last publication, without that of `trained`."""
        self.now = 0.0
        self.largest_lag = 0
        self.seen: set[str] = set()
        """Which kinds of moves were made: the faults' witness."""
        self._saved: tuple[AdmissionState, Books] = self.admission.snapshot(), self.books.copy()

    def run(self, moves: int) -> None:
        for _ in range(moves):
            self.step()
        self.drain()

    def step(self) -> None:
        self.now += 1.0
        chosen = self._rng.random()
        if chosen < 0.005:
            self.restart()
        elif chosen < 0.35:
            self.admit()
        elif chosen < 0.75:
            self.play()
        elif chosen < 0.90:
            self.consume()
        elif chosen < 0.95:
            self.publish()
        else:
            self.expire()

    def admit(self) -> None:
        if self.admission.may_admit().allowed:
            group = self.admission.admit()
            self.window.submitted(group, self.now)
            self.books.open.add(group)
            self.books.born[group] = self.books.published

    def play(self, outcome: str | None = None, group: GroupId | None = None) -> None:
        """One group begins, or what it began ends: done, failed, or done and filtered."""
        playing = sorted(self.books.open - self.books.done)
        if not playing:
            return
        group = GroupId(self._rng.choice(playing)) if group is None else group
        if self.admission.state(group) is GroupState.WAITING:
            self.admission.move(group, GroupState.RUNNING)
            return
        outcome = outcome or self._rng.choices(("done", "failed", "filtered"), (8, 1, 1))[0]
        self.seen.add(outcome)
        if outcome == "failed":
            if self.admission.after_failure(group, retries=self.retries).allowed:
                self.admission.move(group, GroupState.WAITING)
            else:
                self._end(group, GroupState.FAILED)
            return
        self.admission.move(group, GroupState.DONE)
        self.window.finished(group)
        self.books.done.add(group)
        if outcome == "filtered":
            self._end(group, GroupState.FILTERED)

    def consume(self) -> None:
        """Takes what may be taken until the batch is full, then updates, if the update before is published."""
        while len(self.batch) < self.law.groups and self.take():
            pass
        if len(self.batch) == self.law.groups and not self.trained:
            if self.law.steps_in_order:
                assert not self.books.open or max(self.batch) < min(self.books.open), "I2: a step is the oldest groups"
            self.trained, self.batch = self.batch, []

    def take(self) -> bool:
        head = min(self.books.open, default=None)
        assert self.window.head == head
        reach = len(self.books.born) + 1 if self.law.window is None else self.law.window
        eligible = [group for group in sorted(self.books.done) if head is not None and group < head + reach]
        if self.law.steps_in_order:
            oldest = sorted(self.books.open)[: self.law.groups - len(self.batch)]
            eligible = [group for group in eligible if group in oldest]
        taken = self.window.take()
        if taken is None:
            assert not eligible, f"I4: groups {eligible} wait while a consumer does"
            return False
        group = taken.group
        assert head is not None
        assert group < head + reach, "I1"
        assert group == eligible[0], "I2: the oldest that may be taken"
        self.books.open.remove(group)
        self.books.done.remove(group)
        if self._rng.random() < self.weightless:
            self.seen.add("weightless")
            self.admission.move(group, GroupState.FILTERED)
            self.window.lacks_one()
            self.books.ends.append(group)
            return True
        self.batch.append(group)
        version = self.books.published + self.unpublished + bool(self.trained)
        lag = version - self.books.born[group]
        self.largest_lag = max(self.largest_lag, lag)
        assert self.law.max_staleness is None or lag <= self.law.max_staleness, "I3"
        return True

    def publish(self) -> None:
        """The update's weights are served, or a later version's will be; its groups end and free their slots.

        A checkpoint follows where all updates are served.
        """
        if self.trained:
            self.unpublished += 1
            if self.unpublished > self.law.unpublished or (not self.defers and self._rng.random() < 0.5):
                self.books.published += self.unpublished
                self.unpublished = 0
            else:
                self.seen.add("deferred")
            for group in self.trained:
                self.admission.move(group, GroupState.TRAINED)
                self.books.ends.append(group)
            self.trained = []
            if not self.unpublished:
                self._saved = self.admission.snapshot(), self.books.copy()

    def expire(self) -> None:
        group = self.window.overdue(self.now, self.deadline)
        if group is not None:
            self.seen.add("expired")
            self.window.ended(group)
            self.admission.expire(group, again=self._rng.random() < 0.5)
            self.books.open.remove(group)
            self.books.ends.append(group)

    def restart(self) -> None:
        """Killed, and resumed from the last checkpoint: groups that were active then are played again."""
        self.seen.add("restarted")
        state, books = self._saved
        self.admission, self.window, self.books = (
            Admission.resumed(self.law, state),
            self._window(),
            books.copy(),
        )
        self.batch, self.trained, self.unpublished = [], [], 0
        self.books.open, self.books.done = set(self.admission.active), set()
        for group in self.admission.active:
            self.window.submitted(group, self.now)

    def drain(self) -> None:
        """The end of the data: what is active ends, the last batch is trained as it is."""
        while self.books.open - self.books.done:
            self.play("done")
        while self.books.open or self.batch or self.trained:
            self.consume()
            if not self.trained:
                self.trained, self.batch = self.batch, []
            self.publish()
        ended = sorted(self.books.ends)
        assert ended == list(range(self.admission.next_group)), "I5: every admitted group ends once"
        assert not self.admission.active

    def _window(self) -> Window:
        return Window(self.law.window, step=self.law.groups if self.law.steps_in_order else None)

    def _end(self, group: GroupId, state: GroupState) -> None:
        self.admission.move(group, state)
        self.window.ended(group)
        self.books.open.remove(group)
        self.books.done.discard(group)
        self.books.ends.append(group)
