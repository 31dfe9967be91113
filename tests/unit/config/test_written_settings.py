"""The config.yaml of a run folder says what the run was made with: it is read as the same settings."""

from pathlib import Path

import pytest
import yaml

from flexmarl.assemble.kept import write_settings
from flexmarl.config import RunSettings, load_run
from flexmarl.events.run_folder import RunFolder
from tests.unit.config.configs import MINIMAL

EXAMPLES = Path(__file__).parents[3] / "examples"
PARTS = ("printed.yaml", "common.yaml", "game.yaml", "workloads/*.yaml", "systems/*.yaml")
"""Files that others extend, and figures."""
CONFIGS = sorted(path for path in EXAMPLES.rglob("*.yaml") if not any(map(path.match, PARTS)))
TIMES = "simulation.tools.times={latency_s: {shape: exponential, mean: 0.5}, result: '5'}"
SECTIONS = (
    TIMES,
    "simulation.tools.times={latency_s: 0.1, result: '5'}",
    "simulation.tools.times={latency_s: {shape: lognormal, mean: 0.5, cap: 10}, result: '5'}",
    "simulation.costs={default: paper_14b, one: {profile: paper_14b, engine: {slots: 8}}}",
    "simulation.replies={default: {type: lengths, mean: 300}, writer: {type: asked}}",
    "simulation.rewards={success: 0.4}",
    "simulation.recorded=runs/other",
    "stop={patience: 2, metric: success}",
    "checkpoint={every: 2, best: {metric: success}, budget_gb: 2}",
    "policies.one.training.lora={}",
    "policies.one.training.kl={}",
    "policies.one.training.correction={type: tis}",
    "policies.one.training.schedule={type: cosine, warmup_steps: 2}",
    "policies.one.model={run: runs/other, policy: solver}",
    "credit.shaping=[{type: reward_to_go}]",
    "team.agents.solver.sampling={temperature: 0.5, stop: [end]}",
    "mode=async",
)


def written(settings: RunSettings, folder: Path) -> RunFolder:
    write_settings(settings, RunFolder(folder))
    return RunFolder(folder)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.relative_to(EXAMPLES).as_posix())
def test_what_the_run_of_an_example_writes_is_read_as_its_settings(config: Path, tmp_path: Path) -> None:
    settings = load_run(config)
    assert load_run(written(settings, tmp_path).config) == settings


@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_run_with_a_section_writes_is_read_as_its_settings(section: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    settings = load_run(tmp_path / "run.yaml", ["evaluate={every: 2, tasks: 4}", section])
    assert load_run(written(settings, tmp_path).config) == settings


def test_a_folder_of_an_older_version_which_says_inf_for_no_cap_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    settings = load_run(tmp_path / "run.yaml", [TIMES])
    folder = written(settings, tmp_path)
    said = yaml.safe_load(folder.config.read_text())
    said["simulation"]["tools"]["times"]["latency_s"]["cap"] = float("inf")
    folder.config.write_text(yaml.safe_dump(said))
    assert load_run(folder.config) == settings
