"""Acceptance: the configs of the examples pass `check` on a machine that has neither their devices nor their models."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


CHECK_EACH = """
import sys
from flexmarl.cli import main
for config in sys.argv[1:]:
    sys.argv = ["flexmarl", "check", config]
    try:
        main()
    except SystemExit as end:
        print(f"exit code {end.code or 0} of {config}", flush=True)
"""
"""One process for all configs: what takes long is to import torch."""

TODOS = {
    "math_team": {"cpu.yaml": "nothing to do", "gpu.yaml": "to do", "cluster.yaml": "to do"},
    "plan_path": dict.fromkeys(("cpu.yaml", "shared.yaml", "tree.yaml"), "nothing to do"),
    "relay": {"cpu.yaml": "nothing to do"},
    "long_notes": {"cpu.yaml": "nothing to do"},
    "search_team": {"cpu.yaml": "to do", "gpu.yaml": "to do"},  # One task does not ask all agents.
    "store_assistant": {"cpu.yaml": "6 to do", "timed.yaml": "8 to do"},  # One task does not ask all agents.
    "real_team": {"gpu.yaml": "to do"},  # The others need the model that `make model` brings.
}
CONFIGS = [
    (str(EXAMPLES / example / config), todo) for example, todos in TODOS.items() for config, todo in todos.items()
]


def test_the_configs_of_the_examples_are_right_on_a_laptop(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", CHECK_EACH, *(config for config, _ in CONFIGS)]
    # Elsewhere, so that no file of an example finds another one by the working directory: `flexmarl` does not, either.
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    printed = done.stdout
    for config, todo in CONFIGS:
        said, found, printed = printed.partition(f"exit code 0 of {config}")
        assert found, (config, done.stdout, done.stderr)
        assert "The config is valid" in said
        assert todo in said, config
