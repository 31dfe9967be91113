"""Whole runs in the ray world: the same as inline, everything left behind that should be, and nothing else."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flexmarl import cli
from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from tests.ray.child_run import Left, assert_same

pytestmark = pytest.mark.ray

STEPS = 3
OVERRIDES = [
    *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", "batch={groups: 4, episodes: 4}"),
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 12}}",
    "policies.two={model: model, engine: {type: embedded, slots: 16, max_len: 64}, "
    "training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
]


@pytest.fixture(scope="module")
def played(small_run: Path, tmp_path_factory: pytest.TempPathFactory):
    """Trains in this process, once in each world; nothing outlives that, and what the run left on disk is returned."""

    @cache
    def play(backend: str) -> Left:
        out = tmp_path_factory.mktemp(backend)
        run = assemble_run(load_run(small_run, [*OVERRIDES, f"cluster.backend={backend}", f"out={out}"]))
        with nothing_outlives():
            run.train(Console(quiet=True))
        return Left(run.folder)

    return play


@contextmanager
def nothing_outlives() -> Iterator[None]:
    """Whatever the block starts has ended with it."""
    before = psutil.Process().children(recursive=True)
    yield
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def test_both_worlds_consume_the_same_and_end_with_the_same_bits(played):
    inline, ray = played("inline"), played("ray")
    assert {row[5] for row in ray.consumed()} <= {"trained", "filtered"}
    assert len(ray.consumed()) == STEPS * 16 * 2
    assert_same(inline, ray, steps=STEPS)
    begin, end = ray.weights(STEPS - 1), ray.weights(STEPS)
    assert any(not torch.equal(begin[name], end[name]) for name in begin), "witness: it was trained"


def test_a_run_tells_its_processes_and_what_each_did(played):
    run = played("ray")
    names = {"controller", "engine/one/0", "engine/two/0", "trainer/one", "trainer/two"}
    summary = run.summary
    assert summary["processes"].keys() == names
    assert len({process["pid"] for process in summary["processes"].values()}) == len(names)
    assert 0 <= summary["training_hidden"] <= 1
    assert summary["processes_lost"] == 0
    trace = json.loads(Path(summary["timeline"]).read_text())["traceEvents"]
    rows = {one["pid"]: one["args"]["name"].split()[0] for one in trace if one["name"] == "process_name"}
    assert {rows[one["pid"]] for one in trace if one["ph"] == "X"} == names


def test_eval_plays_the_newest_checkpoint_in_the_ray_world(played):
    run = played("ray")
    with nothing_outlives():
        result = CliRunner().invoke(cli.app, ["eval", str(run.path), "--json"], catch_exceptions=False)
    evaluation = json.loads(result.stdout.splitlines()[-1])
    assert evaluation["metrics"]["success"] == pytest.approx(run.summary["eval"]["after"]["success"])


@pytest.mark.deep
def test_export_writes_the_newest_weights_in_the_ray_world(played, tmp_path: Path):
    run = played("ray")
    with nothing_outlives():
        CliRunner().invoke(cli.app, ["export", str(run.path), str(tmp_path)], catch_exceptions=False)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    trained = {name: weights for name, weights in run.weights(STEPS).items() if name.startswith("one/")}
    assert trained, "witness: the policy has weights"
    for name, weights in trained.items():
        assert torch.equal(exported[name.removeprefix("one/")], weights)
