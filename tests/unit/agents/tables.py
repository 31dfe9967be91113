"""Teams that are quickly seated: a scripted model behind the settings of a run."""

import numpy as np

from flexmarl.agents import ChatRenderer, EpisodeContext, TeamSpec
from flexmarl.agents.settings import TeamSettings
from flexmarl.records import GroupId, Task
from flexmarl.testing.agents import ScriptedModel
from tests.unit.agents import tokenizers_for_tests as samples

TOKENIZER = samples.characters(samples.TERSE)
RENDERER = ChatRenderer(TOKENIZER)
TASK = Task(input_id="sum-1", prompt="3+4", reference="7")
CALCULATOR = {"tools": [{"type": "calculator"}], "syntax": {"type": "function"}}


def spec(agents, workflow=None, *, trained=("p",), policies=("p",), adapters=(), renderer=RENDERER):
    workflow = workflow or {"type": "sequential", "agents": [next(iter(agents))]}
    agents = {name: {"policy": "p", **agent} for name, agent in agents.items()}
    settings = TeamSettings.model_validate({"agents": agents, "workflow": workflow})
    return TeamSpec.build(settings, dict.fromkeys(policies, renderer), trained, adapters)


def context(script, *, tokenizer=TOKENIZER, delay_s=lambda request: 0.0, **changes):
    model = ScriptedModel(tokenizer, script, delay_s=delay_s)
    fields = {"task": TASK, "group": GroupId(0), "trajectory_id": "g0e0a0", "run_seed": 1, "generate": model}
    return EpisodeContext(**{**fields, **changes})


def says(*replies):
    """Script that gives these replies in order."""
    left = list(replies)
    return lambda prompt, request: left.pop(0)


def text(ids):
    return TOKENIZER.decode(np.asarray(ids).tolist(), skip_special_tokens=False)
