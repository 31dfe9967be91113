"""Rollout workers of a run: how many there are, and what their processes must be able to get."""

import pickle
import subprocess
import sys

import pytest

from flexmarl.assemble.blueprint import draw_up
from flexmarl.assemble.residents import open_ray, require_sendable
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.rollout.worker import PlayParts
from tests.unit.rollout.plays import team_of


def parts_of(workflow):
    return PlayParts(team=team_of(workflow), open_store=dict, run_seed=0, timeout_s=1.0, grace_s=1.0)


async def importable(task, team):
    """A workflow of a module."""


def test_a_team_of_modules_can_be_sent():
    require_sendable(parts_of(importable), 2)


def test_a_workflow_that_no_process_can_import_is_named_with_a_remedy():
    async def local(task, team): ...

    with pytest.raises(ConfigError, match=r"rollout.workers is 2, .*local.*; put workflow, .* `code` lists"):
        require_sendable(parts_of(local), 2)


def test_a_workflow_of_a_notebook_is_refused_before_a_process_fails_to_find_it(monkeypatch):
    main = __import__("__main__")
    monkeypatch.setattr(main, "typed", importable, raising=False)
    monkeypatch.setattr(importable, "__module__", "__main__")
    monkeypatch.setattr(importable, "__qualname__", "typed")
    with pytest.raises(ConfigError, match=r"is defined in a notebook, or in the script that runs; put workflow"):
        require_sendable(parts_of(importable), 2)


UNPICKLES = """
import pickle, sys
made = pickle.load(sys.stdin.buffer)
print(made.func.__name__, *({"torch", "transformers.modeling_utils"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("address", ["local", "127.0.0.1:6379"])
def test_processes_that_only_play_import_no_models(address, small_run, tmp_path):
    """Torch and transformers' models take a process seconds and hundreds of megabytes."""
    settings = load_run(small_run, ["cluster.backend=ray", f"cluster.address={address}", "rollout.workers=1"])
    with open_ray(draw_up(settings), tmp_path / "experience.sqlite") as residents:
        (spec,) = residents.rollout_workers()
    unpickled = subprocess.run(
        [sys.executable, "-c", UNPICKLES], input=pickle.dumps(spec.make), capture_output=True, check=True
    )
    assert unpickled.stdout.split() == [b"RolloutHost"]
