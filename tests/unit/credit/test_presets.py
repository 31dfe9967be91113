"""Every preset that compares rows in groups: its options, the worked example, and what is its own (docs/math.md 5)."""

import pkgutil

import pytest
from pydantic import TypeAdapter

from flexmarl.credit import ESTIMATORS, AnyEstimator, CreditRow, CreditSettings
from flexmarl.credit.estimators.atgrpo import AtGrpo
from flexmarl.credit.estimators.c3 import C3
from flexmarl.credit.estimators.default import Default
from flexmarl.credit.estimators.dr_grpo import DrGrpo
from flexmarl.credit.estimators.drmas import DrMas
from flexmarl.credit.estimators.gpg import Gpg
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.grouped import Grouped
from flexmarl.credit.estimators.grpo import Grpo
from flexmarl.credit.estimators.grpo_trajectory import GrpoTrajectory
from flexmarl.credit.estimators.hierarchical import Hierarchical
from flexmarl.credit.estimators.max_rl import MaxRl
from flexmarl.credit.estimators.opo import Opo
from flexmarl.credit.estimators.pass_at_k import PassAtK
from flexmarl.credit.estimators.rllm import Rllm
from flexmarl.credit.estimators.rloo import Rloo
from flexmarl.credit.estimators.rloo_trajectory import RlooTrajectory
from flexmarl.testing.credit import check_estimator, credit_row

CLASSES = {
    name: estimator for name, path in ESTIMATORS.items() if issubclass(estimator := pkgutil.resolve_name(path), Grouped)
}
A, B, C = [1.0, 0.0, 0.0, 1.0], [0.5, 0.0], [0.7]


def advantages(estimator: Grouped, rows: list[CreditRow]) -> list[float]:
    credit = estimator.estimate(rows)
    return [credit.advantages[row.sample_id] for row in rows]


def scored(*rewards: float, task: str = "t0", lengths: tuple[int, ...] = ()) -> list[CreditRow]:
    tags = {"turn": 0, "context_hash": task, "branch": "", "path": "0"}
    return [
        credit_row(reward, task=task, episode=e, num_tokens=lengths[e] if lengths else 3, tags=tags)
        for e, reward in enumerate(rewards)
    ]


W1 = [
    *scored(*A, task="a", lengths=(2, 4, 3, 1)),
    *scored(*B, task="b", lengths=(2, 2)),
    *scored(*C, task="c", lengths=(2,)),
]


@pytest.mark.parametrize("name", CLASSES)
def test_an_estimator_is_chosen_by_its_type(name: str) -> None:
    assert TypeAdapter(AnyEstimator).validate_python({"type": name}) == CLASSES[name]()
    assert CreditSettings.model_validate({"estimator": {"type": name}, "filter": None}).filter is None


@pytest.mark.parametrize("name", CLASSES)
def test_every_preset_passes_the_conformance_check(name: str) -> None:
    check_estimator(CLASSES[name](singleton="zero") if name == "pass@k" else CLASSES[name]())


def test_presets_are_what_their_table_says() -> None:
    task, agent, turn = ("task",), ("task", "agent"), ("task", "agent", "turn")
    presets = {name: estimator() for name, estimator in CLASSES.items() if issubclass(estimator, GroupRelative)}
    options = {n: (e.key, e.unit, e.centre, e.scale, e.ddof, e.eps, e.singleton, e.needs) for n, e in presets.items()}
    assert options == {
        "default": (agent, "row", "mean", "none", 1, 1e-6, "zero", "group"),
        "grpo": (task, "row", "mean", "std", 1, 1e-6, "raw", "group"),
        "grpo_trajectory": (task, "trajectory_mean", "mean", "std", 1, 1e-6, "raw", "group"),
        "drmas": (agent, "row", "mean", "std", 1, 1e-6, "raw", "group"),
        "atgrpo": (turn, "row", "mean", "std", 1, 1e-6, "zero_unless_all", "batch"),
        "dr_grpo": (task, "row", "mean", "none", 1, 1e-6, "raw", "group"),
        "rllm": (agent, "row", "mean", "std", 0, 1e-6, "raw", "group"),
        "rloo": (task, "row", "leave_one_out", "none", 1, 1e-6, "raw", "group"),
        "rloo_trajectory": (task, "trajectory_first", "leave_one_out", "none", 1, 1e-6, "raw", "group"),
        "reinforce++_baseline": (task, "row", "mean", "none", 1, 1e-6, "raw", "batch"),
        "max_rl": (task, "row", "mean", "mean", 1, 1e-6, "zero", "group"),
        "opo": (task, "row", "length_weighted", "none", 1, 1e-6, "raw", "group"),
        "gpg": (task, "row", "mean", "none", 1, 1e-6, "raw", "batch"),
        "gdpo": (task, "row", "mean", "std", 1, 1e-6, "raw", "batch"),
        "hierarchical": ({"*": agent}, "row", "mean", "none", 1, 1e-6, "zero", "group"),
    }
    assert AtGrpo().require == ("one_task", "one_context")
    assert C3().require == ("one_task", "one_context")
    others = {name: (e().singleton, e().needs) for name, e in CLASSES.items() if not issubclass(e, GroupRelative)}
    assert {"pass@k": ("error", "group"), "c3": ("zero", "group")}.items() <= others.items()


STANDARDISED = [0.866024, -0.866024, -0.866024, 0.866024, 0.707105, -0.707105]
CENTRED = [0.5, -0.5, -0.5, 0.5, 0.25, -0.25]
LEFT_OUT = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.5, -0.5]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (Default(), [*CENTRED, 0.0]),
        (Grpo(), [*STANDARDISED, 0.6999993]),
        (GrpoTrajectory(), [*STANDARDISED, 0.6999993]),
        (DrMas(), [*STANDARDISED, 0.6999993]),
        (AtGrpo(), [*STANDARDISED, 0.0]),
        (AtGrpo(singleton="raw"), [*STANDARDISED, 0.6999993]),
        (DrGrpo(), [*CENTRED, 0.7]),
        (Rllm(), [0.999998, -0.999998, -0.999998, 0.999998, 0.999996, -0.999996, 0.6999993]),
        (Rloo(), [*LEFT_OUT, 0.7]),
        (Rloo(singleton="zero"), [*LEFT_OUT, 0.0]),
        (RlooTrajectory(), [*LEFT_OUT, 0.7]),
        (MaxRl(), [1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 0.0]),
        (Opo(), [0.7, -0.3, -0.3, 0.7, 0.25, -0.25, 0.7]),
        (Gpg(), [0.875, -0.875, -0.875, 0.875, 0.4375, -0.4375, 1.225]),
        (PassAtK(singleton="zero"), [0.0, 0.0, 0.0, 0.0, 1.414209, 0.0, 0.0]),
        (PassAtK(singleton="zero", scale="none"), [0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]),
        (Hierarchical(), [*CENTRED, 0.0]),
        (C3(key=("task",)), [*LEFT_OUT, 0.0]),
    ],
    ids=lambda value: value.type if isinstance(value, Grouped) else "",
)
def test_the_worked_example_comes_out_to_its_printed_digits(estimator: Grouped, expected: list[float]) -> None:
    assert advantages(estimator, W1) == pytest.approx(expected, abs=6e-7)
