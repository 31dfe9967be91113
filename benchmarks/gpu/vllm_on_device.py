"""Engine on vLLM, on one device: what its prefix cache and drafts give, and how long an update in place takes.

    python benchmarks/gpu/vllm_on_device.py --json
    python benchmarks/gpu/vllm_on_device.py --json --model FOLDER --draft '{"method": "mtp"}'
    .venv-vllm/bin/python benchmarks/gpu/vllm_on_device.py --json --device cpu --short

It needs an environment with vLLM and flexmarl. The model has the shape of Qwen2.5-1.5B and random weights; `--model` is
one that is there, `--draft` what vLLM takes as `speculative_config`, such as that of a model with layers that predict
several tokens. Every engine is in this process, one after the other, and vLLM's workers in theirs.

Conversations of four turns, whose prompts begin alike and repeat what was said; all tokens are sampled greedily:

    tokens_per_s      sampled tokens per second
    cache             that rate by the rate without prefix caching
    computed          prompt tokens that are computed with it, by those that are computed without
    ngram, draft      the rate with drafts of n-grams of the prompt, and with `--draft`, by that without drafts
                      (random weights repeat themselves more than trained ones: `ngram` is a best case)
    agree_...         share of conversations whose tokens are those without: the rest differ by last bits of logits
    update_idle_s     from the trainer's call until vLLM serves all weights anew, digest and canary included
    update_busy_s     the same while conversations run, which end before it and go on after it
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from common import report  # noqa: E402

from flexmarl.cluster.concurrency import DeviceThread  # noqa: E402
from flexmarl.cluster.leases import RunLeases  # noqa: E402
from flexmarl.inference.interface import EngineParts, WeightedEngine, answers_of, make_engine  # noqa: E402
from flexmarl.inference.settings import VllmSettings  # noqa: E402
from flexmarl.objects.backends.memory import ShmObjectStore  # noqa: E402
from flexmarl.records import GenerationRequest, PolicyName, Sampling, Version  # noqa: E402
from flexmarl.training.backends.causal_lm import load_model  # noqa: E402
from flexmarl.training.backends.single import SingleProcessTrainer  # noqa: E402
from flexmarl.training.settings import TrainingSettings  # noqa: E402

POLICY = PolicyName("solver")
TURNS = 4
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class Scale:
    """The size of the model and of the work."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    conversations: int
    shared: int
    """Tokens with which all prompts begin."""
    said: int
    """Tokens that each turn adds to the prompt beside the reply, and tokens of the reply."""
    kv_gib: float

    def model(self) -> PreTrainedModel:
        """Qwen2-type with two key heads and random weights."""
        torch.manual_seed(0)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=self.vocabulary,
                hidden_size=self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=2,
                intermediate_size=self.inner,
                max_position_embeddings=32768,
                tie_word_embeddings=True,
            )
        )


WHOLE = Scale(1536, 8960, 28, 12, 151936, conversations=64, shared=512, said=128, kv_gib=8.0)
SHORT = Scale(128, 256, 2, 4, 512, conversations=4, shared=64, said=16, kv_gib=0.25)


class Conversations:
    """Conversations with one engine. A round has prompts of its own."""

    def __init__(self, engine: WeightedEngine, scale: Scale, vocabulary: int) -> None:
        self._engine, self._scale, self._vocabulary = engine, scale, vocabulary

    async def play(self, number: int) -> list[list[int]]:
        """What round `number` samples: ids of each conversation."""
        random = np.random.default_rng(number)
        begins = random.integers(1, self._vocabulary, self._scale.shared)
        return await asyncio.gather(
            *(
                self._one(f"{number}/{place}", begins, np.random.default_rng((number, place)))
                for place in range(self._scale.conversations)
            )
        )

    async def _one(self, name: str, begins: np.ndarray, random: np.random.Generator) -> list[int]:
        prompt, sampled = begins, list[int]()
        for turn in range(TURNS):
            prompt = np.concatenate((prompt, random.integers(1, self._vocabulary, self._scale.said)))
            request = GenerationRequest(
                request_id=f"{name}/{turn}",
                policy=POLICY,
                prompt_ids=prompt.astype(np.int32),
                sampling=Sampling(max_tokens=self._scale.said, temperature=0.0),
                seed=turn,
            )
            (answer,) = [one async for one in answers_of(self._engine, [request])]
            sampled += answer.response_ids.tolist()
            prompt = np.concatenate((prompt, answer.response_ids))
        return sampled


@dataclass
class Played:
    """What one engine did."""

    rates: list[float]
    """Sampled tokens per second, of each round after the first."""
    computed: int
    """Prompt tokens that it computed."""
    said: list[list[list[int]]]

    @property
    def rate(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rates)


async def played(conversations: Conversations, engine: WeightedEngine, repeats: int) -> Played:
    """Rounds of conversations, after one that is not counted."""
    await conversations.play(0)
    before, rates, said = (await engine.usage()).prompt_tokens, list[float](), list[list[list[int]]]()
    for number in range(1, repeats + 1):
        began = time.perf_counter()
        said.append(await conversations.play(number))
        rates.append(sum(map(len, said[-1])) / (time.perf_counter() - began))
    return Played(rates, (await engine.usage()).prompt_tokens - before, said)


async def updates(
    engine: WeightedEngine, conversations: Conversations, trainer: SingleProcessTrainer, repeats: int, half_s: float
) -> tuple[float, float]:
    """Seconds of an update of an idle engine, and of one that answers: medians. `half_s`: of half a round."""
    idle, busy = list[float](), list[float]()
    for number in range(2 * repeats):
        playing = asyncio.ensure_future(conversations.play(1000 + number)) if number % 2 else None
        if playing:
            await asyncio.sleep(half_s)
            if playing.done():
                raise RuntimeError("the conversations ended before the update")
        version = Version(number)
        trainer._version = version  # As after a step: the weights stay.
        began = time.perf_counter()
        expected = await trainer.publish(version)
        if await engine.load_weights(POLICY, version) != expected:
            raise RuntimeError("the engine serves other weights")
        (busy if playing else idle).append(time.perf_counter() - began)
        if playing:
            await playing
    return statistics.median(idle), statistics.median(busy)


@contextmanager
def parts_of(folder: Path, device: str, store: ShmObjectStore) -> Iterator[EngineParts]:
    """What engines of the model in `folder` are made of."""
    thread = DeviceThread(POLICY)
    yield EngineParts(
        policy=POLICY,
        make_model=lambda: load_model(folder),
        decode=str,
        store=store,
        thread=thread,
        source=str(folder),
        device=device,
    )
    thread.close()


async def measured(options: argparse.Namespace) -> dict[str, float]:
    """The figures."""
    scale = SHORT if options.short else WHOLE
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory(prefix="fx") as place, RunLeases("vllm", root=Path(place)) as leases:
        folder = Path(options.model or f"{place}/model")
        if not options.model:
            scale.model().to(getattr(torch, dtype)).save_pretrained(folder)
        store = ShmObjectStore(leases.shared_memory())
        store.create()
        settings = VllmSettings(
            max_len=scale.shared + TURNS * 2 * scale.said,
            slots=scale.conversations,
            dtype=dtype,
            kv_gib=scale.kv_gib,
        )
        ways = {
            "plain": settings,
            "uncached": settings.model_copy(update={"prefix_caching": False}),
            "ngram": settings.model_copy(update={"options": {"speculative_config": NGRAM}}),
        }
        if options.draft:
            ways["draft"] = settings.model_copy(update={"options": {"speculative_config": json.loads(options.draft)}})
        found: dict[str, Played] = {}
        times = (0.0, 0.0)
        for way, how in ways.items():
            print(f"starting the engine '{way}'", flush=True)
            with parts_of(folder, options.device, store) as parts:
                engine: Any = make_engine(how, parts)
                conversations = Conversations(engine, scale, load_vocabulary(folder))
                found[way] = await played(conversations, engine, options.repeats)
                if way == "plain":
                    trainer = SingleProcessTrainer(
                        POLICY,
                        load_model(folder),
                        TrainingSettings.model_validate({"dtype": dtype}),
                        store,
                        device=options.device,
                        canary=True,
                    )
                    half_s = sum(map(len, found[way].said[0])) / found[way].rate / 2
                    times = await updates(engine, conversations, trainer, options.repeats, half_s)
                    del trainer
                await engine.close()
    plain = found["plain"]
    return {
        "tokens_per_s": plain.rate,
        "cache": plain.rate / found["uncached"].rate,
        "computed": plain.computed / found["uncached"].computed,
        **{way: found[way].rate / plain.rate for way in ("ngram", "draft") if way in found},
        **{f"agree_{way}": agreement(plain, found[way]) for way in found if way != "plain"},
        "update_idle_s": times[0],
        "update_busy_s": times[1],
    }


def load_vocabulary(folder: Path) -> int:
    """Ids of the model."""
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def agreement(one: Played, other: Played) -> float:
    """Share of conversations in which both sampled the same tokens."""
    pairs = [(a, b) for rounds in zip(one.said, other.said, strict=True) for a, b in zip(*rounds, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def main() -> None:
    """Prints the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda", help="cuda or cpu (default cuda)")
    options.add_argument("--short", action="store_true", help="a tiny model and little work, to try the script")
    options.add_argument("--model", help="folder of a model in place of random weights")
    options.add_argument("--draft", metavar="JSON", help="vLLM's speculative_config of one more engine")
    options.add_argument("--repeats", type=int, default=3, help="rounds that are counted (default 3)")
    options.add_argument("--json", action="store_true", help="print figures and machine facts as one JSON line last")
    chosen = options.parse_args()
    figures = asyncio.run(measured(chosen))
    rows = [[name, f"{value:.3f}"] for name, value in figures.items()]
    report("vLLM on one device", ["figure", "measured"], rows, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
