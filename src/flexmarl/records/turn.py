"""Turn: one LLM call by one agent, exactly as it was sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from flexmarl.records.ids import AgentName, EpisodeId, PolicyName, SampleId, Scalar, Version

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class VersionRun:
    """From offset `start` on, the tokens of a response were sampled by policy version `version`."""

    start: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """A turn whose tokens, log-probabilities and text are in the store: all that credit and scheduling need of it."""

    sample_id: SampleId
    episode: EpisodeId
    agent: AgentName
    policy: PolicyName
    num_prompt_tokens: int
    num_tokens: int
    """Sampled tokens."""
    versions: tuple[VersionRun, ...]
    finish: FinishReason
    parent: SampleId | None = None
    tags: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def version(self) -> Version:
        """The version that began the turn."""
        return self.versions[0].version


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One LLM call. Its ids are never re-tokenised: training sees what the engine saw and sampled."""

    sample_id: SampleId
    episode: EpisodeId
    agent: AgentName
    policy: PolicyName
    prompt_ids: IntArray
    """[P] int32, the exact ids the engine was given."""
    response_ids: IntArray
    """[R] int32, the exact ids it sampled, the stop token included."""
    logprobs: FloatArray
    """[R] float32, under the distribution that was sampled from (temperature and filters applied)."""
    raw_logprobs: FloatArray
    """[R] float32, under the model's own distribution (temperature 1, no filters): what a trainer recomputes."""
    versions: tuple[VersionRun, ...]
    """One run unless the weights changed mid-turn; the first starts at 0."""
    finish: FinishReason
    text: str = ""
    """The decoded response without special tokens; for people and parsers, never for training."""
    parent: SampleId | None = None
    """The turn whose tokens (prompt and response) this prompt extends, if any."""
    tags: Mapping[str, Scalar] = field(default_factory=dict)
    """All that credit may group by: task, group, hop, call, turn, branch, env_step, anchor, context_hash ..."""

    def __post_init__(self) -> None:
        """Checks what nothing downstream could repair."""
        lengths = {len(self.response_ids), len(self.logprobs), len(self.raw_logprobs)}
        if len(lengths) != 1:
            raise ValueError(f"turn {self.sample_id}: ids and logprobs differ in length: {sorted(lengths)}")
        if not self.versions or self.versions[0].start != 0:
            raise ValueError(f"turn {self.sample_id}: versions must start at offset 0, got {self.versions}")

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.response_ids)

    def without_tokens(self) -> PlayedTurn:
        """The rest of it, for who keeps it once the store has its row."""
        return PlayedTurn(
            sample_id=self.sample_id,
            episode=self.episode,
            agent=self.agent,
            policy=self.policy,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            versions=self.versions,
            finish=self.finish,
            parent=self.parent,
            tags=self.tags,
        )

    @property
    def born_version(self) -> Version:
        """Oldest version among this turn's sampled tokens."""
        return min(run.version for run in self.versions)

    @property
    def version(self) -> Version:
        """The version that began the turn; with the sample id it is unique in the agent's table."""
        return self.versions[0].version


AnyTurn = Turn | PlayedTurn
"""For who reads no tokens."""
