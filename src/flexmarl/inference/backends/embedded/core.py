"""Continuous batching on torch: requests join and leave at any step; synchronous, for one thread.

    add ---> waiting ---> rows 0..n-1 (one slot each) ---> Generation
                             |        ^
                          finished    `- the last row moves into the gap, so rows stay without gaps
                             v
                          kept prefixes (rows behind the slots)

One `step`: joiners take rows, one forward pass computes their prompts and every row's next token, one draw samples all.
In deterministic mode every forward pass has a fixed shape instead: all slots at full length, and each prompt alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexmarl.cluster.torch_device import free_unused, place
from flexmarl.inference.backends.embedded.kv_slots import ATTENTION, Joiner, SlotCache
from flexmarl.inference.backends.embedded.sampler import Decode, SamplingRows, StopWatch, sample, uniforms
from flexmarl.inference.backends.embedded.weights import AdaptedWeights, swap_weights
from flexmarl.inference.interface import FIRST_VERSION
from flexmarl.inference.prefixes import KeptPrefixes
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.interface import Checksum, PublishedAdapter, TensorTree
from flexmarl.objects.settings import Verify
from flexmarl.records import (
    EngineUse,
    FinishReason,
    Generation,
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


@dataclass(slots=True)
class _Running:
    """A request that owns a row."""

    request: GenerationRequest
    versions: list[VersionRun]
    reused: int


class _Rows:
    """The state of every row that a step needs, one array for each fact."""

    def __init__(self, slots: int, max_len: int) -> None:
        self.length = np.zeros(slots, np.int64)
        """Positions whose keys and values are in the cache; the last sampled token is not among them."""
        self.last = np.zeros(slots, np.int64)
        self.count = np.zeros(slots, np.int64)
        """Number of tokens sampled here."""
        self.offset = np.zeros(slots, np.int64)
        """Number of response tokens that another instance sampled before; the prompt ends with them."""
        self.limit = np.zeros(slots, np.int64)
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

    def move(self, source: int, target: int) -> None:
        for column in self._small:
            column[target] = column[source]
        count = self.count[source]
        for column in self._wide:
            column[target, :count] = column[source, :count]

    def sampling(self, rows: slice) -> SamplingRows:
        return SamplingRows(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


class EngineCore:
    """One model, its slots and its queue. Not safe to call from two threads at once."""

    def __init__(
        self,
        model: torch.nn.Module,
        settings: EmbeddedSettings,
        *,
        device: str = "cpu",
        deterministic: bool = False,
        decode: Decode | None = None,
        version: Version = FIRST_VERSION,
        verify: Verify = "full",
    ) -> None:
        """Takes over the model, and sets its attention (`slot_attention`), its dtype (of the settings) and its device.

        With `deterministic`, a request gets the same bits in any batch, by fixed shapes and unbatched prefill.
        """
        self._settings = settings
        self._verify: Verify = verify
        self._deterministic = deterministic
        self._device = device
        num_kept = settings.num_kept(deterministic=deterministic)
        place(model, device, getattr(torch, settings.dtype))
        self._model = model.eval()
        self._adapted = AdaptedWeights(model)
        num_rows = -(-settings.slots // _FULL_TILE) * _FULL_TILE if deterministic else settings.slots
        self._cache = SlotCache(model, num_rows + num_kept, settings.max_len)
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
        self._stops = StopWatch(self._vocabulary, decode)
        self._kept = KeptPrefixes(range(settings.slots, settings.slots + num_kept))
        self._rows = _Rows(num_rows, settings.max_len)
        self._running: list[_Running] = []
        self._waiting: deque[GenerationRequest] = deque()
        self._plain = True
        self._generated = 0
        self.asleep = False
        """True while weights and cache are in host memory, so that it cannot step."""
        self.version = version

    @property
    def idle(self) -> bool:
        """True if a step would do nothing, or cannot be made."""
        return self.asleep or (not self._running and not self._waiting)

    @property
    def waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._waiting)

    def use(self) -> EngineUse:
        """The present load."""
        num_running = len(self._running)
        left = self._rows.limit[:num_running] - self._rows.count[:num_running]
        return EngineUse(
            queued=len(self._waiting),
            running=num_running,
            queued_tokens=int(left.sum()) + sum(self._limit(request) for request in self._waiting),
            kv_use=float(self._rows.length[:num_running].sum()) / (self._settings.slots * self._settings.max_len),
            generated_tokens=self._generated,
            version=self.version,
        )

    def add(self, request: GenerationRequest) -> Generation | None:
        """Queues the request. Returns its Generation at once if it can never be served."""
        problem = self._problem(request)
        if problem:
            return unserved(request, self.version, FinishReason.ERROR, problem)
        self._stops.watch(request.sampling)
        self._waiting.append(request)
        return None

    def abort(self, request_ids: Sequence[str] | None = None) -> list[Generation]:
        """Ends these requests (None: all) and returns the tokens that they have. Unknown ids are ignored."""
        wanted = set(request_ids) if request_ids is not None else None
        aborted = [request for request in self._waiting if wanted is None or request.request_id in wanted]
        if aborted:
            gone = {request.request_id for request in aborted}
            self._waiting = deque(request for request in self._waiting if request.request_id not in gone)
        ended = [unserved(request, self.version, FinishReason.ABORT) for request in aborted]
        rows = [row for row, run in enumerate(self._running) if wanted is None or run.request.request_id in wanted]
        return ended + self._leave(dict.fromkeys(rows, (FinishReason.ABORT, "")))

    def load(self, version: Version, tree: TensorTree) -> Checksum:
        """Swaps the weights, or the adapter if `tree` is one; returns the checksum of what is held.

        Running requests keep their keys and values, and begin a new version run.
        """
        adapter = PublishedAdapter.from_tree(tree)
        if adapter is not None:
            held = self._adapted.load(adapter, self._verify)
        else:
            held = swap_weights(self._model, tree, self._verify)
            self._adapted.forget()
        self._kept.clear()
        self.version = version
        for row, run in enumerate(self._running):
            count = int(self._rows.count[row])
            run.versions = [*(past for past in run.versions if past.start < count), VersionRun(count, version)]
        return held

    def sleep(self) -> None:
        """Moves the weights to host memory and frees the device. Of the cache, only running requests' rows are kept."""
        if self.asleep:
            return
        self._kept.clear()
        num_running = len(self._running)
        self._cache.set_aside(num_running, int(self._rows.length[:num_running].max(initial=0)))
        self._model.to("cpu")
        self._adapted.to("cpu")
        free_unused(self._device)
        self.asleep = True

    def wake(self) -> None:
        """Moves everything back to the device. The next step continues as if there had been no sleep."""
        if self.asleep:
            self._model.to(self._device)
            self._adapted.to(self._device)
            self._cache.bring_back()
            self.asleep = False

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Samples one token for every running request and for those that join; returns the requests that ended."""
        num_decode = len(self._running)
        joiners = self._admit()
        num_rows = len(self._running)
        if not num_rows:
            return []
        if self._deterministic:
            drawn = [self._forward(slice(0, num_decode), ())] if num_decode else []
            drawn += [self._forward(slice(joiner.row, joiner.row), (joiner,)) for joiner in joiners]
            ids, own, raw = (np.concatenate(part) for part in zip(*drawn, strict=True))
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
        wanted = slice(decode.start, decode.stop + len(joiners))
        last, lengths = rows.last[decode], rows.length[decode]
        if fixed and not joiners:
            # Fixed shapes: unused rows compute too, at position 0 of their own row, and their results are ignored.
            last, lengths = rows.last, np.where(np.arange(len(rows.length)) < decode.stop, rows.length, 0)
        plan = self._cache.lay_out(last, lengths, joiners, fixed)
        self._cache.plan = plan
        logits = self._model(
            input_ids=plan.input_ids,
            position_ids=plan.position_ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=plan.logits_at,
            slot_plan=plan,
        ).logits[0, : wanted.stop - wanted.start]
        u = uniforms(rows.seed[wanted], rows.offset[wanted] + rows.count[wanted])
        ids, own, raw = sample(logits, rows.sampling(wanted), u, self._plain)
        return ids.cpu().numpy(), own.cpu().numpy(), raw.cpu().numpy()

    def _admit(self) -> list[Joiner]:
        """Gives rows to the requests that have waited longest, within the slots and the prefill budget."""
        joiners: list[Joiner] = []
        width = 0
        while self._waiting and len(self._running) < self._settings.slots:
            request = self._waiting[0]
            row = len(self._running)
            found = self._kept.find(request.conversation, request.prompt_ids)
            reused = found[1] if found else 0
            width = max(width, len(request.prompt_ids) - reused)
            if joiners and width * (len(joiners) + 1) > self._settings.prefill_tokens:
                break
            self._waiting.popleft()
            if found:
                self._cache.copy(found[0].row, row, 0, reused)
            joiners.append(Joiner(row, reused, request.prompt_ids))
            self._seat(row, request, reused)
        if joiners:
            self._plain = self._rows.sampling(slice(0, len(self._running))).plain
        return joiners

    def _seat(self, row: int, request: GenerationRequest, reused: int) -> None:
        rows, sampling = self._rows, request.sampling
        rows.length[row] = len(request.prompt_ids)
        rows.count[row] = 0
        rows.offset[row] = request.offset
        rows.limit[row] = self._limit(request)
        rows.seed[row] = request.seed & _SEED_MASK
        rows.temperature[row] = sampling.temperature
        rows.top_k[row] = sampling.top_k
        rows.top_p[row] = sampling.top_p
        rows.min_p[row] = sampling.min_p
        self._running.append(_Running(request, [VersionRun(0, self.version)], reused))

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
            last = len(self._running) - 1
            if row != last:
                self._rows.move(last, row)
                self._cache.copy(last, row, 0, int(self._rows.length[last]))
                self._running[row] = self._running[last]
            self._running.pop()
        return generations

    def _finish(self, row: int, finish: FinishReason, error: str) -> Generation:
        run, count = self._running[row], int(self._rows.count[row])
        request, ids = run.request, self._rows.ids[row, :count].copy()
        if finish is FinishReason.ERROR:
            self._cache.clear(row)
            ids = ids[: count - 1]
        elif request.conversation is not None and len(run.versions) == 1 and not self.asleep:
            self._keep(row, request.conversation, np.concatenate([request.prompt_ids, ids[:-1]]))
        count = len(ids)
        versions = [version for version in run.versions if version.start < count] or run.versions[:1]
        return Generation(
            request_id=request.request_id,
            response_ids=ids,
            logprobs=self._rows.logprobs[row, :count].copy(),
            raw_logprobs=self._rows.raw_logprobs[row, :count].copy(),
            versions=tuple(versions),
            finish=finish,
            reused_tokens=run.reused,
            error=error,
        )

    def _keep(self, row: int, conversation: str, ids: IntArray) -> None:
        place = self._kept.keep(conversation, ids)
        if place is not None:
            kept_row, start = place
            self._cache.copy(row, kept_row, start, len(ids))

    def _limit(self, request: GenerationRequest) -> int:
        """The most tokens that the request may get. The last one needs no position of its own."""
        return min(request.sampling.max_tokens, self._settings.max_len - len(request.prompt_ids) + 1)

    def _problem(self, request: GenerationRequest) -> str:
        """The reason why the request can never be served; empty if it can."""
        sampling, prompt = request.sampling, request.prompt_ids
        if not 1 <= len(prompt) <= self._settings.max_len:
            return f"the prompt must have 1 to {self._settings.max_len} tokens (engine.max_len), got {len(prompt)}"
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocabulary:
            return f"prompt ids must be 0 to {self._vocabulary - 1}, got {int(prompt.min())} to {int(prompt.max())}"
        if not 0 <= request.offset < len(prompt):
            return f"offset must be 0 to {len(prompt) - 1}, as the prompt ends with these tokens, got {request.offset}"
        if sampling.max_tokens < 1:
            return f"sampling.max_tokens must be at least 1, got {sampling.max_tokens}"
        if sampling.temperature < 0 or sampling.top_p <= 0 or not 0 <= sampling.min_p <= 1 or sampling.top_k < 0:
            return f"sampling must have temperature >= 0, top_p > 0, 0 <= min_p <= 1 and top_k >= 0, got {sampling}"
        return self._stops.refuse(sampling)


def _response(request: GenerationRequest, sampled: IntArray) -> IntArray:
    """The whole response so far. It includes another instance's tokens, in which a stop string may have begun."""
    if not request.offset:
        return sampled
    return np.concatenate([request.prompt_ids[-request.offset :], sampled])
