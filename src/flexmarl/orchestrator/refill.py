"""Decides whether a synchronous step admits another group, and which of its groups are kept.

  groups admitted ──► kept       another is admitted while kept + in flight < groups, up to the limit
                  └─► dropped    if the limit is reached: `on_shortfall`

Which groups a step admits does not depend on which of them ends first (docs/math.md, section 6).
"""

from flexmarl.credit.filters import OutcomeFilter
from flexmarl.errors import EpisodeError
from flexmarl.orchestrator.crediting import Judged


class Refill:
    """Counts the groups of one step. Every admitted group is judged once."""

    def __init__(self, groups: int, settings: OutcomeFilter | None) -> None:
        """`groups` is P. If `settings` is None, nothing is filtered, and groups that fail are not replaced."""
        self.refills = settings is not None and settings.refill
        self.admitted = 0
        self.kept = 0
        self._judged = 0
        self._groups = groups
        self._target = groups
        """Number of groups to admit: P, and one more for each dropped group that can be replaced."""
        self._batches = settings.max_gen_batches if settings and settings.refill else 1
        self._limit = groups * self._batches
        self._on_shortfall = settings.on_shortfall if settings and settings.refill else "train_short"
        self._source_ended = ""
        self.in_order = self._on_shortfall == "unfiltered"
        """True if groups must be judged in the order of admission. The groups that are kept unfiltered are then the
        last dropped ones in that order, not those that ended last."""

    @property
    def dropped(self) -> int:
        """Number of groups that were judged and not kept."""
        return self._judged - self.kept

    @property
    def needs_another(self) -> bool:
        """True if a group must be admitted now."""
        return self.admitted < self._target

    @property
    def over(self) -> bool:
        """True if no more groups will be admitted, whether those in flight are kept or dropped."""
        return not self.needs_another and (self._target == self._limit or self._judged == self.admitted)

    @property
    def because(self) -> str:
        """Why the step admits no more groups."""
        if self.kept == self._groups:
            return f"{self.kept} groups are kept"
        limit = f"credit.filter.max_gen_batches={self._batches} times {self._groups} groups were generated"
        return f"{self.kept} of {self._groups} groups are kept: {self._source_ended or limit}"

    def admit(self) -> None:
        """Notes that a group was admitted."""
        self.admitted += 1

    def exhausted(self, because: str) -> bool:
        """Notes that there are no more tasks: the step trains on the groups that it has.

        Returns False, and changes nothing, if fewer than P groups were admitted.
        """
        if self.admitted < self._groups:
            return False
        self._source_ended, self._limit, self._target = because, self.admitted, self.admitted
        self._on_shortfall = "train_short"
        return True

    def keeps(self, judged: Judged) -> bool:
        """Decides whether a group is kept.

        Raises EpisodeError if the group is dropped, cannot be replaced, and `on_shortfall` is `error`.
        """
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
        """Notes that a group was judged. If it was dropped and can be replaced, another one must be admitted."""
        self._judged += 1
        self.kept += kept
        if not kept and self._target < self._limit:
            self._target += 1
