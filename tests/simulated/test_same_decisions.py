"""The simulated world decides what the inline world decides, from the same replies."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.assemble.simulation import simulate
from flexmarl.config import load_run
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.training_events import MicroBatchDone

ROOT = Path(__file__).parents[2]
DECISIONS = {
    "group_admitted": ("group", "step", "task", "because"),
    "credited": ("groups", "report", "because"),
    "group_ready": ("group", "samples", "because"),
    "group_filtered": ("group", "because"),
    "step_ended": ("step", "trained", "versions"),
}
"""By event, what must be equal."""
TWO_POLICIES = [
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 12}}",
    "policies.two={model: model, engine: {type: embedded, slots: 16, max_len: 64}, "
    "training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
]


def decisions(folder: Path, event: str) -> list[dict[str, Any]]:
    fields = DECISIONS[event]
    told = (entry for entry in read_run(RunFolder(folder).journal) if entry.name == event)
    return [{name: getattr(entry, name) for name in fields} for entry in told]


def micro_batches(folder: Path) -> dict[str, list[tuple[str, int, float]]]:
    """By policy: trainers work side by side, so that which of two policies comes first is a matter of time."""
    by_policy: dict[str, list[tuple[str, int, float]]] = {}
    for entry in read_run(RunFolder(folder).journal):
        if isinstance(entry, MicroBatchDone):
            done = (entry.micro_batch, entry.rows, entry.tokens)
            by_policy.setdefault(entry.policy, []).append(done)
    return by_policy


@pytest.mark.parametrize("overrides", [[], TWO_POLICIES], ids=["one_policy", "two_policies"])
def test_the_simulated_world_decides_what_the_inline_world_decided(small_run, tmp_path, overrides):
    load = partial(load_run, small_run)
    asked = ["deterministic=true", "evaluate.tasks=0", f"out={tmp_path}", *overrides]
    run = assemble_run(load([*asked, "cluster.threads=1"]))
    run.train(Console(quiet=True))

    simulated = simulate(load([*asked, "cluster.backend=simulated", f"simulation.recorded={run.folder}"]))

    for event in DECISIONS:
        told = decisions(run.folder, event)
        assert decisions(simulated, event) == told, event
        assert told or event == "group_filtered", f"nobody decided: {event}"
    assert micro_batches(simulated) == micro_batches(run.folder)


def configs() -> list[Path]:
    """Every config of the examples that describes a run."""
    found = sorted((ROOT / "examples").rglob("*.yaml"))
    return [path for path in found if {"policies", "extends"} & set(yaml.safe_load(path.read_text(encoding="utf-8")))]


def is_whole(path: Path) -> bool:
    """Whether it names itself: what others extend need not."""
    return "name" in yaml.safe_load(path.read_text(encoding="utf-8"))


def plays_programs(path: Path) -> bool:
    """True if programs or commands play it: their time is real, and flexmarl simulate refuses them by name."""
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    return settings.get("team", {}).get("workflow", {}).get("type") in ("program", "command")


def scores_in_boxes(path: Path) -> bool:
    """True if its answers are scored in boxes, for which virtual time cannot wait: it is refused by name, too."""
    return path.parent.name == "code_team"


@pytest.mark.parametrize(
    "config",
    [path for path in filter(is_whole, configs()) if not (plays_programs(path) or scores_in_boxes(path))],
    ids=lambda path: str(path.relative_to(ROOT / "examples")),
)
def test_every_example_can_be_simulated_with_the_backend_as_the_only_change(config, tmp_path):
    small = ["steps=1", "batch={groups: 2, episodes: 2}", "evaluate.tasks=0", f"out={tmp_path}"]
    folder = simulate(load_run(config, ["cluster.backend=simulated", *small]))
    ended = decisions(folder, "step_ended")
    assert len(ended) == 1
