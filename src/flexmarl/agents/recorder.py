"""Who is told of every call as it happens."""

from collections.abc import Mapping
from typing import Protocol

from flexmarl.records import AgentName, IntArray, PolicyName, SampleId, Scalar, Turn


class Recorder(Protocol):
    """Called by the seats of one or many episodes, in any interleaving; for one sample id `prompt` comes first.

    A call that fails has a prompt and never a turn. What a recorder raises ends the episode.
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
        """A call is about to be sent. Its prompt begins with prompt and response of the turn `parent`, if any."""
        ...

    async def turn(self, turn: Turn) -> None:
        """It was answered."""
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
