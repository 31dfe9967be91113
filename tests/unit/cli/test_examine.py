"""What `check` looks at in which world."""

from pathlib import Path

from flexmarl.cli.examine import examine
from flexmarl.config import load_run

SHORT = ["policies.one.engine.max_len=64", "team.agents.solver.sampling.max_tokens=64", "checkpoint.every=0"]


def looked_at(config: Path, *overrides: str) -> set[str]:
    findings, problems = examine(load_run(config, [*SHORT, *overrides]))
    assert problems == []
    return {finding.subject for finding in findings}


def test_what_simulated_devices_do_not_have_is_not_looked_at(small_run: Path) -> None:
    of_devices = {"checkpoint.every", "team.agents.solver.sampling.max_tokens"}
    assert of_devices <= looked_at(small_run)
    assert not of_devices & looked_at(small_run, "cluster.backend=simulated")
