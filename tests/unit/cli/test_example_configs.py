"""Acceptance: the configs of the examples pass `check` on a machine that has neither their devices nor their models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("config", "todo"),
    [
        ("math_team/cpu.yaml", "nothing to do"),
        ("math_team/gpu.yaml", "to do"),
        ("math_team/cluster.yaml", "to do"),
        ("plan_path/cpu.yaml", "nothing to do"),
        ("plan_path/shared.yaml", "nothing to do"),
        ("plan_path/tree.yaml", "nothing to do"),
        ("relay/cpu.yaml", "nothing to do"),
    ],
)
def test_a_config_of_an_example_is_right_on_a_laptop(config: str, todo: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from flexmarl.cli import main; main()", "check", str(EXAMPLES / config)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "The config is right" in done.stdout
    assert todo in done.stdout
