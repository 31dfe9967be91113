"""The page of metrics names every metric of real runs, and no other."""

import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.assemble.simulation import simulate
from flexmarl.config import load_run
from flexmarl.events.metrics import read_metrics
from tests import program_of_a_run
from tests.docs.pages import prose

PAGE = "docs/howto/metrics.md"
SMALL = ("batch={groups: 2, episodes: 3}", "evaluate.tasks=2", "checkpoint.every=1")
CHANGES = {
    "team.report(": "team.report(**{'agent/solver/letters': len(reply.text), 'digits/all': 1}, ",
    '"sums"': '"sums_measured"',
    "name: sums}": "name: sums_measured}",
    "echo": "echo_measured",
    '"talk"': '"talk_measured"',
}
"""The small run reports more. Its functions have names of their own, since another file has registered the others."""
ODD_SYNTAX = """
from typing import Literal

from flexmarl.tools import Malformed, SyntaxBase, syntax


@syntax
class OddSyntax(SyntaxBase):
    type: Literal["odd_metrics"] = "odd_metrics"

    def parse(self, text):
        return (Malformed("?"),) if text else ()

    def render(self, *calls):
        return "?"
"""
"""Takes any text for a call that cannot be read: a random model writes no better one."""


NAMES = re.findall(r'@(?:program|judge)\("(\w+)"\)', program_of_a_run.PROGRAM)
"""What the program of a run registers."""


def measured(text: str) -> str:
    """The text with names of this file's own for what it registers."""
    return re.sub(rf"\b({'|'.join(NAMES)})\b", r"measured_\1", text)


RUNS = {
    "refilled, with a critic and a KL reward": (
        "credit.filter.refill=true",
        "credit.estimator.type=gae",
        "policies.one.training.critic={}",
        "policies.one.training.kl={where: reward, type: k1, target: 0.1, horizon: 10}",
    ),
    "one step off, corrected": (
        "mode=one_step_off",
        "policies.one.training.micro_batch=2",
        "policies.one.training.correction={type: tis, veto: 1e-4}",
    ),
    "all groups filtered": ("credit.filter.tol=10",),
    "a policy that rests": ("policies.one.training.phases=[{steps: 1, train: false}, {steps: 1}]",),
    "calls that cannot be read, and more of them than the budget has": (
        "code=[tasks.py, odd_syntax.py]",
        "team.agents.solver.tools=[{type: calculator}]",
        "team.agents.solver.syntax={type: odd_metrics}",
        "team.agents.solver.tell_tools=none",
        "team.agents.solver.max_tool_calls=1",
    ),
    "a program at the gateway": tuple(map(measured, program_of_a_run.OVERRIDES)),
}
"""Runs whose metrics, taken together, are all that there are."""
SIMULATED = (
    "cluster.backend=simulated",
    "credit.filter=null",
    "simulation.replies={default: {type: lengths, mean: 4}}",
)
"""Only a run with separate devices for engines and trainers says how much training was hidden."""
STOPPING = (
    "mode=async",
    "rollout={inter_query: 1, intra_query: 1}",
    "simulation.costs={default: {trainer: {update_s: 0, publish_s: 0, sample_s: 0, resume_s: 0, suspend_s: 0}}}",
)
"""Groups still play when the last step is done."""


@pytest.fixture(scope="module")
def written(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Names of all metrics of the runs."""
    folder = tmp_path_factory.mktemp("metrics") / "team"
    shutil.copytree(small_run.parent, folder)
    (folder / "odd_syntax.py").write_text(ODD_SYNTAX)
    (folder / "program.py").write_text(measured(program_of_a_run.PROGRAM))
    for file in (folder / "tasks.py", folder / small_run.name):
        text = file.read_text()
        for old, new in CHANGES.items():
            text = text.replace(old, new)
        file.write_text(text)
    names: set[str] = set()
    for overrides in RUNS.values():
        run = assemble_run(load_run(folder / small_run.name, [*SMALL, *overrides, f"out={folder / 'runs'}"]))
        run.train(Console(quiet=True))
        names.update(*read_metrics(run.folder / "metrics.jsonl").values())
    for overrides in ((), STOPPING):
        words = [*SMALL, *SIMULATED, *overrides, f"out={folder / 'runs'}"]
        simulated = simulate(load_run(folder / small_run.name, words))
        names.update(*read_metrics(simulated / "metrics.jsonl").values())
    return frozenset(names)


def test_every_metric_has_its_row_and_no_row_is_stale(written: frozenset[str]) -> None:
    rows = re.findall(r"^\| `([\w/{}]+)` \|", prose(PAGE), re.M)
    assert len(rows) == len(set(rows))
    used: set[str] = set()
    for name in written:
        fitting = [row for row in rows if _fits(row, name)]
        assert fitting, f"{PAGE} has no row for {name}"
        used.add(min(fitting, key=lambda row: row.count("{")))
    assert used == {*rows}, f"no run writes {sorted({*rows} - used)}"


def test_every_row_says_unit_value_meaning_and_direction() -> None:
    lines = [line for line in prose(PAGE).splitlines() if line.startswith("| `")]
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 5, line
        assert all(cells), line
        assert cells[2] in ("mean", "sum", "newest"), line


def _fits(row: str, name: str) -> bool:
    """True if the name is one of the row's: a placeholder is one part, `{metric}` one or more."""
    parts = re.split(r"(\{\w+\})", row)
    one = {"{metric}": ".+"}
    pattern = "".join(one.get(part, "[^/]+") if part.startswith("{") else re.escape(part) for part in parts)
    return re.fullmatch(pattern, name) is not None
