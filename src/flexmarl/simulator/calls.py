"""Calls of a simulated engine, from a request's arrival to its answer."""

import asyncio
from dataclasses import dataclass

import numpy as np

from flexmarl.errors import EngineError
from flexmarl.records import (
    FinishReason,
    FloatArray,
    Generation,
    GenerationRequest,
    IntArray,
    PolicyName,
    VersionRun,
)
from flexmarl.simulator.decoding import Place

Answers = asyncio.Queue[Generation | EngineError]


@dataclass(slots=True, eq=False)
class Call:
    """A request, and what becomes of it."""

    request: GenerationRequest
    ids: IntArray
    """What it will have said at its end."""
    finish: FinishReason
    answers: Answers
    place: Place["Call"] | None = None
    """In the batch."""
    reused: int = 0
    over: bool = False
    """Answered, or nobody waits for it."""

    def generation(self, ids: IntArray, finish: FinishReason, versions: tuple[VersionRun, ...]) -> Generation:
        """Its answer, all of it or what it had said when it was ended."""
        logprobs = _logprobs(len(ids))
        return Generation(
            request_id=self.request.request_id,
            response_ids=ids,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=versions,
            finish=finish,
            reused_tokens=self.reused,
        )


def problem_of(request: GenerationRequest, policy: PolicyName, *, in_use: bool) -> str:
    """Why an engine of the policy cannot serve it; `in_use` says that a running request has its id."""
    if request.policy != policy:
        return f"this engine serves policy '{policy}', not '{request.policy}'"
    if in_use:
        return f"request id '{request.request_id}' is in use; ids must be unique among running requests"
    if not len(request.prompt_ids):
        return "the prompt must have at least 1 token, got none"
    if request.sampling.max_tokens < 1:
        return f"sampling.max_tokens must be at least 1, got {request.sampling.max_tokens}"
    return ""


def _logprobs(num_tokens: int) -> FloatArray:
    """[num_tokens] -1 everywhere: a view of one array, since a simulation answers a hundred thousand calls."""
    return _MINUS_ONE[:num_tokens] if num_tokens <= len(_MINUS_ONE) else np.full(num_tokens, -1.0, np.float32)


_MINUS_ONE: FloatArray = np.full(1 << 16, -1.0, np.float32)
_MINUS_ONE.flags.writeable = False
