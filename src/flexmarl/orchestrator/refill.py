"""Decides whether a synchronous step needs another group, and what becomes of one that teaches nothing.

  groups admitted ──► kept       one more is admitted while kept + in flight < groups, as far as the limit
                  └─► dropped    beyond the limit: `on_shortfall`

Which groups a step admits does not depend on which of them ends first (docs/math.md, section 6).
"""

from flexmarl.credit.filters import OutcomeFilter
from flexmarl.errors import EpisodeError
from flexmarl.orchestrator.crediting import Judged


class Refill:
    """The groups of one step: every one that is admitted is judged once."""

    def __init__(self, groups: int, settings: OutcomeFilter | None) -> None:
        """`settings` None: nothing is filtered, and groups that fail are not replaced."""
        self.refills = settings is not None and settings.refill
        self.admitted = 0
        self.kept = 0
        self._judged = 0
        self._groups = groups
        self._target = groups
        """Groups to admit: one more for each that was dropped and can be replaced."""
        self._batches = settings.max_gen_batches if settings and settings.refill else 1
        self._limit = groups * self._batches
        self._on_shortfall = settings.on_shortfall if settings and settings.refill else "train_short"
        self._source_ended = ""
        self.in_order = self._on_shortfall == "unfiltered"
        """Whether groups have to be judged in the order of admission: those kept as they are must be the last ones that
        are dropped, and not those that were the last to end."""

    @property
    def dropped(self) -> int:
        """Groups that were judged and not kept."""
        return self._judged - self.kept

    @property
    def needs_another(self) -> bool:
        """Whether a group is to be admitted now."""
        return self.admitted < self._target

    @property
    def over(self) -> bool:
        """Whether none will be admitted any more, whatever becomes of those in flight."""
        return not self.needs_another and (self._target == self._limit or self._judged == self.admitted)

    @property
    def because(self) -> str:
        """Why the step has no more groups."""
        if self.kept == self._groups:
            return f"{self.kept} groups are kept"
        limit = f"credit.filter.max_gen_batches={self._batches} times {self._groups} groups were generated"
        return f"{self.kept} of {self._groups} groups are kept: {self._source_ended or limit}"

    def admit(self) -> None:
        """One group more is in flight."""
        self.admitted += 1

    def exhausted(self, because: str) -> bool:
        """No more tasks: the step is trained short. False: there are not even the groups of one batch."""
        if self.admitted < self._groups:
            return False
        self._source_ended, self._limit, self._target = because, self.admitted, self.admitted
        self._on_shortfall = "train_short"
        return True

    def keeps(self, judged: Judged) -> bool:
        """Whether a group is kept. Raises EpisodeError where nothing can replace it and `on_shortfall` is `error`."""
        if not judged.drop or self._target < self._limit:
            return not judged.drop
        if self._on_shortfall == "error":
            raise EpisodeError(
                f"a step of {self._groups} groups cannot be filled: {self.dropped + 1} of {self.admitted} that were "
                f"generated are dropped, the last one because: {judged.drop}. Choose tasks that are neither too easy "
                f"nor too hard, raise credit.filter.max_gen_batches={self._batches}, or use on_shortfall=train_short"
            )
        return self._on_shortfall == "unfiltered" and judged.trainable

    def judged(self, *, kept: bool) -> None:
        """A group is kept, or dropped and its slot free for another one."""
        self._judged += 1
        self.kept += kept
        if not kept and self._target < self._limit:
            self._target += 1
