"""Decides which blocks of keys and values each request and each kept conversation holds.

A block has room for the keys and values of `size` tokens in every layer. A request takes blocks as it grows. The next
call of a conversation shares the full blocks of the prefix that both have, as does a request with the prompt of another
one that runs; a block in which the prefix ends is copied.

    free --take--> one holder --share--> several holders --release--> one holder --release--> free
                   (may write)           (all only read)

When no block is free, kept conversations give theirs back, the one unused longest first.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexmarl.records import IntArray


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens whose keys and values are there, of a conversation or a running request, and the blocks that hold them."""

    ids: IntArray
    blocks: Sequence[int] = ()


def common_prefix(left: IntArray, right: IntArray) -> int:
    """Length of the longest common prefix.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


class KeptPrefixes:
    """The last call of each conversation, for at most `limit` conversations. The one unused longest goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, conversation: str | None, prompt: IntArray) -> tuple[Kept, int] | None:
        """The conversation's last call, and how many prompt tokens that covers; None if it covers none.

        The last prompt token never counts: it is always computed anew.
        """
        kept = self._kept.get(conversation) if conversation is not None else None
        if kept is None:
            return None
        self._kept.move_to_end(conversation or "")
        shared = common_prefix(kept.ids, prompt[:-1])
        return (kept, shared) if shared else None

    def keep(self, conversation: str, new: Kept) -> Kept | None:
        """Keeps `new` for the conversation. Returns what is no longer kept for it; `new` itself if `limit` is 0."""
        if not self._limit:
            return new
        old = self._kept.pop(conversation, None)
        if old is None and len(self._kept) == self._limit:
            old = self.drop()
        self._kept[conversation] = new
        return old

    def drop(self) -> Kept | None:
        """Forgets the conversation unused longest, and returns what was kept of it; None if nothing is kept."""
        return self._kept.popitem(last=False)[1] if self._kept else None

    def clear(self) -> list[Kept]:
        """Forgets all conversations, because the weights that computed their keys and values are gone."""
        kept = list(self._kept.values())
        self._kept.clear()
        return kept


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks for a request that begins to run."""

    blocks: list[int]
    """The request's blocks in order of position."""
    reused: int
    """Number of its tokens whose keys and values are in them already."""
    copy: tuple[int, int] | None
    """Block to copy to one of `blocks`, at once: the shared prefix ends inside it."""


class KvLedger:
    """Holders of every block of one engine."""

    def __init__(self, number: int, size: int, kept: KeptPrefixes, *, first: int = 0) -> None:
        """There are `number` blocks of `size` tokens, with the ids `first` and up."""
        self.number, self.size = number, size
        self.top = first
        """One more than the highest block id that was ever taken; low ids are taken first."""
        self._kept = kept
        self._free = list(range(first, first + number))
        self._holders: Counter[int] = Counter()

    @property
    def free(self) -> int:
        """Number of blocks without a holder."""
        return len(self._free)

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that this many positions take."""
        return -(-positions // self.size)

    def covered(self, conversation: str | None, ids: IntArray) -> int:
        """Number of tokens that the conversation's kept blocks cover."""
        found = self._kept.find(conversation, ids)
        return found[1] if found else 0

    def grant(
        self, conversation: str | None, ids: IntArray, positions: int, *, spare: int = 0, running: Kept | None = None
    ) -> Grant | None:
        """Blocks for `positions` positions of a request with these tokens; None if fewer than `spare` would be left.

        Tokens that the conversation's kept blocks cover, or those of a request that is `running`, are not computed
        again.
        """
        kept, reused = self._kept.find(conversation, ids) or (Kept(ids), 0)
        if running is not None and (shared_now := common_prefix(running.ids, ids[:-1])) > reused:
            kept, reused = running, shared_now
        full = reused // self.size
        shared = list(kept.blocks[: self.blocks_for(reused)])
        self._holders.update(shared)
        own = self._take(self.blocks_for(positions) - full, spare)
        if own is None:
            self.release(shared)
            return None
        split = shared[full:]
        self.release(split)
        return Grant(shared[:full] + own, reused, (split[0], own[0]) if split else None)

    def grow(self, blocks: list[int]) -> bool:
        """Adds a block to those of a request; False if there is none."""
        taken = self._take(1, 0)
        blocks += taken or ()
        return taken is not None

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Takes a holder away from these blocks; returns those that are free now."""
        freed: list[int] = []
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                heapq.heappush(self._free, block)
                freed.append(block)
        return freed

    def keep(self, conversation: str, ids: IntArray, blocks: Sequence[int]) -> None:
        """Hands the blocks of a request that has ended to its conversation. `ids` are the tokens that they hold."""
        used = self.blocks_for(len(ids))
        self.release(blocks[used:])
        old = self._kept.keep(conversation, Kept(ids, tuple(blocks[:used])))
        self.release(old.blocks if old else ())

    def forget(self) -> None:
        """Forgets every conversation."""
        for old in self._kept.clear():
            self.release(old.blocks)

    def held(self) -> list[int]:
        """Blocks that have a holder, in order."""
        return sorted(self._holders)

    def _take(self, number: int, spare: int) -> list[int] | None:
        while len(self._free) < number + spare:
            old = self._kept.drop()
            if old is None:
                return None
            self.release(old.blocks)
        taken = [heapq.heappop(self._free) for _ in range(number)]
        self._holders.update(taken)
        self.top = max([self.top, *(block + 1 for block in taken)])
        return taken
