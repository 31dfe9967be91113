"""Our presets give what the functions of Dr.MAS, verl and PettingLLMs gave on the same batch.

CASES has one entry per array that a comparison in groups gives; arrays per token are in test_golden_tokens.py, losses
and divergences in tests/unit/training.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexmarl.credit.estimators.base import Grouped
from flexmarl.credit.estimators.presets import (
    AtGrpo,
    Default,
    DrGrpo,
    DrMas,
    Grpo,
    GrpoTrajectory,
    ReinforcePPBaseline,
    Rloo,
    RlooTrajectory,
)
from flexmarl.testing.credit import credit_row

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
KEYS = {"uid": ("task",), "agent": ("task", "agent"), "agent_turn": ("task", "agent", "turn")}
TOLERANCE = 5e-6
# The batch was played flat: later turns of its groups differ in their prompts, and nobody looked.
FLAT = {"require": ("one_task",)}


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
                turn=int(batch["turn"][i]),
            )
        )
    return batch, rows


def cases() -> dict[tuple[str, str], Grouped]:
    """The estimator of each (project, array)."""
    found: dict[tuple[str, str], Grouped] = {
        ("verl", "grpo_vec__agent"): DrMas(),
        ("drmas", "grpo__uid__stdTrue"): GrpoTrajectory(),
        ("drmas", "grpo__uid__stdFalse"): GrpoTrajectory(scale="none"),
        ("drmas", "grpo__agent__stdTrue"): DrMas(),
        ("drmas", "grpo__agent__stdFalse"): DrGrpo(key=KEYS["agent"]),
        ("drmas", "rloo__uid"): RlooTrajectory(),
        ("drmas", "rloo__agent"): Rloo(key=KEYS["agent"]),
        ("drmas", "rfpp_base__uid"): ReinforcePPBaseline(unit="trajectory_first", whiten="batch"),
        ("drmas", "rfpp_base__agent"): ReinforcePPBaseline(key=KEYS["agent"], whiten="batch"),
        ("verl", "grpo__uid__stdTrue"): Grpo(),
        ("verl", "grpo__agent__stdTrue"): DrMas(),
        ("verl", "grpo__agent_turn__stdTrue"): AtGrpo(singleton="raw", **FLAT),
        ("pettingllms", "grpo__uid__stdTrue"): Grpo(singleton="zero_unless_all"),
        ("pettingllms", "grpo__agent__stdTrue"): DrMas(singleton="zero"),
        ("pettingllms", "grpo__agent__stdFalse"): Default(),
        ("pettingllms", "grpo__agent_turn__stdTrue"): AtGrpo(**FLAT),
        ("pettingllms", "grpo__uid__stdFalse"): DrGrpo(singleton="zero_unless_all"),
        ("pettingllms", "grpo__agent_turn__stdFalse"): AtGrpo(scale="none", **FLAT),
    }
    for name, key in KEYS.items():
        found["verl", f"grpo__{name}__stdFalse"] = DrGrpo(key=key)
        for project in ("verl", "pettingllms"):
            found[project, f"rloo__{name}"] = Rloo(key=key)
            found[project, f"rfpp_base__{name}"] = ReinforcePPBaseline(key=key, whiten="batch")
    return found


CASES = cases()


@pytest.mark.parametrize(("project", "array"), CASES)
def test_the_golden_arrays_are_reproduced(project: str, array: str) -> None:
    batch, rows = batch_rows()
    advantages = CASES[project, array].estimate(rows).advantages
    ours = np.array([advantages[row.sample_id] for row in rows])[:, None] * batch["mask"]
    np.testing.assert_allclose(ours, golden(project)[array], rtol=0, atol=TOLERANCE)


def test_every_array_of_a_comparison_in_groups_is_compared() -> None:
    arrays = {(project, array) for project in ("drmas", "verl", "pettingllms") for array in golden(project)}
    assert set(CASES) == {(p, array) for p, array in arrays if array.startswith(("grpo", "rloo", "rfpp_base"))}
    elsewhere = {array for p, array in arrays if (p, array) not in CASES}
    per_token = {name for name in elsewhere if name.startswith(("gae", "gigpo")) or name == "rfpp"}
    assert all(name.startswith(("loss__", "kl__")) for name in elsewhere - per_token)
