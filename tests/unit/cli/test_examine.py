"""What `check` looks at in which world."""

import sys
from pathlib import Path

import pytest

from flexmarl import cli
from flexmarl.cli.examine import examine
from flexmarl.config import load_run

UNCORRECTED = ["policies.one.training.correction={type: none}"]
SHORT = ["policies.one.engine.max_len=64", "team.agents.solver.sampling.max_tokens=64", "checkpoint.every=0"]


def looked_at(config: Path, *overrides: str) -> set[str]:
    findings, problems = examine(load_run(config, [*SHORT, *overrides]))
    assert problems == []
    return {finding.subject for finding in findings}


def test_what_simulated_devices_do_not_have_is_not_looked_at(small_run: Path) -> None:
    of_devices = {"checkpoint.every", "team.agents.solver.sampling.max_tokens"}
    assert of_devices <= looked_at(small_run)
    assert not of_devices & looked_at(small_run, "cluster.backend=simulated")


def test_what_is_allowed_and_has_a_price_is_to_do(small_run: Path) -> None:
    findings, problems = examine(load_run(small_run, ["mode=async", *UNCORRECTED]))
    assert problems == []
    (priced,) = [finding for finding in findings if finding.subject == "policies.one.training.correction"]
    assert priced.found.startswith("type none in mode 'async'")
    assert priced.todo == "use type: tis"
    assert "policies.one.training.correction" not in looked_at(small_run, "mode=async")


def test_train_says_what_has_a_price_before_it_begins(small_run: Path, monkeypatch, capsys) -> None:
    warm = ["team.agents.solver.sampling.temperature=0.7", "cluster.backend=simulated"]  # which ends it at once
    monkeypatch.setattr(sys, "argv", ["flexmarl", "train", str(small_run), *warm])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        "flexmarl: caution: team.agents.solver.sampling: temperature 0.7, but the loss takes log-"
    )
