"""`flexmarl simulate` of teams with tools: what it lacks is said at once, and a fit of a real run has its tools."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from flexmarl.cli import app
from flexmarl.config import load_run
from flexmarl.errors import ConfigError

CODE = '''
import time
from typing import Literal

from flexmarl.agents import workflow
from flexmarl.tools import SyntaxBase, ToolCall, syntax, tool


@workflow("searching")
async def searching(task, team):
    """Paid by the number of hits; a result without one fails the episodes of long replies."""
    reply = await team.solver.act(task.prompt)
    found = [use.result for use in reply.calls]
    hits = 0
    if found and (found[0] != "none" or len(reply.calls[0].argument) > 4):
        hits = int(found[0].split()[0])
    reply.reward(hits % 3)
    team.report(success=float(hits % 3 > 0))


@syntax
class EveryMessage(SyntaxBase):
    """Every message is a call, so that a random model calls tools."""

    type: Literal["every_message"] = "every_message"
    tool: str

    def parse(self, text):
        return (ToolCall(self.tool, {"query": text}),) if text else ()

    def render(self, *calls):
        return calls[0].arguments["query"]


@tool
def slow_search(query: str) -> str:
    """Searches."""
    time.sleep(0.05)
    return f"{len(query)} hits"


@tool(pure=True)
def length_of(query: str) -> str:
    """Counts characters."""
    return f"{len(query)}"


@tool
def never_called(query: str) -> str:
    """Searches elsewhere."""
    return "nothing"
'''


def run(*words: str | Path) -> str:
    """What a command prints; raises what it raises."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def with_tools(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("with_tools")
    (folder / "search.py").write_text(CODE, encoding="utf-8")
    solver = {
        "tools": [{"type": "slow_search"}],
        "syntax": {"type": "every_message", "tool": "slow_search"},
        "tell_tools": "none",
        "max_tool_calls": 1,
        "sampling": {"max_tokens": 6},
    }
    settings = {
        "extends": [str(small_run)],
        "code": [str(small_run.parent / "tasks.py"), str(folder / "search.py")],
        "policies": {"one": {"model": str(small_run.parent / "model")}},
        "team": {"agents": {"solver": solver}},
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 0},
        "out": str(folder / "runs"),
    }
    config = folder / "search.yaml"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return config


def trained(config: Path, *words: str) -> Path:
    return Path(run("train", config, *words).splitlines()[-1])


def rewards_of(folder: Path) -> dict[str, float]:
    """The mean reward of each group that was compared."""
    events = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    credited = [event for event in events if event["event"] == "credited"]
    return {str(event["groups"]): event["parts"]["solver"]["means"]["outcome"] for event in credited}


def test_a_fit_has_the_latency_of_the_recorded_calls_and_is_compared(with_tools: Path) -> None:
    folder = trained(with_tools)
    text = run("simulate", "--fit", folder)
    assert "recorded" in text
    assert "simulated" in text
    twin = yaml.safe_load((folder / "fitted.yaml").read_text())["simulation"]["tools"]["slow_search"]
    assert twin["result"].endswith("hits")
    assert 0.05 <= twin["latency_s"]["floor"] <= twin["latency_s"]["mean"] <= twin["latency_s"]["cap"]
    extending = with_tools.with_name("again.yaml")
    extending.write_text(yaml.safe_dump({"extends": [str(with_tools), str(folder / "fitted.yaml")]}))
    assert "step 1 of 1 ended" in run("simulate", extending, "steps=1")


def test_a_tool_that_was_never_called_is_named_and_the_fit_is_written(with_tools: Path) -> None:
    tools = "team.agents.solver.tools=[{type: slow_search}, {type: never_called}]"
    folder = trained(with_tools, tools, "steps=1")
    text = run("simulate", "--fit", folder)
    assert f"written to {folder / 'fitted.yaml'}" in text
    assert "cannot be replayed to compare: simulation.tools.never_called is missing" in text
    assert [*yaml.safe_load((folder / "fitted.yaml").read_text())["simulation"]["tools"]] == ["slow_search"]
    given = "simulation.tools.never_called={latency_s: 0.25, result: nothing}"
    assert "simulated" in run("simulate", "--fit", folder, given)
    tools = yaml.safe_load((folder / "fitted.yaml").read_text())["simulation"]["tools"]
    assert [*tools] == ["slow_search", "never_called"]
    assert tools["never_called"]["result"] == "nothing"


def test_a_tool_that_is_called_for_real_takes_the_recorded_time_and_earns_the_recorded_rewards(
    with_tools: Path,
) -> None:
    own = "simulation.tools.slow_search={latency_s: 7.0, result: real}"
    folder = trained(with_tools, own, "team.workflow.name=searching")
    text = run("simulate", "--fit", folder)
    twin = yaml.safe_load((folder / "fitted.yaml").read_text())["simulation"]["tools"]["slow_search"]
    assert twin["result"] == "real"
    assert 0.05 <= twin["latency_s"]["mean"] < 7.0, "that of the record"
    simulation = Path(text.splitlines()[-1].removeprefix("simulation: "))
    assert rewards_of(simulation) == rewards_of(folder) != {}
    assert "episodes failed" not in text
    given = run("simulate", "--fit", folder, "simulation.tools.slow_search.latency_s=9")
    assert "9" in next(line for line in given.splitlines() if "tools.slow_search.latency_s.mean" in line).split()[-1:]


def test_failed_episodes_of_a_simulation_are_counted_in_a_caution(with_tools: Path) -> None:
    fixed = "simulation={replies: {solver: {type: lengths, mean: 4}}, tools: {slow_search: {result: none}}}"
    text = run("simulate", with_tools, fixed, "team.workflow.name=searching", "steps=1")
    assert re.search(
        r"caution: \d+ episodes failed, which cost less time: ValueError: .*'none' \(search.py:\d+\)", text
    )


PURE = [
    "team.agents.solver.tools=[{type: length_of}]",
    "team.agents.solver.syntax={type: every_message, tool: length_of}",
]


def test_a_run_whose_tool_only_computes_is_fitted_and_compared_without_a_twin(with_tools: Path) -> None:
    folder = trained(with_tools, *PURE)
    assert "simulated" in run("simulate", "--fit", folder)
    assert yaml.safe_load((folder / "fitted.yaml").read_text())["simulation"]["tools"] == {}


def test_all_that_a_simulation_lacks_is_one_error_whose_yaml_is_valid(with_tools: Path) -> None:
    lacking = ["simulation={tools: {slow_search: {latency_s: 0.25}, serach: {result: x}}}", "steps=1"]
    for command in ("simulate", "check"):
        with pytest.raises(ConfigError) as refused:
            run(command, with_tools, "cluster.backend=simulated", *lacking)
        head, _, block = str(refused.value).partition("This is valid under `simulation:`")
        found = [line.partition("simulation.")[2].split()[0] for line in head.splitlines()]
        assert found == ["replies.solver", "tools.serach:", "tools.slow_search.result"]
        pasted = yaml.safe_load(block.partition("\n")[2])
        assert pasted["tools"] == {"slow_search": {"latency_s": {"mean": 0.25}, "result": "done"}}
        valid = with_tools.with_name("valid.yaml")
        valid.write_text(yaml.safe_dump({"extends": [str(with_tools)], "simulation": pasted}))
        assert load_run(valid).simulation.tools["slow_search"].latency_s.mean == 0.25
        run(command, valid, "cluster.backend=simulated", "steps=1")
