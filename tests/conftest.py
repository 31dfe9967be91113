"""What all tests share: one torch thread, and one small run whose names are registered once per process."""

import os
from pathlib import Path

import pytest
import torch

# Before anything of transformers is imported: a hub name that slips into a test must fail, with network or without.
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.small_run import write_team

# The models of the tests are tiny, and threads that wait for each other cost minutes.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a small run, in a folder with all that it needs; nobody writes there."""
    return write_team(tmp_path_factory.mktemp("small_run"))
