"""State of the embedded engine's requests, from arrival to Generation, and of the rows of a step.

A running request has a row, and rows stay without gaps. One that waits, because it is new or was preempted, has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexmarl.inference.backends.embedded.kv_cache import PAD, SCRATCH
from flexmarl.inference.backends.embedded.sampler import SamplingRows
from flexmarl.records import GenerationRequest, IntArray, Version, VersionRun


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Tokens of a request, one entry per token."""

    ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray

    @classmethod
    def none(cls) -> "SampledTokens":
        """The tokens of a request that has none yet."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))


@dataclass(slots=True)
class Work:
    """A request, from `add` to its Generation."""

    request: GenerationRequest
    age: int
    """Requests are numbered as they arrive; the youngest has the highest number."""
    sampled: SampledTokens
    """Tokens from before it was preempted."""
    blocks: list[int]
    """Blocks that it holds; none while it waits."""
    versions: list[VersionRun]
    """Empty until its first row."""
    reused: int = 0
    postponed: bool = False
    """It has waited a step for another request that computes its prompt."""
    known: Sequence[int] = ()
    """Tokens that it begins with, whatever is drawn; they are no part of its Generation."""
    streamed: int = 0
    """Tokens that were sampled and streamed, the known ones included; 0 before the first."""

    @classmethod
    def new(cls, request: GenerationRequest, age: int, *, one_by_one: bool) -> "Work":
        """A request that has just come. With `one_by_one`, its `offset` tokens are not a part of its prompt."""
        if not one_by_one or not request.offset:
            return cls(request, age, SampledTokens.none(), [], [])
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + request.offset)
        prompt, known = request.prompt_ids[: -request.offset], request.prompt_ids[-request.offset :].tolist()
        whole = replace(request, prompt_ids=prompt, offset=0, sampling=sampling)
        return cls(whole, age, SampledTokens.none(), [], [], known=known)

    @property
    def tokens(self) -> IntArray:
        """The prompt and what was sampled before."""
        if not len(self.sampled.ids):
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, self.sampled.ids])

    def mark(self, count: int, version: Version) -> None:
        """Begins a version run at token `count`."""
        self.versions = [*(past for past in self.versions if past.start < count), VersionRun(count, version)]


class SlotRows:
    """The state of every row that a step needs, one array for each fact."""

    def __init__(self, slots: int, max_len: int, max_blocks: int) -> None:
        self.length = np.zeros(slots, np.int64)
        """Positions whose keys and values are in the cache; the last sampled token is not among them."""
        self.last = np.zeros(slots, np.int64)
        self.count = np.zeros(slots, np.int64)
        """Number of tokens sampled here."""
        self.offset = np.zeros(slots, np.int64)
        """Number of response tokens that another instance sampled before; the prompt ends with them."""
        self.limit = np.zeros(slots, np.int64)
        self.room = np.zeros(slots, np.int64)
        """Positions for which the row has blocks."""
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.ids = np.zeros((slots, max_len), np.int32)
        self.logprobs = np.zeros((slots, max_len), np.float32)
        self.raw_logprobs = np.zeros((slots, max_len), np.float32)
        self._small = [column for column in vars(self).values() if column.ndim == 1]
        self._wide = [self.ids, self.logprobs, self.raw_logprobs]
        self.table = np.zeros((slots, max_blocks), np.int64)
        """Blocks by position, then PAD."""
        self.table[:, 0] = SCRATCH

    def hold(self, row: int, blocks: Sequence[int], size: int) -> None:
        """The row has these blocks of `size` tokens."""
        self.table[row, : len(blocks)] = blocks
        self.room[row] = len(blocks) * size

    def put(self, row: int, sampled: SampledTokens) -> None:
        """The row begins with these tokens."""
        self.count[row] = count = len(sampled.ids)
        for column, values in zip(self._wide, (sampled.ids, sampled.logprobs, sampled.raw_logprobs), strict=True):
            column[row, :count] = values

    def sampled(self, row: int, after: int = 0) -> SampledTokens:
        """A copy of the row's tokens behind the first `after`."""
        return SampledTokens(*(column[row, after : self.count[row]].copy() for column in self._wide))

    def vacate(self, row: int) -> None:
        """The row has no request any more."""
        self.table[row] = PAD
        self.table[row, 0] = SCRATCH

    def move(self, source: int, target: int) -> None:
        """The request of row `source` has row `target` from now on."""
        for column in self._small:
            column[target] = column[source]
        count = self.count[source]
        for column in self._wide:
            column[target, :count] = column[source, :count]
        self.table[target] = self.table[source]

    def sampling(self, rows: slice | IntArray) -> SamplingRows:
        """How the tokens of these rows are drawn."""
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])
