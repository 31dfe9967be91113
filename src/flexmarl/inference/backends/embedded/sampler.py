"""Sampler on torch: logits -> tokens and their logprobs, from a counter-based random stream; and the end of a response.

A token is a function of (request seed, token index, distribution) alone. An integer hash gives a uniform number, and
the token is the one where the cumulative distribution, in float64 and in id order, passes that number. The rest of the
batch and the time at which the request arrived have no effect.

`StopWatch` finds out whether a response has ended by a stop id or a stop string. A stop string may straddle tokens, so
it is searched in decoded text. Decoding at every token would cost more than the model. So a table over the vocabulary,
filled in as tokens occur, says which tokens *could* end a response, and text is decoded only after those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flexmarl.records import Sampling

Decode = Callable[[Sequence[int]], str]
_NO, _SUSPECT, _UNKNOWN = 0, 1, 2
_SPARE_TOKENS = 8


class StopWatch:
    """Watches for the stop conditions seen so far. More conditions make its table less selective, never wrong."""

    def __init__(self, vocabulary: int, decode: Decode | None) -> None:
        self._decode = decode
        self._last_characters: set[str] = set()
        self._ids: set[int] = set()
        self._table: NDArray[np.int8] = np.zeros(vocabulary, dtype=np.int8)
        self._armed = False

    def refuse(self, sampling: Sampling) -> str:
        """The reason why these stop conditions cannot be watched; empty if they can."""
        if sampling.stop and self._decode is None:
            return f"sampling.stop is {sampling.stop!r}, but this engine has no tokenizer; use stop_ids"
        if "" in sampling.stop:
            return f"sampling.stop must hold no empty string, got {sampling.stop!r}"
        return ""

    def watch(self, sampling: Sampling) -> None:
        """Adds these conditions to the table."""
        characters = {stop[-1] for stop in sampling.stop} - self._last_characters
        ids = set(sampling.stop_ids) - self._ids
        if characters:
            self._last_characters |= characters
            self._table[self._table == _NO] = _UNKNOWN
        if ids:
            self._ids |= ids
            self._table[[i for i in ids if 0 <= i < len(self._table)]] = _SUSPECT
        self._armed = self._armed or bool(characters or ids)

    def suspects(self, tokens: NDArray[np.int64]) -> Sequence[int]:
        """Indices of the tokens after which a response may have ended."""
        if not self._armed:
            return ()
        found = np.flatnonzero(self._table[tokens]).tolist()
        return [index for index in found if self._suspect(int(tokens[index]))]

    def ended(self, sampling: Sampling, response: NDArray[np.int32]) -> bool:
        """True if the response, whose last token is new, contains a stop string or ends with a stop id."""
        if int(response[-1]) in sampling.stop_ids:
            return True
        if not sampling.stop or self._decode is None:
            return False
        # Search the tail first: it holds the longest stop string even if every token were a single byte.
        longest = max(sampling.stop, key=len)
        width = len(longest.encode()) + _SPARE_TOKENS
        tail = self._decode(response[-width:].tolist())
        while len(tail) < len(longest) + _SPARE_TOKENS and width < len(response):
            width *= 2
            tail = self._decode(response[-width:].tolist())
        if not any(stop in tail for stop in sampling.stop):
            return False
        if width >= len(response):
            return True
        text = self._decode(response.tolist())
        return any(stop in text for stop in sampling.stop)

    def _suspect(self, token: int) -> bool:
        """True if the token could complete a stop string: its text has the last character of one.

        A token whose text depends on its neighbours (part of a UTF-8 character, blanks that decoders strip) counts too.
        """
        if self._table[token] == _UNKNOWN:
            assert self._decode is not None
            piece = self._decode([token])
            suspect = "\ufffd" in piece or not piece.strip() or not self._last_characters.isdisjoint(piece)
            self._table[token] = _SUSPECT if suspect else _NO
        return self._table[token] == _SUSPECT


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit flips every output bit half the time."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """A uniform number in [0, 1), with 53 bits, for token `indices[i]` of the request with `seeds[i]`.

    It is output number `indices[i]` of a splitmix64 generator that starts at the mixed seed.
    """
    state = _mix(seeds + _GOLDEN) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of a batch, one entry per row."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]

    @property
    def plain(self) -> bool:
        """True if every row samples the model's own distribution."""
        return bool((self.temperature == 1.0).all()) and not self.filtering.any()

    @property
    def filtering(self) -> NDArray[np.bool_]:
        """[n] True for each row that leaves tokens out."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


def sample(
    logits: torch.Tensor, rows: SamplingRows, u: NDArray[np.float64], plain: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws one token per row of `logits` [n, V] with the uniform numbers `u` [n].

    Returns ids, logprobs of the distribution that was sampled from, and the model's own logprobs, each [n]. Filters
    apply in the order temperature, top-k, top-p, min-p. A greedy row (temperature 0) takes the likeliest id, the lowest
    of equals, and its sampling logprob is 0, because it had no choice.
    """
    raw = torch.log_softmax(logits.float(), -1)
    if plain is None:
        plain = rows.plain
    own = raw if plain else _sampling_logprobs(raw, rows)
    cdf = own.double().exp_().cumsum(-1)
    target = torch.from_numpy(u).to(cdf.device)[:, None] * cdf[:, -1:]
    # The first id whose cumulative sum exceeds the target has positive probability; the clamp is for NaN rows.
    ids = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    own_of, raw_of = own.gather(1, ids), raw.gather(1, ids)
    return ids[:, 0], own_of[:, 0], raw_of[:, 0]


def _sampling_logprobs(raw: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[n, V] log-probabilities after temperature and filters, renormalised; -inf where filtered."""
    temperature = torch.from_numpy(rows.temperature).to(raw.device)[:, None]
    greedy = temperature == 0
    scaled = torch.where(temperature == 1, raw, torch.log_softmax(raw / temperature.masked_fill(greedy, 1.0), -1))
    filtering = np.flatnonzero(rows.filtering & (rows.temperature > 0))
    if len(filtering):
        where = torch.from_numpy(filtering).to(raw.device)
        scaled[where] = _filtered(scaled[where], rows, filtering)
    if bool(greedy.any()):
        best = torch.full_like(raw, -torch.inf).scatter_(1, raw.argmax(-1, keepdim=True), 0.0)
        scaled = torch.where(greedy, best, scaled)
    return scaled


def _filtered(logprobs: torch.Tensor, rows: SamplingRows, which: NDArray[np.intp]) -> torch.Tensor:
    """Log-probabilities of the rows `which` after the filters, renormalised; -inf where filtered.

    Each row is sorted in descending order (equals by id), and cut at rank k, at mass p, and at min-p times the top.
    """

    def column(values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values[which]).to(logprobs.device)[:, None]

    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    size = logprobs.shape[1]
    top_k = column(rows.top_k)
    keep = torch.arange(size, device=logprobs.device) < top_k.masked_fill(top_k <= 0, size)
    mass = torch.where(keep, ordered, -torch.inf).softmax(-1, dtype=torch.float64)
    keep &= (mass.cumsum(-1) - mass < column(rows.top_p)) | (column(rows.top_p) >= 1)
    keep &= mass >= column(rows.min_p) * mass[:, :1]
    cut = torch.where(keep, ordered, -torch.inf)
    return torch.log_softmax(torch.empty_like(cut).scatter_(1, order, cut), -1)
