"""What a command says of episodes that fail: on the screen, in the run folder, in the exit code."""

import json
import re
import sys
from pathlib import Path

import pytest

from flexmarl import cli
from flexmarl.assemble.commands import resume_hint
from flexmarl.errors import CreditError, EngineError, EpisodeError
from flexmarl.events.failures import read_failures
from flexmarl.events.group_events import EpisodeFailed
from flexmarl.events.journal import read_journal
from flexmarl.events.metrics import read_metrics

FAILS = """
from flexmarl.agents import workflow


@workflow("NAME")
async def fails(task, team):
    reply = await team.solver.act(task.prompt)
    reply.reward(sum(letter.isdigit() for letter in reply.text) / 8)
    if WHEN:
        raise ValueError("boom: token=hf_abcdefgh12345678")
"""
ALWAYS, HALF, HELD_OUT = "True", "'e0a' in team.context.trajectory_id", "task.input_id.startswith('held_out')"


@pytest.fixture
def flexmarl(small_run: Path, tmp_path, monkeypatch, capsys):
    """Runs a command on the small run with a workflow that fails; returns its exit code, output and errors."""

    def run(command: str, when: str, *words: str) -> tuple[int, str, str]:
        name = tmp_path.name  # A name is taken once in a process, and every test has a workflow of its own.
        code = tmp_path / "fails.py"
        code.write_text(FAILS.replace("WHEN", when).replace("NAME", name), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        settings = [f"team.workflow={{type: custom, name: {name}}}", f"code=[tasks.py, {code}]"]
        monkeypatch.setattr(sys, "argv", ["flexmarl", command, str(small_run), *settings, *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        said = capsys.readouterr()
        return stopped.value.code or 0, said.out, said.err

    return run


def test_an_evaluation_whose_episodes_all_fail_says_why_and_is_no_success(flexmarl):
    """B1."""
    code, out, err = flexmarl("eval", ALWAYS)
    assert code == 3
    assert "4 held-out episodes, 4 failed" in out
    assert "a failed one counts 0 for success alone" in " ".join(out.split())
    (success,) = [line.split()[1:] for line in out.splitlines() if line.split()[:1] == ["success"]]
    assert success[0] == "0.000"
    assert re.search(r"4 of 4 episodes failed: ValueError: boom: token=\*\*\* \(fails\.py:\d+\)", err)
    assert "Traceback (most recent call last)" in err
    assert "raise ValueError" in err
    assert "hf_abcdefgh12345678" not in out + err


def test_an_evaluation_of_fewer_tasks_than_asked_for_says_so(flexmarl, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "reference": "{n + 1}"}}\n' for n in range(10)))
    table = f"tasks={{type: jsonl, file: {rows}, scorer: number, held_out_share: 0.2}}"
    code, out, err = flexmarl("eval", "False", table, "evaluate.tasks=5")
    assert (code, "2 held-out episodes, 0 failed" in out) == (0, True)
    assert "caution: evaluate.tasks asks for 5 episodes, and the tasks that are held out give 2" in err
    assert "caution" not in flexmarl("eval", "False", table, "evaluate.tasks=2")[2]


def test_an_evaluation_in_json_counts_the_reasons(flexmarl):
    code, out, _ = flexmarl("eval", ALWAYS, "--json")
    (reason,) = json.loads(out)["failures"].items()
    assert (code, reason[1]) == (3, 4)
    assert reason[0].startswith("ValueError: boom")


def test_a_training_run_says_in_each_step_which_episodes_failed_and_keeps_the_first_traceback(flexmarl):
    """B2."""
    code, out, err = flexmarl("train", HALF, "steps=2", "evaluate.tasks=0")
    assert code == 0, err
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(steps) == 2
    assert all(
        re.search(r"\| failed 4/16: ValueError: boom: token=\*\*\* \(fails\.py:\d+\) \|", line) for line in steps
    )
    folder = Path(out.splitlines()[-1])
    (kept,) = read_failures(folder / "failures")
    assert (kept.kind, kept.purpose) == ("ValueError", "training")
    assert 'raise ValueError("boom: token=***' in kept.traceback
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["troubles"]["failed"], summary["troubles"]["episodes"]) == (8, 32)
    assert list(summary["troubles"]["failures"].values()) == [8]
    assert summary["failures"] == str(folder / "failures")
    assert "8 of 32 episodes: ValueError: boom" in out
    failed = [event for event in read_journal(folder / "journal.jsonl") if isinstance(event, EpisodeFailed)]
    assert {(event.kind, event.place) for event in failed} == {("ValueError", kept.place)}
    files = [file for file in folder.rglob("*") if file.suffix in (".jsonl", ".json", ".txt")]
    assert all("hf_abcdefgh12345678" not in file.read_text() for file in files)


def test_a_run_of_which_half_the_episodes_fail_sounds_an_alarm_once(flexmarl):
    most = "team.context.trajectory_id.split('e')[1][0] in '01'"
    code, out, err = flexmarl("train", most, "steps=3", "evaluate.tasks=0", "alarms={no_spread: null, cut: null}")
    assert code == 0, err
    assert sum("| failed 8/16: ValueError" in line for line in out.splitlines()) == 3
    (alarm,) = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())["troubles"]["alarms"]
    assert (alarm["alarm"], alarm["step"]) == ("failed", 2)
    said = " ".join(out.split())
    assert "alarm: 16 of 32 episodes failed, in steps 1 to 2; read the first traceback of each kind" in said
    assert "flexmarl show RUN --failed" in said
    code, out, _ = flexmarl("train", most, "steps=2", "evaluate.tasks=0", "alarms={failed: null, cut: null}")
    assert (code, "episodes failed, in steps" in out) == (0, False)


def test_a_run_whose_last_evaluation_failed_whole_is_no_success(flexmarl):
    code, out, err = flexmarl("train", HELD_OUT, "steps=1")
    assert code == 3
    assert "hf_abcdefgh12345678" not in out + err
    assert "flexmarl: all 4 episodes of the last evaluation failed: ValueError: boom" in err
    noted = next(line for line in out.splitlines() if line.startswith("evaluation after training"))
    assert "4 held-out episodes, 4 failed (ValueError: boom" in noted
    assert noted.endswith(": success 0.000")


def test_a_run_whose_episodes_all_fail_names_the_tracebacks(flexmarl):
    code, out, err = flexmarl("train", ALWAYS, "evaluate.tasks=0")
    assert code == 1
    last = err.splitlines()[-1]
    assert re.search(r"step 1: none of its 4 groups .*: ValueError: boom: token=\*\*\* \(fails\.py:\d+\)$", last)
    assert "hf_abcdefgh12345678" not in out + err
    assert re.search(r"the first traceback of each kind of failed episode: .*failures", err)


def test_filtered_groups_and_missing_updates_are_said_in_each_step_and_in_the_summary(flexmarl):
    """B3."""
    filtered = "credit={filter: {tol: 10.0}}"
    code, out, err = flexmarl("train", "False", "steps=3", "evaluate.tasks=0", filtered)
    assert code == 0, err
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert all(re.search(r"\| filtered 4/4: too_easy \| no update: one \|", line) for line in steps)
    summary = json.loads((Path(out.splitlines()[-1]) / "summary.json").read_text())
    assert sum(summary["troubles"]["filtered"].values()) == 12
    assert summary["troubles"]["skipped"] == {"one": 3}
    assert [alarm["alarm"] for alarm in summary["troubles"]["alarms"] if alarm["alarm"] != "cut"] == [
        "no_spread",
        "untrained",
    ]
    assert "alarm: 100% of 8 groups have equal rewards by credit.filter" in out


def test_each_line_has_the_figures_of_its_step_where_evaluations_follow(flexmarl):
    """B10."""
    code, out, err = flexmarl("train", "False", "steps=3", "evaluate.every=1")
    assert code == 0, err
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == ["step 1/3", "step 2/3", "step 3/3"]
    for step, values in list(read_metrics(Path(out.splitlines()[-1]) / "metrics.jsonl").items())[1:]:
        playing_s = values["time/step_s"] - values["time/evaluate_s"]
        assert f"reward solver {values['reward/solver']:.2f}" in steps[step - 1]
        assert f"{values['rollout/tokens'] / max(playing_s, values['time/rollout_s']):.0f} tokens/s" in steps[step - 1]


def test_an_error_that_a_resumed_run_would_repeat_comes_without_that_advice(flexmarl, tmp_path):
    compared = ["evaluate.tasks=2", "evaluate.every=1", "evaluate.every_tasks=2", "checkpoint.every=1", "steps=1"]
    code, _, err = flexmarl("train", "False", *compared, "stop={metric: gaind}")
    assert code == 2
    assert "stop.metric is 'gaind', which the evaluation does not have" in err
    assert "There is no checkpoint yet; change what the error names, then start a new run" in err
    assert "--resume" not in err
    again = resume_hint(tmp_path, EngineError("lost"))
    assert again.endswith(f"start again with: flexmarl train {tmp_path / 'config.yaml'} --resume {tmp_path}")
    assert resume_hint(tmp_path) == again
    for repeated in (CreditError("unknown tag"), EpisodeError("step 1: none of its 2 groups had a finished episode")):
        assert "--resume" not in resume_hint(tmp_path, ExceptionGroup("two policies", [repeated]))
