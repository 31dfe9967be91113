"""Whole runs through the command line, in this process, with a tiny random model."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexmarl import cli
from flexmarl.experience.store_file import Ownership

DETERMINISTIC = ["deterministic=true", "cluster={backend: inline, threads: 1}"]


@pytest.fixture
def config(small_run: Path) -> Path:
    return small_run


@pytest.fixture
def flexmarl(config, tmp_path, monkeypatch, capsys):
    """Runs a command in a folder of its own; returns the lines of its standard output."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object, code: int = 0) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["flexmarl", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        said = capsys.readouterr()
        assert (stopped.value.code or 0) == code, said.err
        return (said.out if code == 0 else said.err).splitlines()

    return run


def weights(run: Path, step: int, policy: str = "one") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:05d}" / policy / "weights.safetensors")


def test_train_leaves_everything_in_the_folder_that_it_prints_last(flexmarl, config):
    folder = Path(flexmarl("train", config)[-1])
    settings = {"config.yaml"}
    as_it_happens = {"journal.jsonl", "experience.sqlite", "experience.sqlite.owner", "metrics.jsonl", "tensorboard"}
    at_the_end = {"evaluations", "checkpoints", "summary.json", "curve.png", "timeline.json"}
    assert {file.name for file in folder.iterdir()} == settings | as_it_happens | at_the_end
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["policies"] == {"one": {"version": 2}}
    assert {"before", "after"} <= summary["eval"].keys()
    before = load_file(config.parent / "model" / "model.safetensors")
    after = weights(folder, 2)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(flexmarl, config):
    """Law 6 at a step boundary."""
    straight = Path(flexmarl("train", config, *DETERMINISTIC, "steps=3")[-1])
    stopped = Path(flexmarl("train", config, *DETERMINISTIC, "steps=1")[-1])
    before = json.loads((stopped / "summary.json").read_text())["eval"]["before"]
    resumed = Path(flexmarl("train", stopped / "config.yaml", "steps=3", "--resume", stopped)[-1])
    assert resumed == stopped
    expected, found = weights(straight, 3), weights(resumed, 3)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    summary = json.loads((resumed / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["eval"]["before"] == before
    assert not torch.equal(*(weights(resumed, step)["model.norm.weight"] for step in (2, 3)))


def test_a_run_is_not_resumed_with_other_settings(flexmarl, config):
    folder = Path(flexmarl("train", config, "steps=1", "evaluate.tasks=0")[-1])
    (line,) = flexmarl("train", config, "seed=4", "--resume", folder, code=2)
    assert "settings: seed was 3, is 4; resume with" in line


def test_a_run_that_has_done_more_steps_than_are_asked_for_is_not_resumed(flexmarl, config):
    folder = Path(flexmarl("train", config, "steps=2", "evaluate.tasks=0", "checkpoint.every=2")[-1])
    lines = flexmarl("train", config, "steps=1", "evaluate.tasks=0", "checkpoint.every=2", "--resume", folder)
    assert lines[0] == "nothing to do: 2 steps are done, and steps=1"
    (folder / "summary.json").unlink()  # As of a run that was stopped.
    (line,) = flexmarl("train", config, "steps=1", "evaluate.tasks=0", "checkpoint.every=2", "--resume", folder, code=2)
    assert f"steps is 1, and {folder} has done 2: give at least 2" in line


def test_a_run_goes_on_whose_config_lacks_a_setting_that_came_later(flexmarl, config):
    folder = Path(flexmarl("train", config, "steps=1", "evaluate.tasks=0")[-1])
    written = folder / "config.yaml"
    older = {key: value for key, value in yaml.safe_load(written.read_text()).items() if key != "pipeline"}
    written.write_text(yaml.safe_dump(older))
    assert Path(flexmarl("train", config, "steps=1", "evaluate.tasks=0", "--resume", folder)[-1]) == folder


def test_a_run_whose_store_is_gone_goes_on_with_the_copy_in_its_checkpoint(flexmarl, config):
    settings = ("evaluate.tasks=0", "checkpoint.store=true", "checkpoint.keep=1")
    folder = Path(flexmarl("train", config, "steps=2", *settings)[-1])
    rows = flexmarl("store", folder, "SELECT sample_id, state FROM solver", "--csv")
    for left in folder.glob("experience.sqlite*"):
        left.unlink()
    lines = flexmarl("train", config, "steps=3", *settings, "--resume", folder)
    said = " ".join(" ".join(lines).split())
    assert f"{folder}/experience.sqlite was gone: the run goes on with its copy in step-00002" in said
    assert "are lost" not in said
    assert set(rows) <= set(flexmarl("store", folder, "SELECT sample_id, state FROM solver", "--csv"))


def test_a_run_without_its_checkpoints_begins_again_and_one_without_its_store_says_what_is_lost(flexmarl, config):
    folder = Path(flexmarl("train", config, "steps=1", "evaluate.tasks=0")[-1])
    for left in folder.glob("experience.sqlite*"):
        left.unlink()
    lines = flexmarl("train", config, "steps=2", "evaluate.tasks=0", "--resume", folder)
    said = " ".join(" ".join(lines).split())
    assert f"{folder}/experience.sqlite was gone: the turns before step 2 are lost to `flexmarl show`" in said
    shutil.rmtree(folder / "checkpoints")
    lines = flexmarl("train", config, "steps=2", "evaluate.tasks=0", "--resume", folder)
    assert lines[0] == "nothing to do: 2 steps are done, and steps=2"
    (folder / "summary.json").unlink()
    lines = flexmarl("train", config, "steps=2", "evaluate.tasks=0", "--resume", folder)
    assert lines[0] == "the run has no checkpoint: it begins again at step 0, in the same folder"
    assert not any("was gone" in line for line in lines)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2


def test_a_resumed_run_without_its_metrics_says_so_and_has_the_figures_before(flexmarl, config):
    folder = Path(flexmarl("train", config, "steps=1")[-1])
    before = json.loads((folder / "summary.json").read_text())
    (folder / "metrics.jsonl").unlink()
    said = " ".join(" ".join(flexmarl("train", folder / "config.yaml", "steps=2", "--resume", folder)).split())
    assert f"{folder}/metrics.jsonl was gone: the figures before step 2 are lost; the summary has those of" in said
    after = json.loads((folder / "summary.json").read_text())
    assert after["eval"]["before"] == before["eval"]["before"]
    assert after["agents"].keys() == before["agents"].keys()


def test_a_run_whose_best_checkpoint_is_no_improvement_says_so(flexmarl, config):
    best = ["checkpoint.best={metric: reward/solver, mode: max}", "evaluate={tasks: 4, every: 1, every_tasks: 4}"]
    lines = flexmarl("train", config, "steps=1", "policies.one.training.optimizer.learning_rate=1e-30", *best)
    pattern = r"checkpoint\.best: reward/solver (\S+) at step 1 .* and not above (\S+), before training"
    (said,) = re.findall(pattern, " ".join(lines))
    assert said[0] == said[1], "weights that hardly change play alike"


def test_a_run_that_is_in_use_is_not_continued_and_not_touched(flexmarl, config):
    folder = Path(flexmarl("train", config, "steps=1", "evaluate.tasks=0")[-1])
    (folder / "curve.png").unlink()
    owner = Ownership.of(folder / "experience.sqlite")
    (line,) = flexmarl("train", config, "steps=2", "evaluate.tasks=0", "--resume", folder, code=1)
    owner.give_up()
    assert f"experience.sqlite is in use by process {os.getpid()}" in line
    assert not (folder / "curve.png").exists()


def test_train_refuses_modelled_devices(flexmarl, config):
    (line,) = flexmarl("train", config, "cluster.backend=simulated", code=2)
    assert "cluster.backend is 'simulated', whose seconds are virtual; use `flexmarl simulate`" in line


def test_eval_plays_the_run_and_the_models_as_they_are(flexmarl, config):
    folder = Path(flexmarl("train", config)[-1])
    after = json.loads((folder / "summary.json").read_text())["eval"]["after"]
    trained = json.loads(flexmarl("eval", folder, "--json")[-1])
    assert trained["episodes"] == 4
    assert trained["failed"] == 0
    assert trained["metrics"]["success"] == pytest.approx(after["success"])
    lines = flexmarl("eval", config)
    assert any("held-out episodes, 0 failed" in line and "95% interval" in line for line in lines)
    (success,) = [line for line in lines if line.strip().startswith("success")]
    assert re.fullmatch(r" *success +\d\.\d{3} +\[\d\.\d{3}, \d\.\d{3}\] +4 *", success), success
    assert not any("95% interval" in line for line in flexmarl("eval", config, "evaluate.keep=0"))


def test_an_exported_policy_has_the_trainers_logits(flexmarl, config, tmp_path):
    folder = Path(flexmarl("train", config)[-1])
    (exported,) = flexmarl("export", folder, tmp_path / "out")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], return_tensors="pt", return_dict=False)
    trained = AutoModelForCausalLM.from_pretrained(config.parent / "model")
    trained.load_state_dict(weights(folder, 2), strict=False)
    with torch.no_grad():
        np.testing.assert_array_equal(model(ids).logits, trained(ids).logits)


@pytest.mark.parametrize(
    ("level", "overrides", "versions"),
    [
        ("L1: both share a policy", ["team.agents.writer={policy: one, sampling: {max_tokens: 8}}"], {"one": 1}),
        (
            "mixed: one is frozen",
            [
                "team.agents.writer={policy: judge, sampling: {max_tokens: 8}}",
                "policies.judge={model: model, trainable: false, engine: {type: embedded, max_len: 64}}",
            ],
            {"one": 1, "judge": 0},
        ),
    ],
)
def test_teams_of_other_levels_train(flexmarl, config, level, overrides, versions):
    folder = Path(flexmarl("train", config, "steps=1", *overrides)[-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["policies"] == {name: {"version": version} for name, version in versions.items()}, level


def test_an_untrained_team_is_evaluated_and_not_trained(flexmarl, config):
    """L0."""
    frozen = "policies.one.trainable=false"
    assert json.loads(flexmarl("eval", config, frozen, "--json")[-1])["episodes"] == 4
    (line,) = flexmarl("train", config, frozen, code=2)
    assert "use `flexmarl eval`" in line
    (kept,) = Path("runs").iterdir()
    assert kept.name.startswith("eval-"), "only what `eval` played is there"


def test_a_workflow_that_always_fails_ends_the_run_with_its_reason(flexmarl, config):
    broken = "team.workflow={type: iterative, solver: solver, verifier: writer}"
    team = "team.agents.writer={policy: one, sampling: {max_tokens: 64, stop: [' ']}, parser: json}"
    lines = flexmarl("train", config, broken, team, "policies.one.engine.max_len=8", "evaluate.tasks=0", code=1)
    assert "There is no checkpoint yet" in lines[0]
    assert "none of its 4 groups had a finished episode" in lines[-1]


def test_a_workflow_that_cancels_all_tasks_of_the_loop_ends_the_command_in_words(flexmarl, config, tmp_path):
    code = (
        "import asyncio\nfrom flexmarl.agents import workflow\n"
        "@workflow('cancels_all')\n"
        "async def cancel_all(task, team):\n    [one.cancel() for one in asyncio.all_tasks()]\n"
    )
    (tmp_path / "cancel.py").write_text(code)
    files = f"code=[tasks.py, {tmp_path / 'cancel.py'}]"
    for command in ("train", "eval"):
        said = flexmarl(command, config, files, "team.workflow={type: custom, name: cancels_all}", code=1)
        assert "asyncio.all_tasks()" in said[-1]
        assert not any("Traceback" in line for line in said)
