"""What benchmarks/dispatch.py plays: a team of two, and an engine that answers by a script.

A module of its own, as processes of Ray import it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np

from flexmarl.agents import Team, TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.records import FinishReason, Generation, GenerationRequest, PolicyName, Task, VersionRun
from flexmarl.testing.inference import ScriptedEngine

TURNS = 10
RESPONSE = "the sum of both is 7, since 3 and 4 make 7; I am sure of it."
QUESTION = "How much is 3 + 4? Show how you got there, then say the number alone, and nothing after it. "
POLICIES = (PolicyName("solver"), PolicyName("verifier"))
SETTINGS = {
    "agents": {
        "solver": {"policy": "solver", "context": "full", "system": "You solve sums, step by step."},
        "verifier": {"policy": "verifier", "system": "You look for the mistake in an answer."},
    },
    "workflow": {"type": "sequential", "agents": ["solver", "verifier"]},
}


class Answering(ScriptedEngine):
    """Answers every request with the same tokens, after 20 to 60 steps."""

    def __init__(self, step_s: float) -> None:
        super().__init__(lambda request: RESPONSE)
        self._step_s = step_s
        renderer = character_renderer()
        self._ids = np.array([*renderer.encode(RESPONSE), renderer.stop_ids[0]], np.int32)
        self._logprobs = np.full(len(self._ids), -0.5, np.float32)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, when its time has come."""
        clock = asyncio.get_running_loop().time
        began = clock()
        for request in sorted(requests, key=steps_of):
            left = began + steps_of(request) * self._step_s - clock()
            if self._step_s and left > 0:
                await asyncio.sleep(left)
            yield Generation(
                request_id=request.request_id,
                response_ids=self._ids,
                logprobs=self._logprobs,
                raw_logprobs=self._logprobs,
                versions=(VersionRun(0, self.version),),
                finish=FinishReason.STOP,
            )


def steps_of(request: GenerationRequest) -> int:
    """How long the reply is, in decode steps; the seed makes it the same in every run."""
    return 20 + request.seed % 41


async def alternate(task: Task, team: Team) -> None:
    """Solver and verifier, until each has spoken in half of the turns."""
    said = ""
    for _ in range(TURNS // 2):
        said = (await team["solver"].act(f"{task.prompt}{said}")).text
        said = (await team["verifier"].act(f"{task.prompt}{said}")).text
    team.reward(1.0)


def team_of_two() -> TeamSpec:
    """A solver and a verifier of two policies."""
    renderers = dict.fromkeys(POLICIES, character_renderer())
    spec = TeamSpec.build(TeamSettings.model_validate(SETTINGS), renderers, POLICIES)
    return replace(spec, run=alternate)
