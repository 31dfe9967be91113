"""A run whose adapters are trained together on one base, killed and resumed: it ends with the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import flexmarl
from flexmarl.config import RunSettings, load_run
from flexmarl.errors import FlexmarlError
from flexmarl.events.event import Event
from flexmarl.events.run_events import CheckpointSaved
from flexmarl.events.training_events import Joined, MicroBatchDone, Updated

STEPS, POLICIES = 3, ("one", "two", "three")


class Killed(Exception):
    """Ends a run in the middle of what it does."""


def kill_at(number: int) -> Callable[[Event], None]:
    left = iter(range(number - 1, -1, -1))

    def kill(event: Event) -> None:
        if next(left) == 0:
            raise Killed

    return kill


@pytest.fixture
def config(small_run: Path, tmp_path: Path) -> Path:
    """Three agents with an adapter each; `three` has fewer micro-batches in a step than the others."""
    settings = yaml.safe_load(small_run.read_text())
    policy = settings["policies"]["one"] | {"model": str(small_run.parent / "model")}
    training = policy["training"] | {"together": True, "kl": {"coef": 0.1}, "micro_batch": 2}
    loras = ({"rank": 2}, {"rank": 4}, {"rank": 3, "target_modules": ["q_proj", "down_proj"]})
    settings["policies"] = {
        name: policy | {"training": training | {"lora": lora}} for name, lora in zip(POLICIES, loras, strict=True)
    }
    settings["policies"]["three"]["training"]["micro_batch"] = 5
    seat = settings["team"]["agents"]["solver"]
    settings["team"]["agents"] = {f"a{n}": seat | {"policy": name} for n, name in enumerate(POLICIES)}
    settings["code"] = [str(small_run.parent / "tasks.py")]
    path = tmp_path / "together.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def settings(config: Path, out: Path, *more: str) -> RunSettings:
    fixed = ["cluster.backend=inline", "deterministic=true", f"steps={STEPS}", "checkpoint={every: 1, keep: 9}"]
    return load_run(config, [*fixed, "evaluate.tasks=0", "batch={groups: 2, episodes: 3}", f"out={out}", *more])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = {name: folder / "checkpoints" / f"step-{STEPS:05d}" / name / "weights.safetensors" for name in POLICIES}
    return {f"{name}/{key}": tensor for name, file in files.items() for key, tensor in load_file(file).items()}


def test_killed_at_any_moment_it_ends_with_the_same_bits(config: Path, tmp_path: Path) -> None:
    straight = flexmarl.train(settings(config, tmp_path / "straight"), show=False)
    events = list(straight.events())
    joined = [event.micro_batches for event in events if isinstance(event, Joined)]
    assert ("one/0/0", "three/0/0", "two/0/0") in joined, "witness: passes were shared"
    assert ("one/0/2", "two/0/2") in joined, "witness: the third policy had no more rows"
    for kind, number in ((MicroBatchDone, 2), (Joined, 4), (CheckpointSaved, 2), (Updated, 5)):
        out = tmp_path / f"{kind.name}-{number}"
        with pytest.raises(FlexmarlError, match="raised Killed"):
            flexmarl.train(settings(config, out), on={kind: kill_at(number)}, show=False)
        (folder,) = out.iterdir()
        resumed = flexmarl.train(folder / "config.yaml", resume=folder, show=False)
        expected, found = weights(straight.folder), weights(resumed.folder)
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
        assert any(tensor.abs().sum() > 0 for name, tensor in expected.items() if "lora_B" in name)


def test_a_run_that_repeats_no_bits_joins_what_waits(config: Path, tmp_path: Path) -> None:
    free = flexmarl.train(settings(config, tmp_path, "deterministic=false"), show=False)
    events = list(free.events())
    assert sum(isinstance(event, Updated) for event in events) == STEPS * len(POLICIES)
    assert any(isinstance(event, Joined) for event in events)
