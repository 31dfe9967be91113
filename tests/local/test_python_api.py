"""The Python interface: whole runs in this process, with a tiny random model."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import flexmarl
from flexmarl import cli
from flexmarl.analysis.conversations import open_conversations
from flexmarl.cluster.torch_device import with_threads
from flexmarl.errors import CheckpointError, ConfigError, FlexmarlError
from flexmarl.events.event import Event
from flexmarl.events.journal import read_journal
from flexmarl.events.run_events import CheckpointSaved, RunFailed, StepEnded, StepStarted, StopRequested
from flexmarl.events.run_folder import RunFolder
from flexmarl.records import make_trajectory_id
from flexmarl.training.backends.gradients import Backward

SHORT = {"evaluate.tasks": 2}
DETERMINISTIC = {"deterministic": True, "cluster": {"backend": "inline", "threads": 1}, "evaluate.tasks": 0}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settings(config, overrides=SHORT, **more):
    return flexmarl.load(config, overrides, **more)


def test_the_package_is_light_until_it_is_used():
    code = (
        "import sys, flexmarl; assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules); flexmarl.load;"
        "flexmarl.train; assert not {'torch', 'ray', 'pandas'} & set(sys.modules); print(flexmarl.__version__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "0.1.0\n"
    assert all(callable(getattr(flexmarl, name)) and getattr(flexmarl, name).__doc__ for name in flexmarl.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = flexmarl.trian


def test_a_run_has_the_figures_of_its_files(small_run, capsys):
    steps = []
    run = flexmarl.train(settings(str(small_run)), on={StepEnded: lambda event: steps.append(event.step)}, show=False)
    assert capsys.readouterr().out == ""
    assert steps == [0, 1]
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert run.metrics == [{name: value for name, value in line.items() if value is not None} for line in lines]
    assert [step["step"] for step in run.metrics] == [0, 1, 2]
    frame = run.metrics_frame()
    assert frame.loc[2, "team/success"] == run.metrics[2]["team/success"]
    written = json.loads((run.folder / "summary.json").read_text())
    assert run.summary.steps == written["steps"] == 2
    assert run.summary.eval["after"] == written["eval"]["after"]
    turns = run.turns()
    assert len(turns) == 2 * 4 * 4
    assert {turn["agent"] for turn in turns} == {"solver"}
    rewards = [turn["reward"] for turn in turns if turn["group"] < 4]
    assert sum(rewards) / len(rewards) == pytest.approx(run.metrics[1]["reward/solver"])
    assert [turn["step"] for turn in turns] == [1] * 16 + [2] * 16
    assert all(turn["prompt"].strip() and sum(turn["parts"].values()) == turn["reward"] for turn in turns)
    with open_conversations(RunFolder(run.folder)) as conversations:
        lines = {line.episode: line for line in conversations.lines()}
    for turn in turns:
        line = lines[make_trajectory_id(turn["group"], turn["episode"], turn["attempt"])]
        assert (turn["task"], turn["step"]) == (line.task, line.step)
    assert list(run.turns_frame()["text"]) == [turn["text"] for turn in turns]
    assert [event.step for event in run.events() if isinstance(event, StepEnded)] == steps
    again = flexmarl.open_run(str(run.folder))
    assert again.metrics == run.metrics
    assert again.settings == settings(small_run)


def test_a_trained_run_is_evaluated_and_exported_in_the_same_process(small_run, tmp_path):
    run = flexmarl.train(settings(small_run, steps=1), show=False)
    trained = flexmarl.evaluate(run)
    assert trained.metrics["success"] == pytest.approx(run.summary.eval["after"]["success"])
    assert flexmarl.evaluate(run.folder, {"evaluate.tasks": 3}).episodes == 3
    assert flexmarl.evaluate(settings(small_run)).episodes == 2
    (exported,) = flexmarl.export(run, tmp_path / "models")
    assert AutoModelForCausalLM.from_pretrained(exported).config.hidden_size == 32


def test_an_evaluation_on_prompts_that_are_trained_on_is_a_caution(small_run, capsys, monkeypatch):
    leak = {"tasks.params": {"leak": True}, "evaluate.tasks": 2}
    said = "2 held-out tasks have the prompts of training tasks, in parentheses, so they are not new: "
    said += "held_out-0 (train-0), held_out-1 (train-1)"
    with pytest.warns(UserWarning, match=re.escape(said)):
        assert flexmarl.evaluate(settings(small_run, leak)).episodes == 2
    monkeypatch.setattr(
        sys, "argv", ["flexmarl", "eval", str(small_run), "tasks.params={leak: true}", "evaluate.tasks=2"]
    )
    with pytest.raises(SystemExit):
        cli.main()
    assert f"flexmarl: caution: {said}" in capsys.readouterr().err


def test_errors_are_those_of_the_command_line(small_run, tmp_path):
    with pytest.raises(ConfigError, match=r"batch\.groups.*'many'"):
        flexmarl.load(small_run, {"batch.groups": "many"})
    with pytest.raises(ConfigError, match="does not exist"):
        flexmarl.train("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"evaluate\.tasks is 0"):
        flexmarl.evaluate(small_run, {"evaluate.tasks": 0})
    with pytest.raises(ConfigError, match="no run folder"):
        flexmarl.open_run(tmp_path)
    with pytest.raises(ConfigError, match=r"give them to flexmarl\.load"):
        flexmarl.evaluate(settings(small_run), {"seed": 2})
    run = flexmarl.train(settings(small_run, {"checkpoint.every": 0}, steps=0), show=False)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        flexmarl.export(run, "out")
    for which in ("last", 2.0, True, None):
        with pytest.raises(CheckpointError, match=rf"which must be newest, best, or the step .*, got {which!r}"):
            flexmarl.evaluate(run, which=which)


def test_an_argument_that_is_no_path_is_named_with_what_it_is_and_what_would_work(small_run):
    for function in (flexmarl.train, flexmarl.simulate, flexmarl.evaluate):
        with pytest.raises(ConfigError, match=r"source must be .*, got {'steps': 1}; .* flexmarl\.load\("):
            function({"steps": 1})
    with pytest.raises(ConfigError, match="resume must be a run or the path of its folder, got 3"):
        flexmarl.train(settings(small_run), resume=3)
    with pytest.raises(ConfigError, match="run must be a run or the path of its folder"):
        flexmarl.export({}, "out")
    with pytest.raises(ConfigError, match="folder must be"):
        flexmarl.open_run(None)
    with pytest.raises(ConfigError, match="path must be the path of a YAML file"):
        flexmarl.load({"steps": 1})


def test_a_callback_that_raises_ends_the_run_with_an_error_that_names_it(small_run):
    heard = []

    def note(event):
        heard.append(event)
        raise ValueError("boom")

    with pytest.raises(FlexmarlError, match=r"callback on\[StepStarted\], .*note, raised ValueError: boom") as ended:
        flexmarl.train(settings(small_run), on={StepStarted: note}, show=False)
    assert len(heard) == 1
    assert isinstance(ended.value.__cause__, ValueError)
    assert "start again with: flexmarl train" in ended.value.__notes__[0]
    (journal,) = Path().glob("runs/*/journal.jsonl")
    assert ["boom" in event.because for event in read_journal(journal) if isinstance(event, RunFailed)] == [True]


@pytest.mark.parametrize("on", [{"step_started": print}, {StepStarted: 3}, {StepStarted: asyncio.sleep}])
def test_callbacks_that_cannot_be_called_are_refused_before_the_run(small_run, on):
    with pytest.raises(ConfigError, match=r"^on[:\[]"):
        flexmarl.train(settings(small_run), on=on)
    assert not Path("runs").exists()


def test_only_the_thread_of_the_device_computes_with_several_threads(small_run, monkeypatch):
    numbers, trained, add = set(), set(), Backward.add

    def counted(*arguments):
        trained.add(torch.get_num_threads())
        return add(*arguments)

    monkeypatch.setattr(Backward, "add", counted)
    given = settings(small_run, steps=1, cluster={"backend": "inline", "threads": 2})
    with with_threads(3):
        flexmarl.train(given, on={Event: lambda _: numbers.add(torch.get_num_threads())}, show=False)
        assert (numbers, trained, torch.get_num_threads()) == ({1}, {2}, 3)


def test_where_an_event_loop_runs_the_async_functions_do(small_run, tmp_path):
    """As in every notebook."""

    async def cell():
        for function, arguments in (("train", ()), ("evaluate", ()), ("export", ("out",)), ("simulate", ())):
            with pytest.raises(FlexmarlError, match=rf"await flexmarl\.{function}_async\("):
                getattr(flexmarl, function)(small_run, *arguments)
        threads = set()
        run = await flexmarl.train_async(
            settings(small_run, steps=1), on={Event: lambda _: threads.add(threading.current_thread())}, show=False
        )
        assert threading.main_thread() not in threads
        assert len(threads) == 1
        with pytest.raises(FlexmarlError, match=r"flexmarl\.\w+ cannot begin: .* at work in this process"):
            await asyncio.gather(flexmarl.evaluate_async(run), flexmarl.evaluate_async(run))
        while True:
            try:
                return run, await flexmarl.evaluate_async(run), await flexmarl.export_async(run, tmp_path / "out")
            except FlexmarlError as error:  # The other of the two evaluations ends by itself.
                assert "at work" in str(error)  # noqa: PT017
                await asyncio.sleep(0.1)

    run, evaluation, (exported,) = asyncio.run(cell())
    assert [step["step"] for step in run.metrics] == [0, 1]
    assert evaluation.episodes == 2
    assert exported.is_dir()


@pytest.mark.parametrize("within_s", [600.0, 0.0])
def test_a_cancelled_caller_gets_its_cancellation_when_the_run_has_ended_and_is_saved(small_run, within_s):
    asked = settings(small_run, {"checkpoint": {"every": 1000, "on_interrupt_s": within_s}}, steps=1000)

    async def cell():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        on = {StepStarted: lambda event: event.step == 1 and loop.call_soon_threadsafe(task.cancel)}
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await flexmarl.train_async(asked, on=on, show=False)
        assert any("flexmarl train" in note for note in cancelled.value.__notes__), "how to continue"

    asyncio.run(cell())
    (folder,) = Path("runs").iterdir()
    events = list(flexmarl.open_run(folder).events())
    assert sum(isinstance(event, RunFailed) for event in events) == 1
    last = max(event.step for event in events if isinstance(event, StepEnded))
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    assert saved == ([last + 1] if within_s else [])


def test_a_cancelled_simulation_ends():
    config = Path(__file__).parents[2] / "examples" / "math_team" / "cluster.yaml"

    async def cell():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        on = {StepEnded: lambda event: loop.call_soon_threadsafe(task.cancel)}
        with pytest.raises(asyncio.CancelledError):
            await flexmarl.simulate_async(settings(config, {}, steps=100_000), on=on, show=False)

    asyncio.run(cell())


def test_a_simulation_is_a_run_like_any_other():
    config = Path(__file__).parents[2] / "examples" / "math_team" / "cluster.yaml"
    steps = []
    run = flexmarl.simulate(settings(config, {}, steps=2), on={StepEnded: lambda event: steps.append(event.step)})
    assert steps == [0, 1]
    assert run.summary.steps == 2
    assert run.metrics[-1]["rollout/tokens"] > 0
    with pytest.raises(FlexmarlError, match=r"callback on\[StepEnded\].*division"):
        flexmarl.simulate(settings(config, {}, steps=2), on={StepEnded: lambda event: 1 / 0}, show=False)


def signals(at_step, *numbers):
    """Callbacks that send these signals to this process when a step begins."""

    def send(event):
        if event.step == at_step:
            for number in numbers:
                signal.raise_signal(number)

    return {StepStarted: send}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_saves_the_step_under_way_and_the_resumed_run_ends_with_the_same_bits(small_run, number):
    """Law 6, for a run that is stopped in the middle of a step."""
    asked = settings(small_run, {**DETERMINISTIC, "checkpoint": {"every": 100}}, steps=3)
    straight = flexmarl.train(asked, show=False)
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt) as stopped:
        flexmarl.train(asked, on=signals(1, number), show=False)
    assert handlers == [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    folder = next(path for path in Path("runs").iterdir() if path != straight.folder)
    run = flexmarl.open_run(folder)
    (asked_to_stop,) = [event for event in run.events() if isinstance(event, StopRequested)]
    assert asked_to_stop.within_s == asked.checkpoint.on_interrupt_s
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00002"]
    assert "step-00002; continue with: flexmarl train" in stopped.value.__notes__[0]
    assert [step["step"] for step in run.metrics] == [0, 1, 2]
    resumed = flexmarl.train(folder / "config.yaml", resume=run, show=False)
    assert resumed.folder == folder
    expected, found = (
        load_file(one.folder / "checkpoints" / "step-00003" / "one" / "weights.safetensors")
        for one in (straight, resumed)
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    ("numbers", "checkpoint"),
    [
        ((signal.SIGINT, signal.SIGINT), {"every": 100}),
        ((signal.SIGTERM, signal.SIGTERM), {"every": 100}),
        ((signal.SIGINT,), {"every": 100, "on_interrupt_s": 0}),
        ((signal.SIGTERM,), {"every": 100, "on_interrupt_s": 1e-6}),
        ((signal.SIGINT,), {"every": 0}),
    ],
    ids=["twice", "SIGTERM twice", "no time", "too little time", "no checkpoints"],
)
def test_the_run_ends_at_once_where_the_step_has_no_time(small_run, numbers, checkpoint):
    asked = settings(small_run, {"checkpoint": checkpoint, "evaluate.tasks": 0}, steps=1000)
    with pytest.raises(KeyboardInterrupt):
        flexmarl.train(asked, on=signals(1, *numbers), show=False)
    (folder,) = Path("runs").iterdir()
    events = list(flexmarl.open_run(folder).events())
    assert [event.step for event in events if isinstance(event, StepEnded)] == [0]
    assert sum(isinstance(event, RunFailed) for event in events) == 1
    assert not list((folder / "checkpoints").iterdir())


def test_a_workflow_may_be_written_and_rewritten_in_a_notebook():
    code = (
        "from flexmarl.agents import workflow\n"
        "for cell in ('one', 'two'):\n"
        "    text = '@workflow(\"mine\")\\nasync def mine(task, team): pass\\n'\n"
        "    exec(compile(text, cell, 'exec'), globals())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
