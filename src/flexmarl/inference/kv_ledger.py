"""Decides which blocks of keys and values each request and each kept conversation holds.

A block has room for the keys and values of `size` tokens in every layer. A request takes blocks as it grows. It shares
the full blocks of a prefix that its conversation's last call has too, or the prompt of any request that holds its
blocks; a block in which the prefix ends is copied.

    free --take--> one holder --share--> several holders --release--> one holder --release--> free
                   (may write)           (all only read)

When no block is free, kept conversations give theirs back, the one unused longest first.
"""

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from flexmarl.records import IntArray

STRIDE = 8
"""Prompts share prefixes of this many tokens, and of multiples of it; equal prompts all but the last token."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens whose keys and values are there, and the blocks that hold them."""

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


def prefix_keys(prompt: IntArray) -> dict[bytes, int]:
    """Keys of the prefixes that the prompt may share, with the length of each, the shortest first.

    >>> list(prefix_keys(np.arange(20)).values()), prefix_keys(np.arange(1))
    ([8, 16, 19], {})
    """
    keys, key, prompt = dict[bytes, int](), b"", np.asarray(prompt, np.int32)
    for start in range(0, len(prompt) - 1, STRIDE):
        end = min(start + STRIDE, len(prompt) - 1)
        key = blake2b(key + prompt[start:end].tobytes(), digest_size=16).digest()
        keys[key] = end
    return keys


def longest(keys: dict[bytes, int], among: Container[bytes]) -> tuple[bytes, int]:
    """The key of the longest prefix that is `among` these, and its length; 0 if none is."""
    return next(((key, length) for key, length in reversed(keys.items()) if key in among), (b"", 0))


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
        self._shared: dict[bytes, dict[int, Sequence[int]]] = {}
        """By the key of a prefix and the block in which it ends: the blocks of a prompt that has it."""
        self._ends: dict[int, set[bytes]] = defaultdict(set)
        """By block, the shared prefixes that end in it."""

    @property
    def free(self) -> int:
        """Number of blocks without a holder."""
        return len(self._free)

    def blocks_for(self, positions: int) -> int:
        """Number of blocks that this many positions take."""
        return -(-positions // self.size)

    def covered(self, conversation: str | None, ids: IntArray, keys: dict[bytes, int]) -> int:
        """Number of a prompt's tokens that blocks of its conversation cover, or shared ones by its `prefix_keys`."""
        return self._found(conversation, ids, keys)[1]

    def _found(self, conversation: str | None, ids: IntArray, keys: dict[bytes, int]) -> tuple[Kept, int]:
        own, shared = self._kept.find(conversation, ids) or (Kept(ids), 0), longest(keys, self._shared)
        return own if shared[1] <= own[1] else (Kept(ids, next(iter(self._shared[shared[0]].values()))), shared[1])

    def share(self, keys: dict[bytes, int], blocks: Sequence[int]) -> None:
        """Shares the prefixes of a prompt that is in these blocks."""
        for key, length in keys.items():
            end = blocks[(length - 1) // self.size]
            self._shared.setdefault(key, {})[end] = blocks
            self._ends[end].add(key)

    def grant(
        self, conversation: str | None, ids: IntArray, positions: int, keys: dict[bytes, int], *, spare: int = 0
    ) -> Grant | None:
        """Blocks for `positions` positions of a request with these tokens; None if fewer than `spare` would be left.

        Tokens that are `covered` are not computed again.
        """
        kept, reused = self._found(conversation, ids, keys)
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
                self._stop_sharing(block)
                heapq.heappush(self._free, block)
                freed.append(block)
        return freed

    def _stop_sharing(self, block: int) -> None:
        for key in self._ends.pop(block, ()):
            del self._shared[key][block]
            if not self._shared[key]:
                del self._shared[key]

    def keep(self, conversation: str, ids: IntArray, blocks: Sequence[int]) -> None:
        """Hands the blocks of a request that has ended to its conversation. `ids` are the tokens that they hold."""
        used = self.blocks_for(len(ids))
        self.release(blocks[used:])
        old = self._kept.keep(conversation, Kept(ids, tuple(blocks[:used])))
        self.release(old.blocks if old else ())

    def forget(self) -> None:
        """Forgets every conversation, and shares no block any more."""
        self._shared.clear()
        self._ends.clear()
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
