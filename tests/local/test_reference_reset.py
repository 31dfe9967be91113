"""A run whose reference follows its policy, killed and resumed: it ends with the bits of an undisturbed one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import flexmarl
from flexmarl.config import RunSettings, load_run
from flexmarl.errors import FlexmarlError
from flexmarl.events.event import Event
from flexmarl.events.run_events import CheckpointSaved
from flexmarl.events.training_events import ReferenceReset, Updated

STEPS = 4
OVERRIDES = [
    *("cluster.backend=inline", "deterministic=true", f"steps={STEPS}", "checkpoint={every: 1, keep: 9}"),
    "evaluate={tasks: 4, every: 1, every_tasks: 4, temperature: 0}",
]


def settings(small_run: Path, out: Path, reset: str) -> RunSettings:
    return load_run(small_run, [*OVERRIDES, f"out={out}", f"policies.one.training.kl={{coef: 0.1, reset: {reset}}}"])


class Killed(Exception):
    """Ends a run in the middle of what it does."""


def kill_at(number: int) -> Callable[[Event], None]:
    left = iter(range(number - 1, -1, -1))

    def kill(event: Event) -> None:
        if next(left) == 0:
            raise Killed

    return kill


@pytest.mark.parametrize("reset", ["{every: 2}", "{patience: 1, min_delta: 9}"])
def test_killed_at_any_step_it_ends_with_the_same_bits(small_run: Path, tmp_path: Path, reset: str) -> None:
    straight = flexmarl.train(settings(small_run, tmp_path, reset), show=False)
    events = list(straight.events())
    resets = [event for event in events if isinstance(event, ReferenceReset)]
    assert [one.step for one in resets] == ([2, 4] if "every" in reset else [1, 2, 3]), "witness: it was reset"
    drifts = {one.version: one.report["means"]["kl_to_reference"] for one in events if isinstance(one, Updated)}
    fresh = {1, *(one.version + 1 for one in resets if one.version < STEPS)}
    assert {version for version, drift in drifts.items() if drift == 0.0} == fresh
    for kind, number in ((ReferenceReset, 1), (ReferenceReset, 2), (CheckpointSaved, 2), (Updated, 3)):
        out = tmp_path / f"{kind.name}-{number}"
        with pytest.raises(FlexmarlError, match="raised Killed"):
            flexmarl.train(settings(small_run, out, reset), on={kind: kill_at(number)}, show=False)
        (folder,) = out.iterdir()
        resumed = flexmarl.train(folder / "config.yaml", resume=folder, show=False)
        for name in ("weights", "reference"):
            expected, found = (
                load_file(of / "checkpoints" / f"step-{STEPS:05d}" / "one" / f"{name}.safetensors")
                for of in (straight.folder, resumed.folder)
            )
            assert all(torch.equal(expected[key], found[key]) for key in expected)
