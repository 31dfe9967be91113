"""Decides in which lane a slice is drawn, so that no slice hides another.

lane 1  ▐██ a ██▌      ▐██ d ██▌
lane 2     ▐██ b ██▌
lane 3        ▐██████ c ██████▌
"""

from bisect import bisect_right, insort


class Lanes:
    """Lanes for slices of one kind, filled by best fit.

    Slices may come in any order. In the order of their ends, as a journal has them, there are no more lanes than slices
    that ever ran at once.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """How many lanes there are."""
        return len(self._ends)

    def place(self, began: int, ended: int) -> int:
        """The lane that was left the shortest time before `began`, from 0; a new one if all were busy then."""
        free = bisect_right(self._ends, (began, len(self._ends)))
        lane = self._ends.pop(free - 1)[1] if free else len(self._ends)
        insort(self._ends, (ended, lane))
        return lane
