"""Training places whose ranks cannot be started anew."""

from collections.abc import Sequence

from flexmarl.errors import TrainingError
from flexmarl.training.group import Rank


class StandingRanks:
    """A `Place` of ranks that tests made."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks: Sequence[Rank] = ranks

    async def renew(self, because: str) -> None:
        """Raises TrainingError."""
        raise TrainingError(f"{because}; its place has no other ranks")
