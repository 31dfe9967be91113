"""Small runs on simulated engines and trainers, for tests that read a journal."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from flexmarl.agents import Team
from flexmarl.analysis.costs import CostSettings, SharedHost, costs_of
from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.records import GenerationRequest, IntArray, PolicyName, Task
from flexmarl.simulator.decoding import CpuShare
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.modelled_trainer import ModelledTrainer
from flexmarl.testing.scripted_run import ScriptedRun

AGENTS = {"solver": "solver", "verifier": "verifier"}


async def take_turns(task: Task, team: Team) -> None:
    """One to four rounds of both agents, each with a prompt and an answer of its own length."""
    for _ in range(team.rng.randint(1, 4)):
        for seat in team:
            reply = await seat.act("x" * team.rng.randint(1, 80))
            reply.reward(float(len(reply.text)))


def random_length(request: GenerationRequest) -> IntArray:
    """5 to 60 tokens, by the call's seed."""
    return np.full(random.Random(request.seed).randint(5, 60), 7, dtype=np.int32)


def simulated_run(costs: Mapping[str, CostSettings], host: SharedHost | None = None, **sections: Any) -> Facts:
    """What the journal of a run says whose devices take this."""
    run = ScriptedRun(take_turns, agents=AGENTS, **{"steps": 3, "batch": {"groups": 6, "episodes": 4}} | sections)
    shared, objects = CpuShare(host), run.objects
    run.engines = {
        PolicyName(policy): [
            ModelledEngine(
                costs_of(costs, policy).engine,
                random_length,
                policy=PolicyName(policy),
                objects=objects,
                host=shared,
            )
            for _ in range(settings.instances)
        ]
        for policy, settings in run.settings.policies.items()
    }
    run.trainers = {
        policy: ModelledTrainer(policy, costs_of(costs, policy).trainer, objects, host=shared)
        for policy in run.trainers
    }
    run.play()
    return read_facts(run.events.all)
