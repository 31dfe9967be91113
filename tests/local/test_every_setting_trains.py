"""Every loss, correction and further option of training on a real, tiny model: one update each, through whole runs."""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.training.corrections import CorrectionSettings
from flexmarl.training.losses import LOSSES

CORRECTIONS = [kind.model_fields["type"].default for kind in get_args(get_args(CorrectionSettings)[0])]
OPTIONS: dict[str, tuple[dict[str, Any], list[str], set[str]]] = {
    "kl in the loss": ({"kl": {"type": "k3+"}}, [], {"train/one/kl_to_reference"}),
    "kl in the reward": (
        {"kl": {"where": "reward", "type": "k1", "target": 0.1, "horizon": 10}},
        ["credit.estimator.type=reinforce++"],
        {"train/one/kl_to_reference", "train/one/kl_coef"},
    ),
    "entropy": ({"entropy_coef": 0.01}, [], {"train/one/entropy"}),
    "critic": ({"critic": {}}, ["credit.estimator.type=gae"], {"train/one/value_loss"}),
    "critic, kl in the reward, lora, tree": (
        {"critic": {}, "kl": {"where": "reward"}, "lora": {"rank": 2}, "tree": "on"},
        ["credit.estimator.type=step_gae"],
        {"train/one/value_loss", "train/one/kl_coef", "train/one/tree_token_ratio"},
    ),
    "critic, kl and entropy in the loss, tree": (
        {"critic": {}, "kl": {}, "entropy_coef": 0.01, "tree": "on"},
        ["credit.estimator.type=gae"],
        {"train/one/value_loss", "train/one/kl_to_reference", "train/one/tree_token_ratio"},
    ),
    "lora": ({"lora": {"rank": 2}, "tree": "off"}, [], set()),
    "tree: auto": ({"tree": "auto"}, [], set()),
    "tree: on": ({"tree": "on"}, [], {"train/one/tree_token_ratio", "train/one/tokens_saved"}),
    "streaming": ({"tree": "off", "micro_batch": 3}, ["credit.streaming=linear"], set()),
    "streaming, lora, tree": (
        {"lora": {"rank": 2}, "tree": "on", "micro_batch": 3},
        ["credit.streaming=linear", "credit.filter.refill=true"],
        {"refill/generated"},
    ),
    "refill": ({}, ["credit.filter.refill=true"], {"refill/generated"}),
    "remax": ({}, ["credit.estimator.type=remax", "credit.filter=null"], set()),
    "composite reward": (
        {},
        ["credit.shaping=[{type: process}, {type: completion_time, success: 0.125}, {type: reward_to_go}]"],
        {f"reward_part/solver/{part}" for part in ("outcome", "process", "completion_time", "reward_to_go")},
    ),
}
"""Settings of training, other settings, and figures that must be there."""


def trained(
    small_run: Path, folder: Path, training: dict[str, Any], *overrides: str, steps: int = 1
) -> Mapping[str, float]:
    """The last figures of a run whose groups share a prompt."""
    options = [f"policies.one.training.{name}={json.dumps(value)}" for name, value in training.items()]
    small = [
        f"steps={steps}",
        "batch={groups: 2, episodes: 3}",
        "evaluate.tasks=0",
        "checkpoint.every=0",
        f"out={folder}",
    ]
    run = assemble_run(load_run(small_run, [*small, *options, *overrides]))
    run.train(Console(quiet=True))
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    figures = {name: value for line in lines for name, value in line.items() if isinstance(value, int | float)}
    assert figures["version/one"] == steps
    assert figures["train/one/grad_norm"] > 0
    assert all(isfinite(value) for value in figures.values())
    return figures


@pytest.mark.parametrize("kind", LOSSES.built_in)
def test_every_loss_trains(kind: str, small_run: Path, tmp_path: Path) -> None:
    trained(small_run, tmp_path, {"loss": {"type": kind}})


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_every_correction_trains_on_what_older_versions_sampled(kind: str, small_run: Path, tmp_path: Path) -> None:
    options = {"correction": {"type": kind}, "micro_batch": 2}
    figures = trained(small_run, tmp_path, options, "mode=one_step_off", steps=2)
    assert figures["staleness/one/max"] == 1
    if kind != "none":
        assert figures["train/one/correction_weight"] > 0


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_and_is_measured(option: str, small_run: Path, tmp_path: Path) -> None:
    training, others, measured = OPTIONS[option]
    assert measured <= trained(small_run, tmp_path, training, *others).keys()
