"""Engines that benchmarks have beside each other, each in a process of its own, which can also ask vLLM by itself."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.interface import EngineParts, WeightedEngine, make_engine
from flexmarl.inference.settings import EngineSettings
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import GenerationRequest, PolicyName
from flexmarl.training.backends.causal_lm import load_model


class Beside(WeightedEngine, Protocol):
    """An engine whose process can also ask vLLM by itself."""

    async def bare(self, requests: Sequence[GenerationRequest]) -> int:
        """Gives the requests to `AsyncLLM`; returns the number of sampled tokens."""
        ...


class Hosted:
    """An engine in its process."""

    def __init__(self, name: str, settings: EngineSettings, source: str, store: ObjectStore, device: str) -> None:
        """`name` is that of its policy, `source` the folder of its model."""
        self._engine: Any = make_engine(
            settings,
            EngineParts(
                policy=PolicyName(name),
                make_model=partial(load_model, source),
                decode=str,
                store=store,
                thread=DeviceThread(name),
                source=source,
                device=device,
                versions=2,
            ),
        )

    def __getattr__(self, method: str) -> Any:
        return getattr(self._engine, method)

    async def bare(self, requests: Sequence[GenerationRequest]) -> int:
        """Gives the requests to `AsyncLLM` as a program without flexmarl would."""
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        async def one(request: GenerationRequest) -> int:
            params = SamplingParams(
                max_tokens=request.sampling.max_tokens,
                seed=request.seed,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt, tokens = tokens_input(request.prompt_ids.tolist()), 0
            async for output in self._engine._llm.generate(prompt, params, f"bare {request.request_id}"):
                tokens += len(output.outputs[0].token_ids)
            return tokens

        return sum(await asyncio.gather(*map(one, requests)))
