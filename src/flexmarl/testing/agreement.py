"""Agreement of an engine and a trainer of one model: what the tokens that one sampled are worth to the other."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexmarl.inference.interface import InferenceEngine
from flexmarl.records import (
    AgentName,
    EpisodeId,
    Generation,
    GenerationRequest,
    MicroBatch,
    Sample,
    SampleId,
    Turn,
)
from flexmarl.training.interface import Trainer


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences of the two log-probabilities of a token, in nats, over all sampled tokens."""

    num_tokens: int
    mean: float
    """Of the absolute differences."""
    largest: float


async def agreement(engine: InferenceEngine, trainer: Trainer, requests: Sequence[GenerationRequest]) -> Agreement:
    """Plays the requests, then asks the trainer for the log-probabilities of what was sampled.

    Both must hold the same weights; at temperature 1 and without filters the two are one distribution.
    """
    by_id = {request.request_id: request for request in requests}
    played = [generation async for generation in engine.generate(requests)]
    samples = [sample_of(by_id[generation.request_id], generation) for generation in played]
    batch = MicroBatch(micro_batch_id="agreement", policy=requests[0].policy, samples=tuple(samples))
    theirs = np.concatenate(await trainer.logprobs(batch))
    apart = np.abs(np.concatenate([generation.raw_logprobs for generation in played]) - theirs)
    return Agreement(num_tokens=len(apart), mean=float(apart.mean()), largest=float(apart.max()))


def sample_of(request: GenerationRequest, generation: Generation, *, advantage: float = 1.0) -> Sample:
    """The call as training sees it: a row of an episode of its own. Raises AssertionError if it was not served."""
    assert not generation.error, f"request '{request.request_id}' was not served: {generation.error}"
    name = request.request_id
    turn = Turn(
        sample_id=SampleId(name),
        episode=EpisodeId(name),
        agent=AgentName(request.policy),
        policy=request.policy,
        prompt_ids=request.prompt_ids,
        response_ids=generation.response_ids,
        logprobs=generation.logprobs,
        raw_logprobs=generation.raw_logprobs,
        versions=generation.versions,
        finish=generation.finish,
    )
    return Sample(turn=turn, advantage=advantage, weight=1.0, episode_tokens=len(generation.response_ids))
