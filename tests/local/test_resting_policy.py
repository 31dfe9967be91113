"""Policies that are trained in turns, with real trainers: who rests keeps its bits, also over a kill and a resume."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import flexmarl
from flexmarl.config import RunSettings, load_run
from flexmarl.errors import FlexmarlError
from flexmarl.events.event import Event
from flexmarl.events.training_events import Published, Rested

STEPS = 4
OTHER = (
    "{model: model, engine: {type: embedded, slots: 16, max_len: 64}, "
    "training: {micro_batch: 2, optimizer: {learning_rate: 3e-3}, phases: [{steps: 1}, {steps: 2, train: false}]}}"
)
OVERRIDES = [
    *("cluster.backend=inline", "deterministic=true", f"steps={STEPS}", "checkpoint={every: 1, keep: 9}"),
    *("evaluate.tasks=0", f"policies.other={OTHER}"),
    "team.agents.second={policy: other, system: write, sampling: {max_tokens: 6}}",
]


def settings(small_run: Path, out: Path) -> RunSettings:
    return load_run(small_run, [*OVERRIDES, f"out={out}"])


def state(folder: Path, step: int, policy: str) -> dict[str, torch.Tensor]:
    """All tensors of a policy in a checkpoint, by file and name."""
    files = sorted((folder / "checkpoints" / f"step-{step:05d}" / policy).glob("*.safetensors"))
    assert any("weights" in file.name for file in files)
    return {f"{file.stem}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_resting_policy_keeps_its_bits_and_a_killed_run_ends_with_those_of_an_undisturbed_one(
    small_run: Path, tmp_path: Path
) -> None:
    straight = flexmarl.train(settings(small_run, tmp_path / "straight"), show=False)
    rested = [(one.policy, one.step) for one in straight.events() if isinstance(one, Rested)]
    assert rested == [("other", 1), ("other", 2)]
    trained = [[state(straight.folder, step, policy) for step in range(1, STEPS + 1)] for policy in ("other", "one")]
    others, ones = trained
    assert equal(others[0], others[1])
    assert equal(others[1], others[2])
    assert not equal(others[2], others[3]), "witness: it is trained again"
    assert not any(equal(ones[step], ones[step + 1]) for step in range(STEPS - 1)), "witness: the first one never rests"

    def kill(event: Event) -> None:
        if isinstance(event, Published) and (event.policy, event.version) == ("one", 3):  # Step 3: the other one rests.
            raise RuntimeError("killed")

    out = tmp_path / "killed"
    with pytest.raises(FlexmarlError, match="killed"):
        flexmarl.train(settings(small_run, out), on={Published: kill}, show=False)
    (folder,) = out.iterdir()
    resumed = flexmarl.train(folder / "config.yaml", resume=folder, show=False)
    for policy in ("one", "other"):
        assert equal(state(straight.folder, STEPS, policy), state(resumed.folder, STEPS, policy))
