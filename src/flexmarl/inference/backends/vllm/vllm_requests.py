"""Requests of a vLLM engine, and vLLM's words for them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports] - the extra
from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

from flexmarl.errors import EngineError
from flexmarl.inference.backends.vllm.served_versions import Served
from flexmarl.inference.calls import joined, rest_of
from flexmarl.records import FinishReason, Generation, GenerationProgress, GenerationRequest, Version, VersionRun


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request without its answer."""

    request: GenerationRequest
    """The request for the tokens that are still missing."""
    answers: asyncio.Queue[Generation | GenerationProgress | EngineError]
    part: Generation | None = None
    """The tokens that earlier versions sampled."""
    under: Served | None = None
    """The version under which vLLM samples it; None while it is not in vLLM."""
    over: bool = False
    """True if its caller wants no more tokens."""
    streamed: int = 0
    """Tokens of the present piece that its caller has."""

    def stream(self, ids: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        """Gives the caller the tokens of the present piece that it does not have yet."""
        new, values = np.asarray(ids[self.streamed :], np.int32), np.asarray(logprobs[self.streamed :], np.float32)
        if not len(new):
            return
        self.streamed = len(ids)
        part = Generation(
            request_id=self.request.request_id,
            response_ids=new,
            logprobs=values,
            raw_logprobs=values,
            versions=(VersionRun(0, version),),
            finish=FinishReason.ABORT,
        )
        self.answers.put_nowait(GenerationProgress(request_id=self.request.request_id, part=part))

    def whole(self, piece: Generation) -> Generation:
        """The answer, if `piece` is its end."""
        return piece if self.part is None else joined(self.part, piece)

    def keep(self, piece: Generation) -> None:
        """Keeps a piece of the answer: the request is then for the rest."""
        self.part, self.request = self.whole(piece), rest_of(self.request, piece)


def adapter_of(served: Served) -> LoRARequest | None:
    """The adapter of a version; None for the weights themselves. vLLM tells adapters apart by their names."""
    if not served.adapter:
        return None
    return LoRARequest(f"{served.salt}#{served.adapter}", served.adapter, str(served.folder))


def sampling_params(request: GenerationRequest, *, most: int) -> SamplingParams:
    """The sampling of a request in vLLM's words, for at most `most` tokens."""
    sampling = request.sampling
    return SamplingParams(
        max_tokens=most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=_seed(request),
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # What ends a response is in `stop_ids`.
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # Stop strings are looked for here, token by token: they may begin in tokens that another version sampled.
        output_kind=RequestOutputKind.DELTA if sampling.stop or request.streams else RequestOutputKind.FINAL_ONLY,
    )


def _seed(request: GenerationRequest) -> int:
    """vLLM's generator of a request begins at its first token, so each continuation has a stream of its own."""
    text = f"{request.seed}/{request.offset}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
