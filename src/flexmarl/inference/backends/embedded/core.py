"""Continuous batching on torch: requests join and leave at any step; synchronous, for one thread.

    add ---> waiting ---> rows 0..n-1 (at most `slots`) ---> Generation
               ^             |          ^
               |             |          `- the last row moves into the gap, so rows stay without gaps
               `- preempted -+- finished: its blocks stay with its conversation

One `step`: rows take the blocks that they grow into, joiners take rows, one forward pass computes their prompts and
every row's next token, one draw samples all. When blocks run out, the youngest request gives its own back and waits;
its prompt and tokens are computed again when it resumes, and it goes on with the tokens that it would have got. Of
requests with one prompt, as the episodes of a group have, the first computes it; the others join a step later, share
its blocks, and compute the last token alone.
In deterministic mode every forward pass has a fixed shape instead: all slots at full length, and each prompt alone. A
request then takes all the blocks that it may need when it begins, so that nothing is computed twice. Tokens that
another instance sampled are fed one by one, as they were sampled: in the prompt they would get other last bits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from flexmarl.cluster.torch_device import free_bytes, free_unused, keep_heap, place
from flexmarl.errors import ConfigError, EngineError
from flexmarl.inference.backends.embedded.kv_cache import (
    ATTENTION,
    FIRST,
    PAD,
    SCRATCH,
    BlockCache,
    Joiner,
    cached_numbers,
)
from flexmarl.inference.backends.embedded.sampler import Decode, SamplingRows, StopWatch, sample, uniforms
from flexmarl.inference.backends.embedded.weights import AdaptedWeights, GivenUp, swap_weights, without_ties
from flexmarl.inference.interface import FIRST_VERSION
from flexmarl.inference.kv_ledger import STRIDE, Grant, KeptPrefixes, KvLedger, longest, prefix_keys
from flexmarl.inference.settings import KV_SHARE, EmbeddedSettings
from flexmarl.objects.interface import Checksum, PublishedAdapter, TensorTree, confirms
from flexmarl.objects.settings import Verify
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
    GenerationProgress,
    GenerationRequest,
    IntArray,
    Version,
    VersionRun,
    unserved,
)

_SEED_MASK = (1 << 64) - 1
_FULL_TILE = 16
"""Deterministic mode computes a multiple of this many rows: matrix kernels treat the rows of an incomplete tile
differently, so with 5 slots a request's last bits would depend on whether it has the fifth slot."""


GIB = 1 << 30

_MOST_WAITS = 2
"""One for a system prompt, one for the whole prompt of the group behind it."""


@dataclass(frozen=True, slots=True)
class _Sampled:
    """Tokens of a request, one entry per token."""

    ids: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray

    @classmethod
    def none(cls) -> "_Sampled":
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))


@dataclass(slots=True)
class _Work:
    """A request, from `add` to its Generation."""

    request: GenerationRequest
    age: int
    """Requests are numbered as they arrive; the youngest has the highest number."""
    sampled: _Sampled
    """Tokens from before it was preempted."""
    blocks: list[int]
    """Blocks that it holds; none while it waits."""
    versions: list[VersionRun]
    """Empty until its first row."""
    reused: int = 0
    keys: dict[bytes, int] = field(default_factory=dict)
    """`prefix_keys` of its prompt, once they were asked for."""
    waits: int = 0
    """Steps that it has waited for another request that computed a part of its prompt."""
    awaited: int = 0
    """Tokens of that part."""
    known: Sequence[int] = ()
    """Tokens that it begins with, whatever is drawn; they are no part of its Generation."""
    streamed: int = 0
    """Tokens that were sampled and streamed, the known ones included; 0 before the first."""

    @classmethod
    def new(cls, request: GenerationRequest, age: int, *, one_by_one: bool) -> "_Work":
        """A request that has just come. With `one_by_one`, its `offset` tokens are not a part of its prompt."""
        if not one_by_one or not request.offset:
            return cls(request, age, _Sampled.none(), [], [])
        sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + request.offset)
        prompt, known = request.prompt_ids[: -request.offset], request.prompt_ids[-request.offset :].tolist()
        whole = replace(request, prompt_ids=prompt, offset=0, sampling=sampling)
        return cls(whole, age, _Sampled.none(), [], [], known=known)

    @property
    def tokens(self) -> IntArray:
        """The prompt and what was sampled before."""
        if not len(self.sampled.ids):
            return self.request.prompt_ids
        return np.concatenate([self.request.prompt_ids, self.sampled.ids])

    def mark(self, count: int, version: Version) -> None:
        """Begins a version run at token `count`."""
        self.versions = [*(past for past in self.versions if past.start < count), VersionRun(count, version)]


class _Rows:
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

    def put(self, row: int, sampled: _Sampled) -> None:
        """The row begins with these tokens."""
        self.count[row] = count = len(sampled.ids)
        for column, values in zip(self._wide, (sampled.ids, sampled.logprobs, sampled.raw_logprobs), strict=True):
            column[row, :count] = values

    def sampled(self, row: int, after: int = 0) -> _Sampled:
        """A copy of the row's tokens behind the first `after`."""
        return _Sampled(*(column[row, after : self.count[row]].copy() for column in self._wide))

    def vacate(self, row: int) -> None:
        """The row has no request any more."""
        self.table[row] = PAD
        self.table[row, 0] = SCRATCH

    def move(self, source: int, target: int) -> None:
        for column in self._small:
            column[target] = column[source]
        count = self.count[source]
        for column in self._wide:
            column[target, :count] = column[source, :count]
        self.table[target] = self.table[source]

    def sampling(self, rows: slice | IntArray) -> SamplingRows:
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


class EngineCore:
    """One model, its slots and its queue. Not safe to call from two threads at once."""

    def __init__(
        self,
        model: torch.nn.Module,
        settings: EmbeddedSettings,
        *,
        device: str = "cpu",
        sharing: int = 1,
        deterministic: bool = False,
        decode: Decode | None = None,
        version: Version = FIRST_VERSION,
        verify: Verify = "full",
    ) -> None:
        """Takes over the model, and sets its attention (`block_attention`), its dtype (of the settings), its device.

        `sharing` engines divide what is free of the device's memory, unless `engine.kv_gib` is set. With
        `deterministic`, a request gets the same bits in any batch, by fixed shapes and unbatched prefill. Raises
        ConfigError if the model's attention does not fit, or `engine.kv_gib` has no room for a block.
        """
        self._settings = settings
        self._verify: Verify = verify
        self._deterministic = deterministic
        self._device = device
        keep_heap()
        place(model, device, getattr(torch, settings.dtype))
        self._model = model.eval()
        self._adapted = AdaptedWeights(model)
        num_rows = -(-settings.slots // _FULL_TILE) * _FULL_TILE if deterministic else settings.slots
        number = _affordable_blocks(model, settings, free_bytes(device) / sharing, deterministic=deterministic)
        self._block_bytes = settings.kv_bytes(cached_numbers(model)).block
        self._cache = BlockCache(model, settings.kv_block, settings.max_len, FIRST + number)
        self._ledger = KvLedger(
            number, settings.kv_block, KeptPrefixes(settings.num_kept(deterministic=deterministic)), first=FIRST
        )
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        self._stops = StopWatch(self._vocabulary, decode)
        self._rows = _Rows(num_rows, settings.max_len, self._ledger.blocks_for(settings.max_len))
        self._sharing = settings.prefix_reuse and not deterministic
        self._running: list[_Work] = []
        self._waiting: deque[_Work] = deque()
        self._added = self._preempted = 0
        self._plain = True
        self._generated = 0
        self._streams = False
        """True once a request has streamed."""
        self.asleep = False
        """True while weights and cache are off the device, so that it cannot step."""
        self._whole: Checksum | None = None
        """Checksum of the weights, if they are a version's, which the object store has; None with an adapter, too."""
        self._given_up: GivenUp | None = None
        """The weights, asleep, if the object store has them."""
        self.version = version

    @property
    def idle(self) -> bool:
        """True if a step would do nothing, or cannot be made."""
        return self.asleep or (not self._running and not self._waiting)

    @property
    def waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._waiting)

    @property
    def kv_blocks(self) -> int:
        """Number of blocks of keys and values that requests and kept conversations may have."""
        return self._ledger.number

    @property
    def kv_held_bytes(self) -> int:
        """Bytes of keys and values that are allocated now."""
        return self._cache.held_bytes

    def use(self) -> EngineUse:
        """The present load."""
        num_running = len(self._running)
        left = self._rows.limit[:num_running] - self._rows.count[:num_running]
        to_come = sum(self._limit(work.request) - len(work.sampled.ids) for work in self._waiting)
        return EngineUse(
            queued=len(self._waiting),
            running=num_running,
            queued_tokens=int(left.sum()) + to_come,
            kv_use=1 - self._ledger.free / self._ledger.number,
            preempted=self._preempted,
            generated_tokens=self._generated,
            version=self.version,
        )

    @property
    def has_news(self) -> bool:
        """True if the first tokens of a request that streams can be streamed."""
        count = self._rows.count
        return self._streams and any(
            work.request.streams and not work.streamed and count[row] > len(work.known)
            for row, work in enumerate(self._running)
        )

    def progress(self) -> list[GenerationProgress]:
        """The tokens that the running requests which stream have got since this was last called."""
        found: list[GenerationProgress] = []
        for row, work in enumerate(self._running if self._streams else ()):
            before = max(work.streamed, len(work.known))
            if work.request.streams and self._rows.count[row] > before:
                part = self._generation(work, self._rows.sampled(row, before), FinishReason.ABORT, after=before)
                work.streamed = before + len(part.response_ids)
                found.append(GenerationProgress(request_id=work.request.request_id, part=part))
        return found

    def add(self, request: GenerationRequest) -> Generation | None:
        """Queues the request. Returns its Generation at once if it can never be served."""
        self._streams = self._streams or request.streams
        problem = self._problem(request)
        if problem:
            return unserved(request, self.version, FinishReason.ERROR, problem)
        self._stops.watch(request.sampling)
        self._waiting.append(_Work.new(request, self._added, one_by_one=self._deterministic))
        self._added += 1
        return None

    def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        """Ends these requests (None: all) and returns the tokens that they have. Unknown ids are ignored."""
        wanted = set(request_ids) if request_ids is not None else None
        gone = [work for work in self._waiting if wanted is None or work.request.request_id in wanted]
        if gone:
            ages = {work.age for work in gone}
            self._waiting = deque(work for work in self._waiting if work.age not in ages)
        ended = [self._generation(work, work.sampled, FinishReason.ABORT) for work in gone]
        rows = [row for row, run in enumerate(self._running) if wanted is None or run.request.request_id in wanted]
        return ended + self._leave(dict.fromkeys(rows, (FinishReason.ABORT, "")))

    def load(self, version: Version, tree: TensorTree) -> Checksum:
        """Swaps the weights, or the adapter if `tree` is one; returns the checksum of what is held.

        Running requests keep their keys and values, and begin a new version run; preempted ones too.
        """
        adapter = PublishedAdapter.from_tree(tree)
        if adapter is not None:
            held, self._whole = self._adapted.load(adapter, self._verify), None
        else:
            held = self._whole = self.copied(tree)
            self._adapted.forget()
        self._serve(version)
        return held

    def copied(self, tree: TensorTree) -> Checksum:
        """Copies whole weights into the model; returns the checksum of what it holds. It serves them after `load`."""
        return swap_weights(self._model, tree, self._verify)

    def weights(self) -> TensorTree:
        """The model's tensors, of tied ones only the first, as whole weights are published; none beside an adapter."""
        return {} if self._adapted.adapter.layers else without_ties(self._model)

    def load_in_place(self, version: Version, fill: Callable[[], Checksum]) -> Checksum:
        """The same for whole weights, which `fill` copies into `weights`. If it raises, it has written nothing."""
        held = self._whole = fill()
        self._adapted.forget()
        self._serve(version)
        return held

    def _serve(self, version: Version) -> None:
        self._ledger.forget()
        self.version = version
        for row, run in enumerate(self._running):
            run.mark(int(self._rows.count[row]), version)
        for work in self._waiting:
            if work.versions:
                work.mark(len(work.sampled.ids), version)

    def decode_with(self, decode: Decode | None) -> None:
        """Reads stop strings with another policy's tokenizer from now on. There must be no requests."""
        self._stops = StopWatch(self._vocabulary, decode)

    def release(self) -> None:
        """Frees model and cache. It cannot be used any more."""
        del self._model, self._adapted, self._cache
        free_unused(self._device)

    def sleep(self, *, give_up: bool = False) -> None:
        """Frees the device. Of the cache, running requests' blocks are kept in host memory, and so are the weights.

        With `give_up`, those of a version are kept nowhere: the object store has them.
        """
        if self.asleep:
            return
        self._ledger.forget()
        self._cache.set_aside(self._ledger.held())
        if give_up and self._whole is not None:
            self._given_up = GivenUp(self._model)
        self._model.to("cpu")
        self._adapted.to("cpu")
        free_unused(self._device)
        self.asleep = True

    @property
    def lacks_weights(self) -> bool:
        """True if its weights were given up: they must be filled in again, by `made_again` and `refill`."""
        return self._given_up is not None

    def made_again(self, *, on_device: bool) -> TensorTree:
        """Takes memory for weights that were given up: on its device, or in host memory if it sleeps on."""
        assert self._given_up is not None, "it has its weights"
        return self._given_up.made_again(self._device if on_device else "cpu")

    def refill(self, fill: Callable[[], Checksum]) -> Checksum:
        """Has `fill` copy the version that was given up into `made_again`. Raises EngineError if it is another one."""
        expected, held = self._whole, fill()
        if expected is None or not confirms(held, expected):
            raise EngineError(f"version {self.version} had checksum {expected}, but it came back with {held}")
        self._given_up = None
        return held

    def wake(self) -> None:
        """Moves everything back to the device. The next step continues as if there had been no sleep."""
        if self.asleep:
            assert self._given_up is None, "its weights must be filled in first"
            self._model.to(self._device)
            self._adapted.to(self._device)
            self._cache.bring_back()
            self.asleep = False

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Samples one token for every running request and for those that join; returns the requests that ended."""
        self._grow()
        num_decode = len(self._running)
        joiners = self._admit()
        num_rows = len(self._running)
        if not num_rows:
            return []
        if self._deterministic:
            drawn = [self._forward(slice(0, num_decode), ())] if num_decode else []
            drawn += [self._forward(slice(joiner.row, joiner.row), (joiner,)) for joiner in joiners]
            ids, own, raw = (np.concatenate(part) for part in zip(*drawn, strict=True))
            for row, work in enumerate(self._running):
                if (count := self._rows.count[row]) < len(work.known):
                    ids[row] = work.known[count]
                    self._generated -= 1
        else:
            ids, own, raw = self._forward(slice(0, num_decode), joiners)
        rows, every, at = self._rows, np.arange(num_rows), self._rows.count[:num_rows].copy()
        rows.length[:num_decode] += 1
        rows.last[:num_rows] = ids
        rows.ids[every, at] = ids
        rows.logprobs[every, at] = own
        rows.raw_logprobs[every, at] = raw
        rows.count[:num_rows] += 1
        self._generated += num_rows
        return self._leave(self._ended(ids, raw))

    def _forward(self, decode: slice, joiners: Sequence[Joiner]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, logprobs and raw logprobs of the next token of the rows `decode` and of the joiners' rows after them."""
        rows, fixed = self._rows, self._deterministic
        start, num_decode = decode.start, decode.stop - decode.start
        order = np.arange(start, decode.stop + len(joiners))
        if not fixed:
            order[:num_decode] = np.argsort(-rows.length[decode], kind="stable")
        fed = order[:num_decode]
        last, lengths = rows.last[fed], rows.length[fed]
        tables = rows.table[order]
        if fixed and not joiners:
            # Fixed shapes: unused rows compute too, at position 0 of the scratch block, and their results are ignored.
            last, tables = rows.last, rows.table
            lengths = np.where(np.arange(len(rows.length)) < decode.stop, rows.length, 0)
        plan = self._cache.lay_out(last, lengths, tables, joiners, fixed)
        self._cache.plan = plan
        logits = self._model(
            input_ids=plan.input_ids,
            position_ids=plan.position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=plan.logits_at,
            cache_plan=plan,
        ).logits[0, : len(order)]
        u = uniforms(rows.seed[order], rows.offset[order] + rows.count[order])
        drawn = sample(logits, rows.sampling(order), u, self._plain)
        back = np.argsort(order)
        ids, own, raw = (part.cpu().numpy()[back] for part in drawn)
        return ids, own, raw

    def _grow(self) -> None:
        """Gives every running request a block for its next position, the oldest first.

        If there is none, not even by forgetting kept conversations, the youngest request gives its own back and waits.
        """
        rows, running = self._rows, self._running
        while len(full := np.flatnonzero(rows.length[: len(running)] >= rows.room[: len(running)])):
            row = min(full.tolist(), key=lambda row: running[row].age)
            if self._ledger.grow(running[row].blocks):
                rows.hold(row, running[row].blocks, self._ledger.size)
            else:
                self._preempt(max(range(len(running)), key=lambda row: running[row].age))
        self._cache.reserve(self._ledger.top)

    def _preempt(self, row: int) -> None:
        """Takes the row's blocks; its request waits before all others, which are younger."""
        work = self._running[row]
        work.sampled = self._rows.sampled(row)
        self._ledger.release(work.blocks)
        work.blocks = []
        self._waiting.appendleft(work)
        self._preempted += 1
        self._vacate(row)

    def _admit(self) -> list[Joiner]:
        """Gives rows to the requests that have waited longest, within slots, blocks and the prefill budget."""
        joiners: list[Joiner] = []
        copies: list[tuple[int, int]] = []
        computed, later = dict[bytes, int](), list[_Work]()
        width = 0
        # Who waits for its prompt keeps a slot.
        while self._waiting and len(self._running) + len(later) < self._settings.slots:
            work = self._waiting[0]
            tokens, conversation = work.tokens, work.request.conversation
            if self._sharing and not work.keys:
                work.keys = prefix_keys(work.request.prompt_ids)
            covered = self._ledger.covered(conversation, tokens, work.keys)
            _, soon = longest(work.keys, computed)
            if soon >= max(covered, work.awaited) + STRIDE and work.waits < _MOST_WAITS:
                work.waits, work.awaited = work.waits + 1, soon
                later.append(self._waiting.popleft())
                continue
            width = max(width, len(tokens) - covered)
            if joiners and width * (len(joiners) + 1) > self._settings.prefill_tokens:
                break
            # A block is spared for each row, so that a joiner is not preempted by the next blocks of the others.
            most = len(work.request.prompt_ids) + self._limit(work.request) - 1
            positions = most if self._deterministic else min(len(tokens) + 1, most)
            grant = self._ledger.grant(conversation, tokens, positions, work.keys, spare=len(self._running))
            if grant is None:
                break
            self._waiting.popleft()
            copies += () if grant.copy is None else (grant.copy,)
            joiners.append(Joiner(len(self._running), grant.reused, tokens))
            self._seat(work, grant)
            computed |= work.keys
        self._waiting.extendleft(reversed(later))
        if joiners:
            self._cache.reserve(self._ledger.top)
            self._cache.copy(copies)
            for work in self._running[-len(joiners) :]:
                self._ledger.share(work.keys, tuple(work.blocks))
            self._plain = self._rows.sampling(slice(0, len(self._running))).plain
        return joiners

    def _seat(self, work: _Work, grant: Grant) -> None:
        rows, request, row = self._rows, work.request, len(self._running)
        sampling = request.sampling
        rows.length[row] = len(request.prompt_ids) + len(work.sampled.ids)
        rows.put(row, work.sampled)
        rows.hold(row, grant.blocks, self._ledger.size)
        rows.offset[row] = request.offset
        rows.limit[row] = self._limit(request)
        rows.seed[row] = request.seed & _SEED_MASK
        rows.temperature[row] = sampling.temperature
        rows.top_k[row] = sampling.top_k
        rows.top_p[row] = sampling.top_p
        rows.min_p[row] = sampling.min_p
        work.blocks = grant.blocks
        if not work.versions:
            work.versions, work.reused = [VersionRun(0, self.version)], grant.reused
        self._running.append(work)

    def _ended(self, ids: np.ndarray, raw: np.ndarray) -> dict[int, tuple[FinishReason, str]]:
        """The rows that end with this token, and why."""
        rows, num_rows = self._rows, len(ids)
        full = np.flatnonzero(rows.count[:num_rows] >= rows.limit[:num_rows]).tolist()
        ended: dict[int, tuple[FinishReason, str]] = dict.fromkeys(full, (FinishReason.LENGTH, ""))
        for row in self._stops.suspects(ids):
            request = self._running[row].request
            if self._stops.ended(request.sampling, _response(request, rows.ids[row, : rows.count[row]])):
                ended[row] = (FinishReason.STOP, "")
        for row in np.flatnonzero(np.isnan(raw)).tolist():
            ended[row] = (FinishReason.ERROR, f"the logits of version {self.version} are not finite")
        return ended

    def _leave(self, ended: dict[int, tuple[FinishReason, str]]) -> list[Generation]:
        """Removes rows, from the last to the first, so that a row that moves into a gap is never itself leaving."""
        generations = [self._finish(row, *ended[row]) for row in sorted(ended)]
        for row in sorted(ended, reverse=True):
            self._vacate(row)
        return generations

    def _vacate(self, row: int) -> None:
        """Removes a row; the last one moves into the gap."""
        last = len(self._running) - 1
        if row != last:
            self._rows.move(last, row)
            self._running[row] = self._running[last]
        self._rows.vacate(last)
        self._running.pop()

    def _finish(self, row: int, finish: FinishReason, error: str) -> Generation:
        work, sampled = self._running[row], self._rows.sampled(row)
        conversation, keeps = work.request.conversation, len(work.versions) == 1 and not self.asleep
        if finish is FinishReason.ERROR:
            self._cache.clear(self._ledger.release(work.blocks))
            sampled = _Sampled(sampled.ids[:-1], sampled.logprobs[:-1], sampled.raw_logprobs[:-1])
        elif conversation is not None and keeps:
            held = np.concatenate([work.request.prompt_ids, sampled.ids[:-1]])
            self._ledger.keep(conversation, held, work.blocks)
        else:
            self._ledger.release(work.blocks)
        return self._generation(work, sampled, finish, error)

    def _generation(
        self, work: _Work, sampled: _Sampled, finish: FinishReason, error: str = "", *, after: int | None = None
    ) -> Generation:
        """The answer of all sampled tokens; or a part of it, of the tokens `sampled` behind its first `after`."""
        known = len(work.known) if after is None else after
        ids, logprobs, raw = sampled.ids, sampled.logprobs, sampled.raw_logprobs
        if after is None:
            ids, logprobs, raw = ids[known:], logprobs[known:], raw[known:]
        runs = {max(0, version.start - known): version.version for version in work.versions}  # The last of equal ones.
        versions = [
            VersionRun(start, version) for start, version in runs.items() if start < len(sampled.ids) or not start
        ]
        return Generation(
            request_id=work.request.request_id,
            response_ids=ids,
            logprobs=logprobs,
            raw_logprobs=raw,
            versions=tuple(versions) or (VersionRun(0, self.version),),
            finish=finish,
            reused_tokens=work.reused,
            error=error,
        )

    def _limit(self, request: GenerationRequest) -> int:
        """The most tokens that the request may get. The last one needs no position of its own."""
        return min(request.sampling.max_tokens, self._settings.max_len - len(request.prompt_ids) + 1)

    def _problem(self, request: GenerationRequest) -> str:
        """The reason why the request can never be served; empty if it can."""
        sampling, prompt = request.sampling, request.prompt_ids
        if not 1 <= len(prompt) <= self._settings.max_len:
            key = f"policies.{request.policy}.engine.max_len"
            return f"the prompt must have 1 to {self._settings.max_len} tokens ({key}), got {len(prompt)}"
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocabulary:
            return f"prompt ids must be 0 to {self._vocabulary - 1}, got {int(prompt.min())} to {int(prompt.max())}"
        if not 0 <= request.offset < len(prompt):
            return f"offset must be 0 to {len(prompt) - 1}, as the prompt ends with these tokens, got {request.offset}"
        if sampling.max_tokens < 1:
            return f"sampling.max_tokens must be at least 1, got {sampling.max_tokens}"
        if sampling.temperature < 0 or sampling.top_p <= 0 or not 0 <= sampling.min_p <= 1 or sampling.top_k < 0:
            return f"sampling must have temperature >= 0, top_p > 0, 0 <= min_p <= 1 and top_k >= 0, got {sampling}"
        return self._too_long(request) or self._stops.refuse(sampling)

    def _too_long(self, request: GenerationRequest) -> str:
        """The reason why the request does not fit even with all blocks for itself; empty if it does."""
        prompt, limit, ledger = len(request.prompt_ids), self._limit(request), self._ledger
        needed, room = ledger.blocks_for(prompt + limit - 1), ledger.number * ledger.size
        if needed <= ledger.number:
            return ""
        gib = -(-self._block_bytes * (FIRST + needed) * 1000 // GIB) / 1000
        shorter = f", or sampling.max_tokens at most {room - prompt + 1}" if room >= prompt else ""
        return (
            f"a prompt of {prompt} and sampling.max_tokens {request.sampling.max_tokens} take up to "
            f"{prompt + limit - 1} tokens of keys and values, but engine.kv_gib "
            f"{self._settings.kv_gib or '(half of what was free)'} holds {room}; set engine.kv_gib to at least "
            f"{gib}{shorter}"
        )


def _response(request: GenerationRequest, sampled: IntArray) -> IntArray:
    """The whole response so far. It includes another instance's tokens, in which a stop string may have begun."""
    if not request.offset:
        return sampled
    return np.concatenate([request.prompt_ids[-request.offset :], sampled])


def _affordable_blocks(model: torch.nn.Module, settings: EmbeddedSettings, free: float, *, deterministic: bool) -> int:
    """Number of blocks that requests may have: what the settings allow of the memory that is `free`, if of use."""
    block = settings.kv_bytes(cached_numbers(model)).block
    wanted = settings.kv_blocks(deterministic=deterministic)
    budget = settings.kv_gib * GIB if settings.kv_gib is not None else KV_SHARE * free
    number = min(wanted, int(budget // block) - FIRST)
    if number < 1:
        raise ConfigError(
            f"engine.kv_gib is {budget / GIB:.4g}, but a block of {settings.kv_block} tokens (engine.kv_block) takes "
            f"{block / GIB:.4g} GiB and an engine needs {FIRST + 1}; set at least {(FIRST + 1) * block / GIB:.4g}"
        )
    return number
