"""A team is sent to another process by pickle: its renderers, its tools, and the user's code that it is made of."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flexmarl.agents import load_code
from flexmarl.agents.extension import Message
from flexmarl.assemble.blueprint import seat_team
from flexmarl.config import load_run

ROOT = Path(__file__).parents[3]
CONFIGS = ["math_team/cpu.yaml", "plan_path/cpu.yaml", "plan_path/tree.yaml", "relay/cpu.yaml", "long_notes/cpu.yaml"]
RECEIVE = """
import json, pickle, sys
from flexmarl.agents.extension import Message
team = pickle.loads(sys.stdin.buffer.read())
said = [Message("system", "Be brief."), Message("user", "2 + 2 <|end|>")]
print(json.dumps({
    "prompts": {name: agent.renderer.render(said).tolist() for name, agent in team.agents.items()},
    "tools": {name: sorted(agent.tools) for name, agent in team.agents.items()},
    "workflow": repr(team.run).partition(" at ")[0],
    "environment": team.environment is not None,
}))
"""


@pytest.mark.parametrize("config", CONFIGS)
def test_a_process_that_has_imported_nothing_gets_the_whole_team(config: str) -> None:
    settings = load_run(ROOT / "examples" / config)
    for path in settings.code:
        load_code(settings.path(path))
    team = seat_team(settings)
    done = subprocess.run(
        [sys.executable, "-c", RECEIVE],
        input=pickle.dumps(team),
        stdout=subprocess.PIPE,
        check=True,
        cwd="/",
        timeout=120,
    )
    there = json.loads(done.stdout)
    said = [Message("system", "Be brief."), Message("user", "2 + 2 <|end|>")]
    for name, agent in team.agents.items():
        assert np.array_equal(there["prompts"][name], agent.renderer.render(said))
        assert there["tools"][name] == sorted(agent.tools)
    assert there["workflow"] == repr(team.run).partition(" at ")[0]
    assert there["environment"] == (team.environment is not None)
