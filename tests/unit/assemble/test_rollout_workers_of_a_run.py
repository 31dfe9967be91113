"""Rollout workers of a run: how many there are, and what their processes must be able to get."""

import pytest

from flexmarl.assemble.residents import require_sendable
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
