"""Our presets give what the functions of Dr.MAS, verl and PettingLLMs gave on the same batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.credit.estimators.default import Default
from flexmarl.credit.estimators.dr_grpo import DrGrpo
from flexmarl.credit.estimators.drmas import DrMas
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.grpo import Grpo
from flexmarl.testing.credit import credit_row

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
KEYS = {"uid": ("task",), "agent": ("task", "agent"), "agent_turn": ("task", "agent", "turn")}
TOLERANCE = 5e-6


def golden(name: str) -> dict[str, Any]:
    with np.load(GOLDEN / f"{name}_seed0.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def batch_rows():
    batch, rows, hops = golden("batch"), [], {}
    for i, episode in enumerate(batch["traj"]):
        hop = hops[episode] = hops.get(episode, -1) + 1
        rows.append(
            credit_row(
                # float32 in the file: 0.9 is 0.89999998, as the other projects saw it.
                float((batch["tlr"][i] * batch["mask"][i]).sum()),
                task=str(batch["uid"][i]),
                episode=int(str(episode).rpartition("r")[2]),
                hop=hop,
                agent=str(batch["agent"][i]),
                num_tokens=int(batch["mask"][i].sum()),
                tags={"turn": int(batch["turn"][i])},
            )
        )
    return batch, rows


def cases() -> list[tuple[str, str, GroupRelative]]:
    found: list[tuple[str, str, GroupRelative]] = [
        ("verl", "grpo_vec__agent", DrMas()),
        ("verl", "grpo__agent__stdTrue", DrMas()),
        ("verl", "grpo__uid__stdTrue", Grpo()),
        ("verl", "grpo__uid__stdFalse", DrGrpo()),
        ("drmas", "grpo__agent__stdTrue", DrMas()),
        ("drmas", "grpo__agent__stdFalse", DrGrpo(key=("task", "agent"))),
        ("drmas", "grpo__uid__stdTrue", Grpo(unit="trajectory_mean")),
        ("drmas", "grpo__uid__stdFalse", DrGrpo(unit="trajectory_mean")),
        ("pettingllms", "grpo__agent__stdTrue", DrMas(singleton="zero")),
        ("pettingllms", "grpo__agent__stdFalse", Default()),
    ]
    for name, key in KEYS.items():
        found += [
            ("verl", f"grpo__{name}__stdTrue", Grpo(key=key)),
            ("verl", f"grpo__{name}__stdFalse", DrGrpo(key=key)),
            ("pettingllms", f"grpo__{name}__stdTrue", Grpo(key=key, singleton="zero_unless_all")),
            ("pettingllms", f"grpo__{name}__stdFalse", DrGrpo(key=key, singleton="zero_unless_all")),
        ]
    return found


@pytest.mark.parametrize(("project", "array", "estimator"), cases())
def test_the_golden_arrays_are_reproduced(project: str, array: str, estimator: GroupRelative) -> None:
    batch, rows = batch_rows()
    advantages = estimator.estimate(rows).advantages
    ours = np.array([advantages[row.sample_id] for row in rows])[:, None] * batch["mask"]
    np.testing.assert_allclose(ours, golden(project)[array], rtol=0, atol=TOLERANCE)


def test_every_grpo_array_of_the_golden_files_is_compared() -> None:
    compared = {(project, array) for project, array, _ in cases()}
    there = {(p, array) for p in ("drmas", "verl", "pettingllms") for array in golden(p) if array.startswith("grpo")}
    assert compared == there
