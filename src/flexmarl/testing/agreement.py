"""Agreement of an engine and a trainer of one model: how much their log-probabilities of sampled tokens differ."""

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
    """Absolute differences of the engine's and the trainer's log-probabilities, in nats, over all sampled tokens."""

    num_tokens: int
    mean: float
    """Mean absolute difference."""
    largest: float


async def agreement(engine: InferenceEngine, trainer: Trainer, requests: Sequence[GenerationRequest]) -> Agreement:
    """Plays the requests on the engine, then compares its raw log-probabilities with the trainer's.

    Both must hold the same weights. At temperature 1 and without filters, both describe one distribution.
    """
    by_id = {request.request_id: request for request in requests}
    played = [generation async for generation in engine.generate(requests)]
    samples = [sample_of(by_id[generation.request_id], generation) for generation in played]
    batch = MicroBatch(micro_batch_id="agreement", policy=requests[0].policy, samples=tuple(samples))
    theirs = np.concatenate(await trainer.logprobs(batch))
    apart = np.abs(np.concatenate([generation.raw_logprobs for generation in played]) - theirs)
    return Agreement(num_tokens=len(apart), mean=float(apart.mean()), largest=float(apart.max()))


def sample_of(request: GenerationRequest, generation: Generation, *, advantage: float = 1.0) -> Sample:
    """Makes a call into the only sample of an episode. Raises AssertionError if the request was not served."""
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
