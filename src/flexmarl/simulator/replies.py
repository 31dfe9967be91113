"""What simulated engines answer, by agent: the simulated world's replacement for weights."""

from collections.abc import Callable
from dataclasses import replace

from flexmarl.errors import EngineError
from flexmarl.records import FinishReason, GenerationRequest, IntArray, Sampling

Responder = Callable[[GenerationRequest], IntArray]
"""[R] int32, R >= 1: what a request samples if nothing cuts it short, a function of the request alone. Raises
EngineError for one that is to end with finish `error`. It minds stop strings; stop ids and `max_tokens` are minded."""


def reply_to(request: GenerationRequest, respond: Responder) -> tuple[IntArray, FinishReason]:
    """What is left to say of the responder's reply, and how it ends.

    Of a request that another instance began, the responder sees the original: it answers the same.
    """
    said = request.offset
    if not said:
        return _cut(respond(request), request.sampling)
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + said)
    ids, finish = _cut(
        respond(replace(request, prompt_ids=request.prompt_ids[:-said], sampling=sampling, offset=0)), sampling
    )
    return ids[said:], finish


def _cut(ids: IntArray, sampling: Sampling) -> tuple[IntArray, FinishReason]:
    """The ids up to the first stop id, or up to `max_tokens`; a reply that just ends has stopped."""
    if not len(ids):
        raise EngineError("the responder gave no token; a reply has at least one")
    kept = ids[: sampling.max_tokens]
    ends = [int(found.argmax()) + 1 for stop in sampling.stop_ids if (found := kept == stop).any()]
    if ends:
        return kept[: min(ends)], FinishReason.STOP
    return kept, FinishReason.STOP if len(kept) == len(ids) else FinishReason.LENGTH
