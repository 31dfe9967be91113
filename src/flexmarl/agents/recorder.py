"""Who is told of every call as it happens."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from flexmarl.records import AgentName, Generation, IntArray, PolicyName, SampleId, Scalar, Turn

TurnOf = Callable[[Generation], Turn]
"""Makes a turn of what there is of a call's answer."""


class Recorder(Protocol):
    """Called by the seats of one or many episodes, in any interleaving; for one sample id `prompt` comes first.

    A call that fails has a prompt and never a turn; what was sampled of its answer is told nevertheless, so that every
    token that an engine sampled is accounted for. What a recorder raises ends the episode.
    """

    async def prompt(
        self,
        *,
        sample_id: SampleId,
        agent: AgentName,
        policy: PolicyName,
        prompt_ids: IntArray,
        parent: SampleId | None,
        tags: Mapping[str, Scalar],
    ) -> None:
        """A call is about to be sent, and does not wait for a disk. Its prompt begins with prompt and response of the
        turn `parent`, if any.
        """
        ...

    async def turn(self, turn: Turn) -> None:
        """It was answered."""
        ...

    async def failed(self, turn: Turn, because: str) -> None:
        """It ended in an abort or an error, or nothing could be made of its answer; `turn` is what was sampled."""
        ...

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """The workflow has left it; what was sampled of it is soon there."""
        ...


class NoRecorder:
    """Recorder that keeps nothing."""

    async def prompt(
        self,
        *,
        sample_id: SampleId,
        agent: AgentName,
        policy: PolicyName,
        prompt_ids: IntArray,
        parent: SampleId | None,
        tags: Mapping[str, Scalar],
    ) -> None:
        """Nothing."""

    async def turn(self, turn: Turn) -> None:
        """Nothing."""

    async def failed(self, turn: Turn, because: str) -> None:
        """Nothing."""

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """Nothing."""
