"""Who plays in these tests."""

import pytest

from flexmarl.rollout.player import Player
from tests.unit.rollout import plays


@pytest.fixture(params=["controller", "worker"])
def played_everywhere(request, monkeypatch):
    """Runs a test twice: its episodes are played in the controller, and on a rollout worker."""
    monkeypatch.setattr(plays, "WHERE", [Player if request.param == "controller" else plays.PlayerOfWorkers])
    return request.param
