"""Calls of a modelled engine, from a request's arrival to its answer, and the versions that sampled its tokens."""

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable
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
    Version,
    VersionRun,
)
from flexmarl.simulator.decoding import BatchedRequest

Answers = asyncio.Queue[Generation | EngineError]
Logprobs = Callable[[GenerationRequest, int], FloatArray]
"""(request, n) -> [n] float32: what the engine reports for the first n tokens of its response."""


@dataclass(slots=True, eq=False)
class ModelledCall:
    """A request, its reply, and where the answer goes."""

    request: GenerationRequest
    ids: IntArray
    """The whole reply, if nothing ends the call early."""
    finish: FinishReason
    answers: Answers
    place: BatchedRequest["ModelledCall"] | None = None
    """Its place in the batch; None while it waits."""
    reused: int = 0
    over: bool = False
    """True when it is answered, or nobody waits for it."""

    def generation(
        self, ids: IntArray, logprobs: FloatArray, finish: FinishReason, versions: tuple[VersionRun, ...]
    ) -> Generation:
        """Builds the answer. `ids` is the whole reply, or the part sampled before the call was ended."""
        return Generation(
            request_id=self.request.request_id,
            response_ids=ids,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=versions,
            finish=finish,
            reused_tokens=self.reused,
        )


def problem_of(request: GenerationRequest, policy: PolicyName | None, *, in_use: bool) -> str:
    """Returns why an engine of `policy` (None: any policy) cannot serve the request, or "" if it can.

    `in_use` says that a running request has the same id.
    """
    if policy not in (None, request.policy):
        return f"this engine serves policy '{policy}', not '{request.policy}'"
    if in_use:
        return f"request id '{request.request_id}' is in use; ids must be unique among running requests"
    if not len(request.prompt_ids):
        return "the prompt must have at least 1 token, got none"
    if request.sampling.max_tokens < 1:
        return f"sampling.max_tokens must be at least 1, got {request.sampling.max_tokens}"
    return ""


def flat_logprobs(request: GenerationRequest, num_tokens: int) -> FloatArray:
    """Returns [num_tokens] float32, all -1: a view of one array, because a simulation answers some 100,000 calls."""
    return _MINUS_ONE[:num_tokens] if num_tokens <= len(_MINUS_ONE) else np.full(num_tokens, -1.0, np.float32)


_MINUS_ONE: FloatArray = np.full(1 << 16, -1.0, np.float32)
_MINUS_ONE.flags.writeable = False


class Loads:
    """The versions that an engine has served, each with the batch step from which it applies.

    >>> loads = Loads(Version(3))
    >>> loads.add(10, Version(4))
    >>> [(run.start, run.version) for run in loads.runs(first=8, num_tokens=5)]
    [(0, 3), (2, 4)]
    """

    def __init__(self, version: Version) -> None:
        self._loads: list[tuple[int, Version]] = [(0, version)]

    def add(self, step: int, version: Version) -> None:
        """Records that tokens from `step` on are sampled by `version`."""
        self._loads.append((step, version))

    def forget(self) -> None:
        """Drops all records; for use before an `add`, when no running request has older tokens."""
        self._loads.clear()

    def runs(self, first: float, num_tokens: int) -> tuple[VersionRun, ...]:
        """Returns the version runs of a response whose first token is sampled at step `first`.

        Of versions that were loaded within one step, only the last one samples.
        """
        if first >= self._loads[-1][0]:
            return (VersionRun(0, self._loads[-1][1]),)
        began = bisect_right(self._loads, first, key=lambda load: load[0]) - 1
        later = {math.ceil(step - first): version for step, version in self._loads[began + 1 :]}
        return (
            VersionRun(0, self._loads[began][1]),
            *(VersionRun(start, version) for start, version in later.items() if start < num_tokens),
        )
