"""`flexmarl show` and `compare`: runs of every example, a run that fails in ten ways, and folders without a run."""

import json
import re
import shlex
import shutil
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flexmarl.assemble.blueprint import load_tokenizer
from flexmarl.assemble.commands import assemble_run
from flexmarl.cli import app
from flexmarl.config import load_run
from flexmarl.errors import ConfigError, FlexmarlError
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.store_file import read_store
from flexmarl.orchestrator.checkpoint import CheckpointFolder
from tests.docs.pages import commands
from tests.unit.analysis.test_conversations import unfolded

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    "math_team/cpu.yaml",
    "plan_path/cpu.yaml",
    "plan_path/shared.yaml",
    "plan_path/tree.yaml",
    "relay/cpu.yaml",
    "long_notes/cpu.yaml",
]
SMALL = [
    "cluster={backend: inline, device: cpu, threads: 1}",
    "steps=1",
    "batch={groups: 2, episodes: 2}",
    "evaluate={tasks: 2, temperature: 1.0}",
    "checkpoint.every=1",
]


def said(*arguments: object) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if found.exception is not None:
        raise found.exception
    return found.output


def trained(config: Path, out: Path, *overrides: str, console: Console | None = None) -> Path:
    run = assemble_run(load_run(config, [*SMALL, f"out={out}", *overrides]))
    run.train(console or Console(quiet=True))
    return run.folder


def check_ids(folder: Path) -> int:
    """The JSON of every episode, unfolded, has the store's ids, and its texts are those ids decoded. Returns turns."""
    settings = load_run(RunFolder(folder).config)
    tokenizers = {policy: load_tokenizer(settings, policy) for policy in settings.policies}
    with read_store(RunFolder(folder).store) as store:
        rows = {row.sample_id: row for agent in store.agents for row in store.rows(agent)}
    seen = 0
    for line in said("show", folder, "--json").splitlines():
        turns = {turn["hop"]: turn for turn in json.loads(line, parse_constant=pytest.fail)["turns"]}
        for hop, turn in turns.items():
            values = rows[turn["sample_id"]].values
            assert unfolded(turns, hop) == values["prompt_ids"].tolist()
            for piece in [*turn["prompt"], *([turn["reply"]] if turn["reply"] else [])]:
                if "ids" in piece:
                    assert piece["text"] == tokenizers[turn["policy"]].decode(
                        piece["ids"], clean_up_tokenization_spaces=False
                    )
            assert (turn["reply"]["ids"] if turn["reply"] else []) == list(values.get("response_ids", []))
            assert turn["reward"] == values.get("reward")
            assert turn["advantage"] == values.get("advantage")
            seen += 1
    assert seen == len(rows)
    return seen


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_turn_of_an_example_is_shown_as_it_was_played(example: str, tmp_path: Path) -> None:
    folder = trained(ROOT / "examples" / example, tmp_path)
    assert check_ids(folder)
    kept = RunFolder(folder).evaluations_of_steps()
    assert [path.name for path in kept] == ["step-0", "step-1"]
    assert all(check_ids(path) for path in kept)
    plain = said("show", folder, "--best", 1)
    assert plain.startswith("━━ episode g")
    assert "\x1b" not in plain


@pytest.fixture(scope="module")
def run(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(small_run, tmp_path_factory.mktemp("runs"))


def test_a_list_names_the_episodes_and_how_to_look_closer(run: Path) -> None:
    listed = said("show", run)
    assert "4 episodes: 4 finished" in listed
    assert f"flexmarl show {run} --episode g1e1a0" in listed
    (closer,) = [line for line in listed.splitlines() if "--best" in line]
    assert "━━ episode" in said(*shlex.split(closer)[1:])


def test_an_evaluation_is_chosen_by_when_number_or_name(run: Path) -> None:
    before, after = (RunFolder(run).evaluations / name for name in ("step-0", "step-1"))
    for which, path in {"before": before, "0": before, "after": after, "1": after, "step-1": after}.items():
        assert said("show", run, "--evaluation", which, "--json") == said("show", path, "--json")
    with pytest.raises(ConfigError, match="keeps no evaluation '7'; it keeps: step-0, step-1"):
        said("show", run, "--evaluation", "7")


def test_eval_keeps_what_it_played_in_the_folder_that_it_prints_last(
    run: Path, small_run: Path, tmp_path: Path
) -> None:
    kept = Path(said("eval", run, "evaluate.tasks=2").splitlines()[-1])
    assert kept.parent == RunFolder(run).evaluations
    assert check_ids(kept) == 2
    assert "2 episodes: 2 finished" in said("show", run, "--evaluation", kept.name)
    untrained = json.loads(said("eval", small_run, "--json", "evaluate.tasks=2", f"out={tmp_path}"))
    assert check_ids(Path(untrained["folder"])) == untrained["episodes"] == 2
    assert json.loads(said("eval", small_run, "--json", "evaluate.keep=0", "evaluate.tasks=1"))["folder"] is None


def test_eval_plays_the_checkpoint_that_is_chosen_and_names_it(small_run: Path, tmp_path: Path) -> None:
    best = ["evaluate.every=1", "evaluate.every_tasks=2", "evaluate.tasks=2", "checkpoint.best={}"]
    folder = trained(small_run, tmp_path, "steps=2", "checkpoint.every=1", *best)
    checkpoints = CheckpointFolder(RunFolder(folder).checkpoints)
    marked = checkpoints.best()
    assert marked is not None
    for options, step in {(): 2, ("--step", 1): 1, ("--best",): marked}.items():
        played, *_ = said("eval", folder, "evaluate.tasks=1", *options).splitlines()
        assert played == f"played: {checkpoints.of_step(step)}"
        found = json.loads(said("eval", folder, "evaluate.tasks=1", "--json", *options))
        assert (found["checkpoint"], found["versions"]["one"]) == (str(checkpoints.of_step(step)), step)
    for options, problem in {
        ("--step", 7): "no checkpoint of step 7 in .*; there are those of steps: 1, 2",
        ("--step", 1, "--best"): "--step and --best exclude each other",
    }.items():
        with pytest.raises(FlexmarlError, match=problem):
            said("eval", folder, *options)
    with pytest.raises(ConfigError, match="has no checkpoint to choose"):
        said("eval", small_run, "--best")


def test_only_the_first_and_the_newest_evaluations_stay(small_run: Path, tmp_path: Path) -> None:
    folder = trained(small_run, tmp_path, "steps=3", "evaluate.every=1", "evaluate.keep=2")
    assert [path.name for path in RunFolder(folder).evaluations_of_steps()] == ["step-0", "step-3"]


FAILING = """
import asyncio, sys, threading
from flexmarl.agents import workflow


class Environment:
    def step(self):
        raise LookupError("no such door")


def scorer(answer, reference):
    raise ArithmeticError("no score")


async def tool(argument):
    raise OSError("no network")


async def exception(task, team): raise ValueError("boom")
async def in_scorer(task, team): scorer("a", "b")
async def in_tool(task, team): await tool("a")
async def in_environment(task, team): Environment().step()
async def time_limit(task, team): await asyncio.sleep(600)
async def cancelled(task, team): raise asyncio.CancelledError
async def system_exit(task, team): sys.exit("enough")
async def too_long(task, team): await team.solver.act("7" * 500)
async def unpicklable(task, team): raise RuntimeError(threading.Lock())
async def invalid(task, team): team.solver.reward(float("nan"))


KINDS = [exception, in_scorer, in_tool, in_environment, time_limit, cancelled, system_exit, too_long, unpicklable]
KINDS += [invalid]


@workflow("failing")
async def failing(task, team):
    index = int(team.context.trajectory_id.split("e")[1].split("a")[0])
    reply = await team.solver.act(task.prompt)
    reply.reward(float(index))
    if index < len(KINDS):
        await KINDS[index](task, team)
"""
REASONS = ["boom", "no score", "no network", "no such door", "took longer than", "CancelledError", "enough"]
REASONS += ["engine.max_len", "lock", "nan"]
RAISED = ["ValueError(", "ArithmeticError(", "OSError(", "LookupError(", "sleep(600)", "raise asyncio", "sys.exit("]
RAISED += ['"7" * 500', "RuntimeError(", 'float("nan")']
"""Words of the line of FAILING at which each kind fails."""


def line_of(words: str) -> int:
    (number,) = (number for number, line in enumerate(FAILING.splitlines(), start=1) if words in line)
    return number


def test_each_of_ten_kinds_of_failure_is_found_from_the_line_of_its_step_with_two_commands(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "failing.py"
    code.write_text(FAILING, encoding="utf-8")
    words = [f"code=[tasks.py, {code}]", "team.workflow={type: custom, name: failing}", "evaluate.tasks=0"]
    words += ["batch={groups: 1, episodes: 12}", "rollout={inter_query: 1, intra_query: 12, episode_timeout_s: 5}"]
    screen = StringIO()
    folder = trained(small_run, tmp_path, *words, console=Console(file=screen, width=200))
    (step,) = re.findall(r"^step (\d+)/1 .*\| failed 10/12: ", screen.getvalue(), re.MULTILINE)
    places = [f"failing.py:{line_of(words)}" for words in RAISED]

    few = said("show", folder, "--step", step, "--failed")
    more = re.findall(r"^7 more episodes: use (--limit 10), or another filter$", few, re.MULTILINE)
    shown = said("show", folder, "--step", step, "--failed", *more[0].split())
    for reason, place in zip(REASONS, places, strict=True):
        assert re.search(rf"^.*{re.escape(reason)}.* \({re.escape(place)}\)$", shown, re.MULTILINE), (reason, place)
    assert f"first traceback of each kind of failure: {folder}/failures" in shown

    assert check_ids(folder) >= 12
    found = [json.loads(line) for line in said("show", folder, "--step", step, "--failed", "--json").splitlines()]
    assert [episode["episode"] for episode in found] == [f"g0e{index}a0" for index in range(10)]
    assert [episode["place"] for episode in found] == places
    for episode, reason in zip(found, REASONS, strict=True):
        assert reason in episode["reason"], episode["reason"]
    assert {episode["status"] for episode in found} == {"failed", "timed_out"}
    monkeypatch.setattr(import_module("flexmarl.cli.show").CONSOLE, "width", 200)
    listed = said("show", folder)
    assert "12 episodes: 9 failed, 2 finished, 1 timed_out" in listed
    assert all(f" {place}: " in listed for place in places)


def test_every_figure_of_two_runs_has_an_interval_and_equal_tasks_are_paired(run: Path, small_run: Path) -> None:
    other = trained(small_run, run.parent, "seed=4", "steps=2")
    compared: dict[str, Any] = json.loads(said("compare", run, other, "--json"))
    figures = {figure["name"]: figure for figure in compared["figures"]}
    assert figures["success, before"]["differences"][1]["how"] in ("t, paired over 2 tasks", "no spread in 2 tasks")
    assert figures["failed episodes"]["differences"][1]["how"] == "Newcombe, not paired"
    assert {
        "reward of solver, after - before",
        "seconds per step",
        "staleness of a token, in updates",
    } <= set(figures)
    for figure in figures.values():
        for found in (*figure["values"], *figure["differences"][1:]):
            assert found["low"] is None or found["low"] <= found["value"] <= found["high"]
    assert sum("reward of solver, after" in name for name in figures) == 2, "a row for the figure, one for its change"
    assert [found["value"] for found in figures["steps"]["values"]] == [1, 2]
    assert "steps" not in compared["settings"], "a resumed run may have done others than its first command was to do"
    assert compared["settings"]["seed"][1] == 4
    shown = said("compare", run, other)
    differing = shown.partition("settings differ")[2].splitlines()
    assert any(line.split()[:1] == ["seed"] for line in differing)
    assert "better" not in shown
    assert "95% interval" in shown


def test_runs_are_compared_whose_code_cannot_be_imported(run: Path, small_run: Path, tmp_path: Path) -> None:
    """Two copies of a team register the same names, and the code of an old run may be gone."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    written = (run / "config.yaml").read_text()
    (copy / "config.yaml").write_text(re.sub(r"^base: .*$", "base: /nowhere", written, flags=re.MULTILINE))
    compared: dict[str, Any] = json.loads(said("compare", run, copy, "--json"))
    assert compared["settings"] == {"base": [str(small_run.parent), "/nowhere"]}


def test_the_summary_has_intervals_of_the_figures_of_its_evaluations(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for when in ("before", "after"):
        assert summary["held_out"][when]["tasks"] == 2
        assert summary["eval"][when]
        for name, value in summary["eval"][when].items():
            assert summary["intervals"][name][when]["value"] == pytest.approx(value)


def test_a_folder_that_is_no_run_and_a_run_without_rows_are_errors_of_one_sentence(run: Path, tmp_path: Path) -> None:
    for command in (("show", tmp_path), ("compare", run, tmp_path)):
        with pytest.raises(ConfigError, match=r"is no run folder: it has no config\.yaml"):
            said(*command)
    with pytest.raises(ConfigError, match="compare takes two run folders or more, got 1"):
        said("compare", run)
    folder = RunFolder(tmp_path)
    folder.config.write_text(RunFolder(run).config.read_text())
    with pytest.raises(ConfigError, match=r"has no experience\.sqlite: its rows were kept in memory"):
        said("show", tmp_path)
    folder.journal.write_text('{"t":0.0,"event":"journal","format":1}\n')
    with pytest.raises(FlexmarlError, match="journal of format 1"):
        said("show", tmp_path)


def test_the_commands_of_the_page_run(run: Path, small_run: Path) -> None:
    other = trained(small_run, run.parent, "steps=2")
    for command in commands("docs/howto/show.md"):
        words = command.replace("runs/RUN", str(other)).replace("runs/OTHER", str(run)).split()
        if "--failed" not in words:
            assert said(*words[1:])
