import io
import json
import math
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from flexmarl.analysis.curve import draw_curve, panels_of, smooth, spread
from flexmarl.analysis.intervals import share, shares_differ
from flexmarl.analysis.summary import History, Summary, render_pictures, render_summary, summarise
from flexmarl.analysis.tables import summary_table
from flexmarl.analysis.troubles import Troubles, trouble_rows
from flexmarl.events.metrics import JsonlSink, read_metrics
from flexmarl.events.run_events import Evaluated
from flexmarl.events.run_folder import RunFolder
from flexmarl.records import CONTROLLER
from tests.unit.events.runs import STEP_S, events_on, write_command


def play(folder: Path, steps: int = 20) -> None:
    """Writes journal and metrics of a run whose figures can be checked by eye: success goes from 0.40 to 0.80."""
    write_command(folder / "journal.jsonl", steps=steps, first_pid=10)
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(steps + 1):
        done = step / steps
        values = {"time/step_s": 2.0}
        if step:
            values |= {
                "team/success": 0.4 + 0.4 * done,
                "team/verifier_accuracy": 0.6 + 0.3 * done,
                "team/rounds": 2.0 - done,
                "reward/solver": 0.3 + 0.4 * done,
                "reward/verifier": 0.5 + 0.4 * done,
                "rollout/tokens": 5000.0,
                "time/rollout_s": 1.5,
                "time/train_s": 1.0,
                "overlap/training_hidden": 0.9 if step > steps // 2 else 0.6,
                "overlap/training_s": 2.0 if step > steps // 2 else 1.0,
                "lag/event_loop_ms": 1.25,
                "lag/event_loop_max_ms": float(step),
                "version/solver": step,
                "version/verifier": step,
            }
            values |= {f"team/tool_use/level_{level}": abs(0.5 - level / 12 * done) for level in (1, 2, 10)}
        if step in (0, steps):
            values |= {
                "eval/team/success": 0.4 + 0.4 * done,
                "eval/team/tool_use/level_10": 0.5 + 0.4 * done,
                "eval/reward/solver": 0.3 + 0.4 * done,
                "eval/agent/verifier/accuracy": 0.6 + 0.3 * done,
                "time/evaluate_s": 1.0,
            }
        sink.write(step, values)
    sink.close()


def shown(summary: Summary, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(summary_table(summary))
    return out.getvalue()


def evaluate(journal: Path, when: str, step: int, success: float, episodes: int, *, failed: int = 0) -> None:
    """Adds an evaluation to a journal, whose reward has no interval: its episodes are not kept."""
    rewards = {"solver": 0.5} if failed < episodes else {}
    found = {"episodes": episodes, "failed": failed, "metrics": {"success": success}, "rewards": rewards}
    found["failures"] = {}
    events_on(journal, lambda: 100.0).emit(
        Evaluated(process=CONTROLLER, began=99.0, when=when, step=step, evaluation=found)
    )


def test_the_table_has_the_number_of_tasks_and_intervals(tmp_path):
    play(tmp_path)
    for when, step, success in (("before", 0, 0.4), ("between", 10, 0.0), ("after", 20, 0.8)):
        evaluate(tmp_path / "journal.jsonl", when, step, success, 40)
    found = render_summary(tmp_path)
    assert found.held_out == {"before": {"episodes": 40}, "after": {"episodes": 40}}
    before, after = share(16, 40), share(32, 40)
    assert found.intervals["success"] == {
        "before": asdict(before), "after": asdict(after), "change": asdict(shares_differ(before, after)),
    }  # fmt: skip
    written = json.loads(RunFolder(tmp_path).summary.read_text())
    for summary in (found, Summary(**written)):  # The second one is printed if a run is resumed that has ended.
        text = shown(summary)
        assert text.count("40 episodes") == 2
        (success,) = (line.split() for line in text.splitlines() if line.startswith("  success"))
        for word in (f"[{before.low:.3f},", f"{before.high:.3f}]", f"[{after.low:.3f},"):
            assert word in success
        assert "A change whose interval holds 0 may be chance" in text
        (reward,) = (line for line in text.splitlines() if line.startswith("  solver: reward"))
        assert "[" not in reward, "its episodes are not kept"


@pytest.mark.parametrize("failed", ["before", "after"])
def test_an_evaluation_of_which_all_failed_has_success_0_and_no_reward(tmp_path, failed):
    write_command(tmp_path / "journal.jsonl", steps=2, first_pid=10)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for when, step in (("before", 0), ("after", 2)):
        ok = failed != when
        evaluate(tmp_path / "journal.jsonl", when, step, 0.25 * ok, 8, failed=8 * (not ok))
        # The figures of an earlier play of this evaluation are in metrics.jsonl, too.
        sink.write(step, {"reward/solver": 0.125, "eval/team/success": 0.25 * ok, "eval/reward/solver": 0.5})
    sink.close()
    summary = render_summary(tmp_path)
    other = "after" if failed == "before" else "before"
    assert summary.eval == {failed: {"success": 0.0}, other: {"success": 0.25, "reward/solver": 0.5}}
    assert summary.agents == {"solver": {f"reward_{other}": 0.5}}
    assert set(summary.intervals["reward/solver"]) == {other}
    (reward,) = (line.split() for line in shown(summary).splitlines() if line.startswith("  solver: reward"))
    assert reward == ["solver:", "reward", *(["-", "0.500"] if failed == "before" else ["0.500", "-"]), "-"]


def test_rewards_of_training_do_not_stand_in_for_those_of_evaluations_that_failed(tmp_path):
    write_command(tmp_path / "journal.jsonl", steps=2, first_pid=10)
    for when, step in (("before", 0), ("after", 2)):
        evaluate(tmp_path / "journal.jsonl", when, step, 0.0, 8, failed=8)
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"reward/solver":0.5}\n')
    assert render_summary(tmp_path).agents == {}


def test_the_figures_before_are_right_if_the_metrics_of_the_first_steps_are_gone(tmp_path):
    play(tmp_path)
    for when, step, success in (("before", 0, 0.4), ("after", 20, 0.8)):
        evaluate(tmp_path / "journal.jsonl", when, step, success, 40)
    (tmp_path / "metrics.jsonl").write_text('{"step":20,"eval/team/success":0.8,"eval/reward/solver":0.5}\n')
    summary = render_summary(tmp_path)
    assert (summary.eval["before"]["success"], summary.eval["after"]["success"]) == (0.4, 0.8)
    assert summary.agents == {"solver": {"reward_before": 0.5, "reward_after": 0.5}}
    assert summary.held_out.keys() == {"before", "after"}


def test_what_is_gone_with_metrics_and_journal_is_not_replaced_by_later_figures(tmp_path):
    later = summarise({20: {"eval/team/success": 0.8, "eval/reward/solver": 0.5}}, History())
    assert later.eval == {"before": {}, "after": {"success": 0.8, "reward/solver": 0.5}}
    (row,) = (line.split() for line in shown(later).splitlines() if line.startswith("  success"))
    assert row == ["success", "-", "0.800", "-"]
    assert "first step" not in shown(later)
    assert summarise({20: {"reward/solver": 0.5}}, History()).agents == {"solver": {"reward_after": 0.5}}


def test_a_narrow_screen_has_the_intervals_below_the_figures(tmp_path):
    play(tmp_path)
    for when, step, success in (("before", 0, 0.4), ("after", 20, 0.8)):
        evaluate(tmp_path / "journal.jsonl", when, step, success, 40)
    lines = shown(render_summary(tmp_path), width=70).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("  success"))
    before, after = share(16, 40), share(32, 40)
    found = [f"[{of.low:.3f}, {of.high:.3f}]" for of in (before, after, shares_differ(before, after))]
    assert lines[place].split() == ["success", "0.400", "0.800", "+0.400"]
    assert lines[place + 1].split() == " ".join(found).split()


def test_kept_evaluations_that_cannot_be_read_do_not_fail_the_run_at_its_end(tmp_path):
    play(tmp_path)
    evaluate(tmp_path / "journal.jsonl", "before", 0, 0.5, 32)
    old = tmp_path / "evaluations" / "step-0"
    old.mkdir(parents=True)
    (old / "journal.jsonl").write_text('{"t":0.0,"event":"run_started"}\n')
    summary = render_summary(tmp_path)
    assert (summary.held_out, summary.intervals) == ({}, {})
    assert "95% interval" not in shown(summary)


def test_the_summary_says_before_after_and_what_it_took(tmp_path):
    play(tmp_path)
    render_summary(tmp_path, wall_s=45.25)
    written = json.loads(RunFolder(tmp_path).summary.read_text())
    assert written["eval"]["before"]["success"] == pytest.approx(0.4)
    assert written["eval"]["after"]["success"] == pytest.approx(0.8)
    assert written["eval"]["after"]["tool_use/level_10"] == pytest.approx(0.9)
    assert written["agents"]["solver"] == pytest.approx({"reward_before": 0.3, "reward_after": 0.7})
    assert written["agents"]["verifier"] == pytest.approx({"accuracy_before": 0.6, "accuracy_after": 0.9})
    assert written["policies"] == {"solver": {"version": 20}, "verifier": {"version": 20}}
    assert written["time"] == {"evaluate": 2.0, "rollout": 30.0, "train": 20.0}
    assert (written["wall_s"], written["steps"], written["tokens"]) == (45.25, 20, 100_000)
    # Ten steps with one second of training, ten with two.
    assert written["training_hidden"] == 0.8
    assert written["event_loop_lag"] == {"mean_ms": 1.25, "max_ms": 20.0}
    assert written["processes"]["engine/solver/0"] == {"pid": 11, "node": "10.0.0.1"}
    assert (written["processes_lost"], written["processes_replaced"]) == (0, 0)
    assert Path(written["timeline"]) == RunFolder(tmp_path).timeline
    assert json.loads(RunFolder(tmp_path).timeline.read_text())["traceEvents"]
    assert set(written) == {
        "eval", "agents", "policies", "wall_s", "time", "steps", "tokens", "processes", "processes_lost",
        "processes_replaced", "training_hidden", "event_loop_lag", "timeline", "troubles", "failures", "held_out",
        "intervals",
    }  # fmt: skip


def test_the_table_says_the_same_at_a_glance(tmp_path):
    play(tmp_path)
    summary = render_summary(tmp_path, wall_s=45.25)
    text = shown(summary)
    assert "other" not in text, "the phases of this run overlap"
    assert "; they overlap)" in " ".join(text.split())
    longer = shown(replace(summary, wall_s=sum(summary.time.values()) + 34))
    assert "other 0:34" in " ".join(longer.split())
    assert "first step" not in text
    nothing_held_out = shown(replace(summary, eval={"before": {}, "after": {}}))
    assert "first step" in nothing_held_out
    assert "last step" in nothing_held_out
    for part in (
        "success", "+0.400", "20 steps, 100,000 tokens in 0:45", "solver v20, verifier v20",
        "80% of training hidden behind rollout", "wakes 1.2 ms late on average, 20 ms at most",
        "5 on 1 machine: controller 10, engine/solver/0 11", "open in ui.perfetto.dev: ",
    ):  # fmt: skip
        assert part in text


def test_the_table_counts_what_was_lost(tmp_path):
    play(tmp_path, steps=1)
    write_command(tmp_path / "journal.jsonl", steps=1, first_pid=20, lost=True)
    assert "5 on 1 machine, 1 lost, 1 replaced: controller 20, engine/verifier/0 22" in shown(render_summary(tmp_path))


def test_a_resumed_run_took_as_long_as_all_its_commands(tmp_path):
    play(tmp_path, steps=5)
    write_command(tmp_path / "journal.jsonl", steps=3, first_pid=20)
    assert render_summary(tmp_path, wall_s=13.5).wall_s == 5 * STEP_S + 13.5


def test_a_run_that_failed_has_its_pictures_and_no_summary(tmp_path):
    play(tmp_path, steps=2)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"t":9.0,"event":"torn')
    render_pictures(tmp_path)
    assert {"curve.png", "timeline.json"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "summary.json").exists()


def test_a_run_that_never_began_has_no_pictures(tmp_path):
    render_pictures(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_start_of_every_command_is_a_phase_of_the_run(tmp_path):
    play(tmp_path)
    (tmp_path / "journal.jsonl").unlink()
    for pid, start_s in ((10, 36.0), (20, 4.0)):
        write_command(tmp_path / "journal.jsonl", steps=1, first_pid=pid, start_s=start_s)
    summary = render_summary(tmp_path, wall_s=8.0)
    assert summary.time == {"start": 40.0, "evaluate": 2.0, "rollout": 30.0, "train": 20.0}
    assert "in 0:48 (start 0:40, evaluate 0:02," in " ".join(shown(summary).split())
    events = json.loads(RunFolder(tmp_path).timeline.read_text())["traceEvents"]
    starts = [event for event in events if event["name"] == "start"]
    assert [(event["ts"] / 1e6, event["dur"] / 1e6) for event in starts] == [(0.0, 36.0), (36.0 + STEP_S, 4.0)]


def test_without_a_clock_of_the_command_the_steps_add_up(tmp_path):
    play(tmp_path)
    assert render_summary(tmp_path).wall_s == 42.0


def test_the_curve_is_a_picture_of_the_run(tmp_path):
    play(tmp_path)
    render_summary(tmp_path)
    picture = imread(tmp_path / "curve.png")
    assert picture.shape[0] > 600
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05


def test_metrics_find_their_panels_by_their_names(tmp_path):
    play(tmp_path)
    panels = {panel.title: panel for panel in panels_of(read_metrics(tmp_path / "metrics.jsonl"))}
    assert {title: panel.names for title, panel in panels.items()} == {
        "Success (share of episodes)": ["success"],
        "Reward per agent (mean per turn)": ["solver", "verifier"],
        "Verifier accuracy": ["verifier_accuracy"],
        "Accuracy (by agent)": ["verifier"],
        "Rounds": ["rounds"],
        "Tool use": ["level_1", "level_2", "level_10"],
        "Time (share of step; phases overlap)": ["evaluate", "rollout", "train"],
        "Training hidden behind rollout (share)": ["training_hidden"],
        "Speed (sampled tokens per second)": ["tokens"],
    }
    assert panels["Success (share of episodes)"].held_out == {"success": [(0, 0.4), (20, 0.8)]}
    assert panels["Speed (sampled tokens per second)"].train["tokens"][0] == (1, 2500.0)


@pytest.mark.parametrize("lines", ["", '{"step":0,"eval/team/success":0.5}\n', '{"step":7,"reward/a":-1.5}\n'])
def test_a_run_that_ended_early_has_its_curve_and_summary(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "journal.jsonl").write_text("")
    summary = render_summary(tmp_path)
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert summary.tokens == 0
    assert "0 tokens" in shown(summary)
    assert ("There are no figures before and after: no turn was rewarded." in shown(summary)) == (not lines)
    assert ("change" in shown(summary)) == bool(lines)


def test_a_run_without_evaluation_has_empty_before_and_after_and_rewards_of_the_first_and_last_tenth_of_steps():
    found = summarise({step: {"team/success": 0.5, "reward/a": float(step)} for step in range(1, 21)}, History())
    assert found.eval == {"before": {}, "after": {}}
    assert found.agents == {"a": {"reward_before": 1.5, "reward_after": 19.5}}


@given(st.lists(st.floats(min_value=-1, max_value=2), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_labels_keep_their_distance_and_their_order(places):
    moved = spread(places, 0.1)
    order = sorted(range(len(places)), key=lambda index: places[index])
    gaps = [moved[b] - moved[a] for a, b in pairwise(order)]
    assert all(gap >= 0.1 - 1e-9 for gap in gaps)
    assert math.isclose(sum(moved), sum(places), abs_tol=1e-9)


def test_smoothing_leaves_constants_and_lengths_alone():
    assert smooth([0.25] * 100) == [0.25] * 100
    assert smooth([]) == []


def test_episodes_that_failed_in_the_last_evaluation_or_were_stopped_have_rows():
    troubles = Troubles().as_json({"rollout/episodes": 8.0, "rollout/stopped_episodes": 3.0})
    assert trouble_rows(troubles) == {
        "stopped": "3 episodes that played when their group came too late, or when the run was done"
    }
    failed = troubles | {"evaluation": {"episodes": 8, "failed": 6, "failures": {"ValueError: boom (team.py:61)": 6}}}
    assert trouble_rows(failed)["last evaluation"] == "6 of 8 episodes failed: ValueError: boom (team.py:61)"


def test_episodes_of_groups_that_were_played_again_are_told_apart_from_those_that_are_missing():
    troubles = Troubles().as_json({"rollout/episodes": 96.0, "rollout/failed_episodes": 2.0})
    words = "2 of 96 episodes, and 8 of groups that were played again: 8 timed_out, 2 ValueError: boom"
    assert trouble_rows(troubles | {"failures": {"timed_out": 8, "ValueError: boom": 2}}) == {"failed": words}
    assert trouble_rows(troubles | {"failures": {"timed_out": 2}}) == {"failed": "2 of 96 episodes: timed_out"}


@pytest.mark.parametrize("length", [4, 90])
def test_labels_of_a_curve_stay_on_the_page_and_their_panels_keep_their_place(tmp_path: Path, length: int):
    names = [f"team/tokens/{'m' * length}_{number}" for number in range(2)]
    draw_curve({step: dict.fromkeys(names, float(step)) for step in (1, 2)}, tmp_path / "curve.png", "run")
    ink = (imread(tmp_path / "curve.png")[..., :3] < 0.6).any(axis=(0, 2))
    assert not ink[-8:].any()
    assert ink[: len(ink) // 2].any()
