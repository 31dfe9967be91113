"""The best checkpoint is kept, and a run that no longer improves ends; both survive a resumption."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import CheckpointError, ConfigError
from flexmarl.events.run_events import CheckpointBest, CheckpointDropped, Evaluated, StoppedEarly
from flexmarl.orchestrator.checkpoint import CheckpointFolder, read_state
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.orchestrator.settings import FigureSettings, StopSettings
from flexmarl.orchestrator.stopping import best_of, compared, none_better, stop_after
from flexmarl.records import GenerationRequest
from flexmarl.testing.scripted_run import ScriptedRun

TASKS = 4
figures = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, math.nan]), min_size=1, max_size=12)


def evaluation(values: Sequence[float | None], metric: str = "success") -> Evaluation:
    """An evaluation with an episode for each value; None stands for a failed one."""
    finished = [value for value in values if value is not None]
    return Evaluation(
        versions={},
        episodes=len(values),
        failed=len(values) - len(finished),
        metrics={metric: sum(finished) / len(finished)} if finished else {},
        ranges={metric: (min(finished), max(finished))} if finished else {},
    )


def history(values: Sequence[float]) -> dict[int, Evaluation]:
    return {10 * number: evaluation([value]) for number, value in enumerate(values)}


@given(values=figures, mode=st.sampled_from(["max", "min"]))
def test_the_best_step_is_the_first_with_the_extreme_figure(values: list[float], mode: Any) -> None:
    best = best_of(history(values), FigureSettings(mode=mode))
    numbers = [value for value in values[1:] if not math.isnan(value)]
    if not numbers:
        assert best is None
    else:
        assert best is not None
        assert best.step == 10 * (1 + values[1:].index(max(numbers) if mode == "max" else min(numbers)))


@given(
    values=figures,
    patience=st.integers(1, 4),
    min_delta=st.sampled_from([0.0, 0.25, 0.3]),
    mode=st.sampled_from(["max", "min"]),
)
def test_a_run_stops_when_its_last_evaluations_are_no_better_than_what_was_there_before(
    values: list[float], patience: int, min_delta: float, mode: Any
) -> None:
    """Against another way to say it: the mark that each evaluation had to beat is the last improvement before it."""
    signed = [value if mode == "max" else -value for value in values]
    improved = []
    for number, value in enumerate(signed):
        marks = [signed[earlier] for earlier in improved]
        improved += [number] if not math.isnan(value) and (not marks or value - marks[-1] > min_delta) else []
    since = [number for number in range(1, len(values)) if not improved or number > improved[-1]]
    stopped = stop_after(history(values), StopSettings(patience=patience, min_delta=min_delta, mode=mode))
    assert (stopped is not None) == (len(since) >= patience)
    if stopped is not None:
        assert stopped.step == 10 * (len(values) - 1)
        assert f"in {len(since)} evaluations (stop.patience)" in stopped.because


@given(data=st.data(), mode=st.sampled_from(["max", "min"]))
def test_a_failed_episode_never_makes_a_figure_better(data: st.DataObject, mode: Any) -> None:
    """Whatever the episodes would have had, as long as something as bad was seen before."""
    values = st.floats(-8, 8, width=16)
    first = data.draw(st.lists(values, min_size=1, max_size=6))
    seen = st.floats(min(first), max(first), width=16)
    whole: list[float] = data.draw(st.lists(seen, min_size=1, max_size=6))
    failed = data.draw(st.sets(st.integers(0, len(whole) - 1)))
    broken = [None if number in failed else value for number, value in enumerate(whole)]
    settings = FigureSettings(metric="score", mode=mode)
    figures = [
        dict(compared({0: evaluation(first, "score"), 10: evaluation(values, "score")}, settings))[10].value
        for values in (whole, broken)
    ]
    assert math.isnan(figures[1]) or settings.gain(figures[1]) <= settings.gain(figures[0]) + 1e-9


def test_a_policy_whose_hard_episodes_fail_is_not_the_best_and_the_ruling_says_why() -> None:
    before, honest = evaluation([0.0, 0.2, 0.4, 0.4], "score"), evaluation([0.2, 0.4, 0.8, 0.8], "score")
    broken = evaluation([None, None, 0.8, 0.9], "score")
    found = {0: before, 10: honest, 20: broken}
    best = best_of(found, FigureSettings(metric="score"))
    assert best is not None
    assert (best.step, best.because) == (10, "score 0.55 at step 10 is the highest of 2 evaluations")
    alone = best_of({0: before, 20: broken}, FigureSettings(metric="score"))
    assert alone is not None
    assert alone.because == (
        "score 0.425 at step 20 is the highest of 1 evaluations (2 of 4 episodes failed; each counts as 0)"
    )
    assert stop_after(found, StopSettings(metric="score", patience=1)) is not None


def test_names_of_metrics_jsonl_mean_the_same_figure() -> None:
    for name in ("success", "team/success", "eval/team/success", "eval/success", "evaluate.success"):
        assert FigureSettings(metric=name).metric == "success"
    assert FigureSettings(metric="eval/reward/solver").metric == "reward/solver"


def scripted(folder: Path, curve: Sequence[int], **sections: Any) -> ScriptedRun:
    """A run whose evaluation after step i has `curve[i]` of 4 tasks right; trainers' versions count the steps."""

    def say(prompt: str, request: GenerationRequest) -> str:
        held_out = re.search(r"test (\d+)", prompt)
        if held_out is None:
            return "ab"[request.seed % 2]
        return "a" if int(held_out[1]) < curve[run.trainers["solver"].version] else "b"

    run = ScriptedRun(
        say=say,
        folder=folder,
        **{
            "steps": len(curve) - 1,
            "batch": {"groups": 2, "episodes": 2},
            "evaluate": {"tasks": TASKS, "every": 1, "every_tasks": TASKS},
            "checkpoint": {"every": 1, "keep": 1, "best": {}},
            **sections,
        },
    )
    return run


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    run = scripted(tmp_path, [0, 1, 3, 2, 3, 1]).play()
    assert kept(tmp_path) == ["step-00002", "step-00005"]
    assert CheckpointFolder(tmp_path).best() == 2
    assert [(event.step, event.because) for event in run.events.of(CheckpointBest)] == [
        (1, "success 0.25 at step 1 is the highest of 1 evaluations"),
        (2, "success 0.75 at step 2 is the highest of 2 evaluations"),
    ]
    assert sorted(event.step for event in run.events.of(CheckpointDropped)) == [1, 3, 4]


def test_a_best_step_that_is_not_due_is_saved_too(tmp_path: Path) -> None:
    scripted(tmp_path, [0, 1, 3, 2, 2], checkpoint={"every": 4, "keep": 1, "best": {"metric": "success"}}).play()
    assert kept(tmp_path) == ["step-00002", "step-00004"]
    assert read_state(CheckpointFolder(tmp_path).chosen("best")).versions == {"solver": 2}


@pytest.mark.parametrize(
    ("counts", "mode", "said"),
    [
        ([2, 1, 2], "max", "success 0.5 at step 2 is the highest of 2 evaluations, and not above 0.5, before training"),
        ([1, 3, 2], "min", "success 0.5 at step 2 is the lowest of 2 evaluations, and not below 0.25, before training"),
        ([1, 2, 0], "max", ""),
    ],
)
def test_a_best_step_that_is_not_better_than_before_training_is_said(counts: list[int], mode: str, said: str) -> None:
    history = {
        step: Evaluation(versions={}, episodes=4, failed=0, metrics={"success": count / 4})
        for step, count in enumerate(counts)
    }
    settings = FigureSettings.model_validate({"mode": mode})
    assert none_better(history, settings) == said
    del history[0]
    assert none_better(history, settings) == ""


def test_the_last_step_may_be_the_best(tmp_path: Path) -> None:
    run = scripted(tmp_path, [0, 1, 2]).play()
    assert (kept(tmp_path), CheckpointFolder(tmp_path).best()) == (["step-00002"], 2)
    assert [event.step for event in run.events.of(CheckpointBest)] == [1, 2]


def test_the_lowest_figure_is_the_best_if_the_mode_says_so(tmp_path: Path) -> None:
    checkpoint = {"every": 1, "keep": 1, "best": {"metric": "reward/solver", "mode": "min"}}
    scripted(tmp_path, [4, 3, 1, 2], checkpoint=checkpoint).play()
    assert CheckpointFolder(tmp_path).best() == 2


def test_checkpoints_are_chosen_by_name_and_by_step(tmp_path: Path) -> None:
    scripted(tmp_path, [0, 1, 3, 2], checkpoint={"every": 1, "keep": 2, "best": {}}).play()
    folder = CheckpointFolder(tmp_path)
    assert folder.chosen("newest").name == "step-00003"
    assert folder.chosen("best").name == folder.chosen(2).name == "step-00002"
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 1 in .*; there are those of steps: 2, 3"):
        folder.chosen(1)
    (tmp_path / "step-00002" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-00002/state\.json is torn"):
        folder.chosen("best")
    (tmp_path / "best").unlink()
    with pytest.raises(CheckpointError, match=r"is marked as the best; train with checkpoint\.best=\{\}"):
        folder.chosen("best")


STOP = {"patience": 2}


@pytest.mark.parametrize("mode", ["microbatch", "async"])
def test_a_run_without_improvement_ends_with_its_reason_and_a_checkpoint(tmp_path: Path, mode: str) -> None:
    run = scripted(tmp_path, [1, 2, 1, 2, 4, 4], mode=mode, stop=STOP, checkpoint={"every": 10}).play()
    (stopped,) = run.events.of(StoppedEarly)
    because = "success has not been above 0.5, at step 1, in 2 evaluations (stop.patience)"
    assert (stopped.step, stopped.because) == (3, because)
    assert run.outcome is not None
    assert run.outcome.steps == run.trainers["solver"].version == 3
    assert kept(tmp_path) == ["step-00003"]
    assert run.outcome.after is not None
    assert run.outcome.after.metrics["success"] == 0.5
    assert [(event.when, event.step) for event in run.events.of(Evaluated)] == [
        ("before", 0), ("between", 1), ("between", 2), ("between", 3)
    ]  # fmt: skip


def test_a_stopped_run_that_is_resumed_makes_no_further_step(tmp_path: Path) -> None:
    curve = [1, 1, 1, 4, 4]
    scripted(tmp_path, curve, stop=STOP).play()
    again = scripted(tmp_path, curve, stop=STOP).play()
    assert again.outcome is not None
    assert again.outcome.steps == again.trainers["solver"].version == 2
    longer = scripted(tmp_path, curve, stop=None).play()
    assert longer.outcome is not None
    assert longer.outcome.steps == 4


class Killed(Exception):
    """Ends a run in the middle."""


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_decides_as_an_undisturbed_one(tmp_path: Path, killed_at: int, every: int) -> None:
    """Killed in the evaluation after step `killed_at`, that is behind the checkpoint and before the decision on it."""
    curve = [1, 2, 3, 1, 3, 2, 2, 4]
    settings: dict[str, Any] = {"stop": {"patience": 3}, "checkpoint": {"every": every, "keep": 1, "best": {}}}
    whole = scripted(tmp_path / "whole", curve, **settings).play()

    def dies(event: Evaluated) -> None:
        if event.step == killed_at:
            raise Killed

    broken = scripted(tmp_path / "broken", curve, **settings)
    broken.events.listen(Evaluated, dies)
    with pytest.raises(Killed):
        broken.play()
    resumed = scripted(tmp_path / "broken", curve, **settings)
    resumed._resumes = True
    resumed.play()
    assert kept(tmp_path / "broken") == kept(tmp_path / "whole") == ["step-00002", "step-00005"]
    assert CheckpointFolder(tmp_path / "broken").best() == CheckpointFolder(tmp_path / "whole").best() == 2
    states = [read_state(CheckpointFolder(tmp_path / name).chosen("newest")) for name in ("broken", "whole")]
    assert states[0].evaluations == states[1].evaluations
    assert [event.because for event in resumed.events.of(StoppedEarly)] == [
        event.because for event in whole.events.of(StoppedEarly)
    ]


def test_a_figure_that_no_evaluation_has_is_answered_with_those_there_are(tmp_path: Path) -> None:
    run = scripted(tmp_path, [1, 1], stop={"metric": "sucess"})
    with pytest.raises(ConfigError, match=r"stop\.metric is 'sucess', which .*; it has: reward/solver, success"):
        run.play()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"stop": {}, "evaluate": {"tasks": 4}}, r"stop: evaluations are compared, but evaluate\.every is 0"),
        (
            {"evaluate": {"tasks": 0, "every": 1}},
            r"checkpoint\.best: evaluations are compared, but evaluate\.tasks is 0",
        ),
        (
            {"stop": {}, "evaluate": {"tasks": 99, "every": 1}},
            r"checkpoint\.best and stop: .* play 64 tasks .* the others 99; use evaluate\.every_tasks=99",
        ),
        ({"checkpoint": {"every": 0, "best": {}}}, r"checkpoint\.best is set, but checkpoint\.every is 0"),
        ({"stop": {"patience": 0}}, r"greater than or equal to 1"),
    ],
)
def test_settings_that_leave_nothing_to_compare_are_refused(tmp_path: Path, sections: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scripted(tmp_path, [1, 1], **sections)
