"""Records that enter and leave an inference engine: tokens, never text."""

from dataclasses import dataclass, field

import numpy as np

from flexmarl.records.episode import FinishReason, FloatArray, IntArray, Purpose, VersionRun
from flexmarl.records.ids import AgentName, PolicyName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw tokens. Filters apply in the order temperature, top-k, top-p, min-p."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Generation ends when the decoded response contains one of these; its tokens stay in the response."""
    stop_ids: tuple[int, ...] = ()
    """Generation ends after one of these ids; the id stays in the response. The engine adds no id of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One call of one policy."""

    request_id: str
    policy: PolicyName
    prompt_ids: IntArray
    """[P] int32, P >= 1."""
    sampling: Sampling
    seed: int
    """Random stream of this call: token t depends on (seed, t) and the distribution alone, never on the batch."""
    agent: AgentName | None = None
    """The agent that asks, if one does. An engine with weights does not read it."""
    purpose: Purpose = Purpose.TRAINING
    """Why the call's episode is played. Engines do not read it."""
    conversation: str | None = None
    """Calls with the same value tend to extend one another; an engine may keep their prefix."""
    offset: int = 0
    """Number of response tokens at the end of `prompt_ids` that another instance sampled. The random stream continues
    at this position, a stop string may begin in these tokens, and `sampling.max_tokens` counts only the tokens still to
    sample."""
    streams: bool = False
    """True: somebody reads along. An engine that can yields GenerationProgress while it samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one request. With finish `error`, `error` gives the reason and the arrays end at the failure."""

    request_id: str
    response_ids: IntArray
    logprobs: FloatArray
    raw_logprobs: FloatArray
    versions: tuple[VersionRun, ...]
    finish: FinishReason
    reused_tokens: int = 0
    """Number of prompt tokens whose keys and values were kept from an earlier call."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationProgress:
    """Tokens of an answer that goes on. An engine never yields the last ones of an answer so."""

    request_id: str
    part: Generation
    """The tokens since the request's last progress, with their version runs; its `finish` says nothing."""


def unserved(request: GenerationRequest, version: Version, finish: FinishReason, error: str = "") -> Generation:
    """The answer to a request for which no token was sampled, by an instance at `version`."""
    nothing = np.zeros(0, np.float32)
    return Generation(
        request_id=request.request_id,
        response_ids=np.zeros(0, np.int32),
        logprobs=nothing,
        raw_logprobs=nothing,
        versions=(VersionRun(0, version),),
        finish=finish,
        error=error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """The load of one engine at one moment."""

    queued: int = 0
    running: int = 0
    queued_tokens: int = 0
    """Upper bound on the tokens still to sample, queued and running."""
    kv_use: float = 0.0
    """Share of the key-value capacity in use, 0 to 1."""
    preempted: int = 0
    """Number of times since the engine started that a running request gave its keys and values back and had to wait."""
    generated_tokens: int = 0
    """Number of tokens sampled since the engine started."""
    prompt_tokens: int = 0
    """Number of prompt tokens computed since the engine started, by its own count: those of kept prefixes are not among
    them. 0 if it does not count them."""
    tokens_per_s: float = 0.0
    version: Version = field(default=Version(0))
