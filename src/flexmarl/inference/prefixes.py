"""Decides which conversations' keys and values are kept for their next call."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from flexmarl.records import IntArray


@dataclass(frozen=True, slots=True)
class Kept:
    """The tokens whose keys and values a row holds."""

    row: int
    ids: IntArray


def common_prefix(left: IntArray, right: IntArray) -> int:
    """Length of the longest common prefix.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


class KeptPrefixes:
    """Ledger of the rows behind the slots: at most one per conversation. The one unused longest is replaced first."""

    def __init__(self, rows: range) -> None:
        self._all_rows = rows
        self._free = list(reversed(rows))
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, conversation: str | None, prompt: IntArray) -> tuple[Kept, int] | None:
        """The conversation's row and how many prompt tokens it holds; None if it holds none.

        The last prompt token never counts: it is always computed anew.
        """
        kept = self._kept.get(conversation) if conversation is not None else None
        if kept is None:
            return None
        self._kept.move_to_end(conversation or "")
        shared = common_prefix(kept.ids, prompt[:-1])
        return (kept, shared) if shared else None

    def keep(self, conversation: str, ids: IntArray) -> tuple[int, int] | None:
        """Chooses a row for the conversation's tokens: (row, first position to copy), or None if there are no rows."""
        if not self._all_rows:
            return None
        old = self._kept.pop(conversation, None)
        if old is None and not self._free:
            _, old = self._kept.popitem(last=False)
            start = 0
        else:
            start = common_prefix(old.ids, ids) if old else 0
        row = old.row if old else self._free.pop()
        self._kept[conversation] = Kept(row, ids)
        return row, start

    def clear(self) -> None:
        """Forgets all prefixes, because the weights that computed them are gone."""
        self._kept.clear()
        self._free = list(reversed(self._all_rows))
