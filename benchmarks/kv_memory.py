"""Embedded engine with memory for half of its conversations, and what a long `max_len` costs.

One model of 0.8M parameters (Qwen3 type, random weights), conversations of three calls each, every fourth one long:
replies of 256 tokens against 32. A conversation's next call comes when the last one is answered.

    plenty     room for every slot and every kept conversation at `max_len`
    half       half of the most that running requests held with plenty: requests are preempted and computed again, and
               hardly a conversation is kept

Both must give the same tokens. Then 64 slots and 64 kept conversations with `max_len` 8192 answer with 100 tokens each;
the memory that they hold is compared with that of slots of fixed length.
"""

import statistics
from collections.abc import Callable, Mapping

import numpy as np
import torch
from common import interleaved, median_ratio, parser, report, tiny_model

from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.inference.backends.embedded.kv_cache import FIRST, cached_numbers
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.records import GenerationRequest, PolicyName, Sampling
from flexmarl.training.backends.causal_lm import use_onednn

VOCABULARY, CONVERSATIONS, CALLS, PROMPT, SLOTS = 100, 64, 3, 16, 64
LONG, SHORT, EVERY = 256, 32, 4
GIB = 1 << 30
WANTED_AT_MOST = {"held_vs_static": 0.05}
Replies = Mapping[str, list[int]]


def core_of(settings: EmbeddedSettings) -> EngineCore:
    """An engine's core with the model as runs load it."""
    model = tiny_model(VOCABULARY)
    use_onednn(model)
    return EngineCore(model, settings)


def call(conversation: int, number: int, prompt: np.ndarray, tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{conversation}/{number}",
        policy=PolicyName("solver"),
        prompt_ids=prompt.astype(np.int32),
        sampling=Sampling(max_tokens=tokens),
        seed=1000 * conversation + number,
        conversation=str(conversation),
    )


class Conversations:
    """Plays all conversations on one core."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.most_blocks = 0
        self.replies: dict[str, list[int]] = {}

    def play(self) -> int:
        """Returns the number of sampled tokens."""
        rng = np.random.default_rng(0)
        self.core.sleep()  # which forgets the conversations of the last round
        self.core.wake()
        asked = {}
        for index in range(CONVERSATIONS):
            prompt = rng.integers(1, VOCABULARY, PROMPT)
            asked[f"{index}/0"] = call(index, 0, prompt, SHORT if index % EVERY else LONG)
        for request in asked.values():
            assert self.core.add(request) is None
        tokens = 0
        while not self.core.idle:
            for answer in self.core.step():
                request = asked[answer.request_id]
                assert len(answer.response_ids) == request.sampling.max_tokens
                tokens += len(answer.response_ids)
                self.replies[answer.request_id] = answer.response_ids.tolist()
                index, number = (int(part) for part in answer.request_id.split("/"))
                if number + 1 < CALLS:
                    prompt = np.concatenate([request.prompt_ids, answer.response_ids, request.prompt_ids[:PROMPT]])
                    after = call(index, number + 1, prompt, request.sampling.max_tokens)
                    asked[after.request_id] = after
                    assert self.core.add(after) is None
            use = self.core.use()
            self.most_blocks = max(self.most_blocks, round(use.kv_use * self.core.kv_blocks))
        assert len(self.replies) == CONVERSATIONS * CALLS, "no request is lost"
        return tokens


def held_vs_static() -> tuple[float, float]:
    """(GiB held after 128 replies of 100 tokens with `max_len` 8192, share of what fixed slots would hold)."""
    settings = EmbeddedSettings(slots=64, kept_prefixes=64, max_len=8192)
    core = core_of(settings)
    rng = np.random.default_rng(0)
    for index in range(128):
        assert core.add(call(index, 0, rng.integers(1, VOCABULARY, PROMPT), 100)) is None
    while not core.idle:
        core.step()
    static = (64 + 64) * 8192 * settings.kv_bytes(cached_numbers(tiny_model(VOCABULARY))).token
    return core.kv_held_bytes / GIB, core.kv_held_bytes / static


def main() -> None:
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    plenty = Conversations(core_of(EmbeddedSettings(slots=SLOTS, max_len=1024)))
    alone = Conversations(core_of(EmbeddedSettings(slots=SLOTS, max_len=1024, prefix_reuse=False)))
    alone.play()
    block = EmbeddedSettings().kv_bytes(cached_numbers(tiny_model(VOCABULARY))).block
    budget = (FIRST + alone.most_blocks // 2) * block / GIB
    half = Conversations(core_of(EmbeddedSettings(slots=SLOTS, max_len=1024, kv_gib=budget)))
    players: dict[str, Callable[[], int]] = {"plenty": plenty.play, "half": half.play}
    rates = interleaved(players, arguments.repeats)
    same = sum(plenty.replies[name] == half.replies[name] for name in plenty.replies)
    held, share = held_vs_static()
    figures = {
        "half_vs_plenty": median_ratio(rates, "half", "plenty"),
        "same_replies": same / len(plenty.replies),
        "preempted_by_calls": half.core.use().preempted / ((arguments.repeats + 1) * CONVERSATIONS * CALLS),
        "held_vs_static": share,
    }
    rows = [
        (name, f"{statistics.median(runs):.0f}", f"{min(runs):.0f}", f"{max(runs):.0f}", str(len(runs)))
        for name, runs in rates.items()
    ]
    title = f"tokens/s; half: {half.core.kv_blocks} blocks; with max_len 8192: {held:.4f} GiB held"
    report(
        title,
        ("memory", "median", "min", "max", "runs"),
        rows,
        figures,
        as_json=arguments.json,
        wanted={"same_replies": 1.0},
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
