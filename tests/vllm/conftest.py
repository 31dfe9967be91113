"""One real vLLM engine for many tests: it takes a minute to start. Without vLLM there is nothing to test."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import EngineError
from flexmarl.inference.interface import EngineParts, answers_of, make_engine
from flexmarl.inference.settings import AdapterRoom, VllmSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, PublishedAdapter, canary_key, checksum, weights_key
from flexmarl.records import EngineUse, Generation, GenerationRequest, PolicyName, Sampling, Version

# `make test-vllm` has an environment of its own; elsewhere these tests are not collected.
collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

# Processes of vLLM on few cores wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

POLICY, OTHER = PolicyName("solver"), PolicyName("verifier")
SIZE = 96
SETTINGS = VllmSettings(max_len=256, slots=32, kv_gib=0.25, options={"block_size": 32})
ADAPTED = SETTINGS.model_copy(update={"adapters": AdapterRoom(slots=2, max_rank=4)})


def letters(ids: Sequence[int]) -> str:
    """Text of ids: a letter each."""
    return "".join(chr(32 + i) for i in ids)


def tied_model(seed: int) -> LlamaForCausalLM:
    """A tiny model whose head is its embedding. vLLM on a CPU takes heads of 32, not of 40."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        initializer_range=0.15,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


def logprobs_of(model: torch.nn.Module, ids: Sequence[int]) -> np.ndarray:
    """[N - 1] log-probability of each token after those before it, by transformers."""
    whole = torch.tensor(list(ids))
    with torch.no_grad():
        logits = model(input_ids=whole[None]).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(-1, whole[1:, None])[:, 0].numpy()


def canary(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """What a trainer publishes with these weights."""
    ids = torch.arange(8) * 7919 % SIZE
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, -1]
    return {"ids": ids, "logprobs": torch.log_softmax(logits.float(), -1)[ids]}


def ask(
    name: str,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    seed: int = 1,
    policy: PolicyName = POLICY,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        policy=policy,
        prompt_ids=np.asarray(prompt, np.int32),
        sampling=Sampling(**sampling),
        seed=seed,
    )


@dataclass
class Served:
    """A live engine, its loop and its store."""

    runner: asyncio.Runner
    engine: Any
    store: InlineObjectStore
    newest: int = 0
    models: dict[int, LlamaForCausalLM] = field(default_factory=lambda: {0: tied_model(0)})

    async def publish(self, version: int, *, canary_of: int | None = None) -> Checksum:
        """Publishes the model of seed `version` as trainers do: tied weights once, with the canary of a model."""
        model = self.models[version] = tied_model(version)
        tree = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        await self.store.set(
            canary_key(POLICY, Version(version)), canary(model if canary_of is None else tied_model(canary_of))
        )
        return (await self.store.set(weights_key(POLICY, Version(version)), tree)).checksum

    async def load_next(self) -> None:
        """Publishes and loads one more version."""
        self.newest = max(self.newest, int((await self.engine.usage()).version)) + 1
        held = await self.publish(self.newest)
        assert await self.engine.load_weights(POLICY, Version(self.newest)) == held

    async def all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [generation async for generation in answers_of(self.engine, requests)]


class OneOfMany:
    """A view of an engine for one check: `close` ends this view's requests and leaves the engine."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._asked, self._closed = engine, set[str](), False
        self.abort, self.capabilities, self.load_weights = engine.abort, engine.capabilities, engine.load_weights
        self.sleep, self.wake = engine.sleep, engine.wake

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        if self._closed:
            raise EngineError("closed")
        self._asked |= {request.request_id for request in requests}
        async for generation in self._engine.generate(requests):
            yield generation

    async def usage(self) -> EngineUse:
        return await self._engine.usage()

    async def close(self) -> None:
        self._closed = True
        await self._engine.abort(list(self._asked))


@dataclass
class ServedAdapters(Served):
    """A live engine of two policies on the model of seed 0, each with an adapter and two versions side by side."""

    merged: dict[tuple[PolicyName, int], LlamaForCausalLM] = field(default_factory=dict)
    """The model that each published adapter makes of the base."""

    async def publish_adapter(
        self, version: int, *, policy: PolicyName = POLICY, rank: int = 4, canary_of_base: bool = False
    ) -> Checksum:
        """Publishes an adapter as trainers do, with the canary of the merged model, or with that of the base."""
        base, merged = tied_model(0), tied_model(0)
        torch.manual_seed(1000 * version + len(policy))
        layers, scaling = dict[str, tuple[torch.Tensor, torch.Tensor]](), 0.7
        for name, linear in merged.named_modules():
            if isinstance(linear, torch.nn.Linear) and name != "lm_head":
                a, b = torch.randn(rank, linear.in_features) * 0.3, torch.randn(linear.out_features, rank) * 0.1
                layers[name] = a, b
                with torch.no_grad():
                    linear.weight += scaling * b @ a
        self.merged[policy, version] = merged
        of_base = checksum({name: tensor for name, tensor in base.state_dict().items() if name != "lm_head.weight"})
        await self.store.set(canary_key(policy, Version(version)), canary(base if canary_of_base else merged))
        tree = PublishedAdapter(layers, scaling, of_base).as_tree()
        return (await self.store.set(weights_key(policy, Version(version)), tree)).checksum

    async def load_next_adapter(self, policy: PolicyName = POLICY) -> int:
        """Publishes and loads one more version; returns it."""
        self.newest = max(self.newest, 10) + 1
        held = await self.publish_adapter(self.newest, policy=policy)
        assert await self.engine.load_weights(policy, Version(self.newest)) == held
        return self.newest


def serving(folder: Path) -> Iterator[Served]:
    """Starts an engine on the model of seed 0, and closes it."""
    for runner, engine, store in running(folder, SETTINGS):
        yield Served(runner, engine, store)


def running(folder: Path, settings: VllmSettings, **changes: Any) -> Iterator[tuple[asyncio.Runner, Any, Any]]:
    """A loop, an engine on the model of seed 0 and its store. `changes` are parts of the engine."""
    tied_model(0).save_pretrained(folder)
    store, thread = InlineObjectStore(), DeviceThread()
    parts = EngineParts(
        policy=POLICY,
        make_model=lambda: tied_model(0),
        decode=letters,
        store=store,
        thread=thread,
        source=str(folder),
        **changes,
    )
    with asyncio.Runner() as runner:

        async def start() -> Any:
            return make_engine(settings, parts)

        engine = runner.run(start())
        yield runner, engine, store
        runner.run(engine.close())
    thread.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine for all tests of a file, which may load further versions."""
    yield from serving(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAdapters]:
    """An engine of two policies with adapters, for all tests of a file."""
    for runner, engine, store in running(tmp_path_factory.mktemp("base"), ADAPTED, together=(OTHER,), versions=2):
        yield ServedAdapters(runner, engine, store)


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Served]:
    """An engine for one test, which may lose it."""
    yield from serving(tmp_path / "model")


@pytest.fixture
def doomed_adapted(tmp_path: Path) -> Iterator[ServedAdapters]:
    """An engine with adapters for one test, which may lose it."""
    for runner, engine, store in running(tmp_path / "base", ADAPTED, versions=2):
        yield ServedAdapters(runner, engine, store)
