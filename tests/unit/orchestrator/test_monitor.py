"""What is seen of a run: figures by step, and a live view."""

import asyncio
import re
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import StringIO

import pytest
from rich.console import Console

from flexmarl.analysis.timeline import trace_events
from flexmarl.analysis.troubles import Troubles, trouble_rows
from flexmarl.credit import AgentReport
from flexmarl.errors import EngineError
from flexmarl.events.event import Timed
from flexmarl.events.group_events import GroupFiltered, GroupsCredited, RolloutEnded
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.metrics import Metrics, tokens_per_s
from flexmarl.events.notices import (
    EpisodesTaken,
    EpisodeWaits,
    EvaluationStarted,
    FiguresWritten,
    GroupJudged,
    GroupPlayed,
    StepSettled,
    TurnsTaken,
    phase,
)
from flexmarl.events.progress import LineProgress, NullProgress, ProgressView, line
from flexmarl.events.run_events import Evaluated, LoopBlocked, StepStarted
from flexmarl.events.serving_events import QueueCounts
from flexmarl.events.training_events import MicroBatchDone, Published, Updated, UpdateSkipped
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.orchestrator.evaluation import Evaluation, rewards_of
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.publish import Versions
from flexmarl.orchestrator.step_figures import Figures
from flexmarl.records import (
    CONTROLLER,
    STOPPED,
    AgentName,
    EngineUse,
    Failure,
    FilterReason,
    GroupId,
    PolicyName,
    Version,
    WorkerId,
)
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine
from flexmarl.training.interface import UpdateReport
from tests.unit.inference.models import request
from tests.unit.orchestrator.groups import episode_of, group_of, turn_of

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")


class Values(dict):
    """A sink."""

    def write(self, step, values):
        self.update(values)

    def close(self):
        pass


class Screen(NullProgress):
    def __init__(self):
        self.views, self.notes, self.stopped = [], [], False

    def note(self, text):
        self.notes.append(text)

    def update(self, view):
        self.views.append(view)

    def stop(self):
        self.stopped = True


def monitor_of(screen, *sinks, events=None, engine=ScriptedEngine, pool=None, trains_others=False):
    """A monitor beside the figures that it shows."""
    clock = asyncio.get_running_loop().time
    events = events or RememberedEvents(clock)
    metrics, versions = Metrics(clock, sinks), Versions({SOLVER: Version(3), VERIFIER: Version(3)})
    Figures(metrics=metrics, versions=versions, events=events)
    return Monitor(
        name="run",
        steps=5,
        metrics=metrics,
        progress=screen,
        pool=pool or InferencePool({SOLVER: [engine(lambda request: "a"), engine(lambda request: "a")]}),
        versions=versions,
        events=events,
        processes=lambda: 4,
        trains_others=trains_others,
    )


def figures_of(*sinks):
    """The events of a run whose figures go to the sinks. Their clock starts now."""
    clock = asyncio.get_running_loop().time
    events = RememberedEvents(clock)
    versions = Versions({SOLVER: Version(3), VERIFIER: Version(3)})
    Figures(metrics=Metrics(clock, sinks), versions=versions, events=events)
    return events


def settle(events, step):
    events.emit(StepSettled(step=step))


def play(events, rewards):
    """One group, played with these rewards; None is a failed episode."""
    events.emit(GroupPlayed(group=group_of(0, rewards)))


def begin(events, step):
    events.emit(StepStarted(step=step, versions={SOLVER: Version(3)}))


@contextmanager
def rollout(events, step):
    """As the loops of every mode say that they play."""
    began = events.now()
    with phase(events, "rollout"):
        yield
    events.emit(RolloutEnded(process=CONTROLLER, began=began, step=step))


def micro_batch(events, policy, number, duration_s):
    """One that ends this very moment."""
    events.emit(
        MicroBatchDone(
            process=WorkerId.trainer(policy), began=events.now() - duration_s, policy=policy, rows=8, tokens=96.0,
            micro_batch=f"{policy}/3/{number}", duration_s=duration_s,
        )
    )  # fmt: skip


def updated(events, policy, report, began):
    """An update that ends this very moment."""
    process = WorkerId.trainer(policy)
    events.emit(Updated(process=process, began=began, policy=policy, version=report.version, report=asdict(report)))


def published(events, policy, version):
    events.emit(Published(process=CONTROLLER, began=events.now(), policy=policy, version=version, checksum="c"))


def update(**figures):
    return UpdateReport(
        version=Version(4), num_samples=8, num_tokens=96.0, loss=0.5, grad_norm=1.0, learning_rate=0.1, **figures
    )


async def watched(monitor, seconds):
    watching = asyncio.create_task(monitor.watch())
    await asyncio.sleep(seconds)
    watching.cancel()
    (ended,) = await asyncio.gather(watching, return_exceptions=True)
    return ended


class Leaving(ScriptedEngine):
    """Is lost as soon as it is asked for its load a second time."""

    looks = 0

    async def usage(self):
        self.looks += 1
        if self.looks > 1:
            raise EngineError("the process is gone")
        return EngineUse(running=3, queued=2)


def test_the_screen_shows_what_goes_on_until_nobody_watches():
    async def scenario():
        screen, events = Screen(), RememberedEvents()
        monitor = monitor_of(screen, events=events)
        watching = asyncio.create_task(monitor.watch())
        await asyncio.sleep(0.9)
        begin(events, 0)
        play(events, [0.0, 1.0, None])
        await asyncio.sleep(0.2)
        settle(events, 1)
        await asyncio.sleep(0.2)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        phases = ["starting"] * 4 + ["rollout and training, 1 groups finished"] * 3
        assert [view.phase for view in screen.views] == phases
        assert [view.step for view in screen.views] == [0, 0, 0, 0, 0, 1, 1]
        last = screen.views[-1]
        assert (last.rewards, last.versions) == ({"solver": 0.5}, {"solver": 3, "verifier": 3})
        assert (last.running, last.processes) == ({"solver": 0}, 4)
        assert screen.stopped

    run_virtual(scenario())


def test_failed_episodes_are_counted_and_are_no_success():
    async def scenario():
        values = Values()
        events = figures_of(values)
        play(events, [0.25, None, None, 0.75])
        settle(events, 1)
        assert values["rollout/episodes"] == 4
        assert values["rollout/failed_episodes"] == 2
        assert values["rollout/tokens"] == 8
        assert values["reward/solver"] == 0.5
        assert values["team/success"] == 0.0

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("rewards", "trains_others", "says"),
    [
        ([1.0, 0.0, 1.0], True, "| 3 episodes ended | "),
        ([], True, "| no episodes ended | "),
        ([1.0], False, "step 1/5 | reward"),
    ],
)
def test_where_a_step_trains_others_the_line_says_of_how_many_episodes_its_figures_are(rewards, trains_others, says):
    async def scenario():
        screen, events = Screen(), RememberedEvents()
        watching = asyncio.create_task(monitor_of(screen, events=events, trains_others=trains_others).watch())
        await asyncio.sleep(0.3)
        begin(events, 0)
        if rewards:
            play(events, rewards)
        settle(events, 1)
        await asyncio.sleep(0.3)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        shown = line(screen.views[-1])
        assert says in shown, shown
        assert ("ended" in shown) == trains_others

    run_virtual(scenario())


def test_a_step_in_which_no_episode_ends_does_not_repeat_the_figures_of_the_step_before():
    async def scenario():
        out, events = StringIO(), RememberedEvents()
        screen = LineProgress(Console(file=out, width=200))
        watching = asyncio.create_task(monitor_of(screen, events=events, trains_others=True).watch())
        await asyncio.sleep(0.3)
        for step in range(3):
            begin(events, step)
            if step == 0:
                play(events, [1.0, None, 0.0])
            await asyncio.sleep(1.0)
            settle(events, step + 1)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        _, first, *others = out.getvalue().splitlines()
        assert re.fullmatch(r"step 1/5 \| 3 episodes ended \| .*failed 1/3.* tokens/s \| .*", first)
        nothing = re.compile(r"step [23]/5 \| no episodes ended \| 0:0\d, left 0:0\d")
        assert len(others) == 2
        assert all(nothing.fullmatch(line) for line in others), others

    run_virtual(scenario())


def test_turns_whose_tool_calls_were_answered_with_an_error_are_counted_and_said():
    async def scenario():
        values = Values()
        events = figures_of(values)
        written = []
        events.listen(FiguresWritten, written.append)
        group = group_of(0, [1.0, 0.0, 0.0])
        faults = ({"tool_error": 1.0, "bad_tool_calls": 0.5}, {"tool_error": 1.0}, {"format_error": 1.0})
        episodes = (
            replace(episode, signals={episode.turns[0].sample_id: found})
            for episode, found in zip(group.episodes, faults, strict=True)
        )
        events.emit(GroupPlayed(group=replace(group, episodes=tuple(episodes))))
        settle(events, 1)
        assert (values["tool_errors/solver"], values["bad_tool_calls/solver"]) == (2, 1)
        assert written[0].untrained.lines == [
            "unreadable tool calls: solver in 1 turn",
            "tool errors: solver in 2 turns",
        ]
        assert trouble_rows(Troubles().as_json(values)) == {
            "unreadable tool calls": "solver in 1 turn",
            "tool errors": "solver in 2 turns",
        }

    run_virtual(scenario())


def test_an_episode_that_the_run_stopped_is_neither_played_nor_failed():
    async def scenario():
        values = Values()
        events = figures_of(values)
        written = []
        events.listen(FiguresWritten, written.append)
        group = group_of(0, [1.0, None, None, 1.0])
        failed, stopped, *_ = (episode for episode in group.episodes if not episode.finished)
        failed = replace(failed, failure=Failure(kind="ValueError", text="boom"))
        stopped = replace(stopped, failure=Failure(kind=STOPPED, text="the run's last step was done"))
        group = replace(group, episodes=(*group.finished, failed, stopped))
        group = replace(group, episodes=tuple(replace(one, metrics={"success": 1.0}) for one in group.episodes))
        events.emit(GroupPlayed(group=group))
        settle(events, 1)
        assert values["rollout/episodes"] == 3
        assert values["rollout/failed_episodes"] == values["rollout/stopped_episodes"] == 1
        assert values["team/success"] == pytest.approx(2 / 3), "without the one that was stopped"
        assert dict(written[0].untrained.failed) == {"ValueError: boom": 1}

    run_virtual(scenario())


def test_every_turn_counts_the_same_in_a_mean_reward_as_in_evaluations():
    async def scenario():
        values = Values()
        events = figures_of(values)
        short, long = episode_of(0, 0, 0.0), episode_of(0, 1, 1.0)
        turns = tuple(turn_of(0, 1, hop) for hop in range(3))
        long = replace(long, turns=turns, rewards={turn.sample_id: 1.0 for turn in turns})
        group = replace(group_of(0, []), episodes=(short, long))
        events.emit(GroupPlayed(group=group))
        settle(events, 1)
        assert values["reward/solver"] == 0.75
        assert rewards_of(group.episodes) == {"solver": [0.0, 1.0, 1.0, 1.0]}

    run_virtual(scenario())


def test_a_step_that_ends_with_an_evaluation_is_shown_even_if_no_success_was_reported():
    async def scenario():
        screen, events = Screen(), RememberedEvents()
        monitor = monitor_of(screen, events=events)
        begin(events, 0)
        play(events, [0.0, 1.0])
        events.emit(EvaluationStarted(when="after", step=1))
        settle(events, 1)
        watching = asyncio.create_task(monitor.watch())
        await asyncio.sleep(0.1)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert (screen.views[-1].rewards, screen.views[-1].success_curve) == ({"solver": 0.5}, ())
        assert screen.views[-1].phase == "evaluating after training"

    run_virtual(scenario())


def test_an_evaluation_is_noted_on_the_screen_and_its_figures_belong_to_the_step_before_it():
    async def scenario():
        screen, values, events = Screen(), Values(), RememberedEvents()
        monitor_of(screen, values, events=events)
        found = Evaluation(
            versions={SOLVER: Version(3)}, episodes=8, failed=1, metrics={"success": 0.5}, rewards={SOLVER: 0.25}
        )
        events.emit(EvaluationStarted(when="between", step=3))
        events.emit(Evaluated(process=CONTROLLER, began=0.0, when="between", step=3, evaluation=asdict(found)))
        settle(events, 3)
        assert screen.views[-1].phase == "evaluating after step 3"
        assert screen.notes == ["evaluation after step 3, 8 held-out episodes, 1 failed: success 0.500"]
        assert (values["eval/team/success"], values["eval/reward/solver"]) == (0.5, 0.25)

    run_virtual(scenario())


def test_an_evaluation_of_which_all_failed_has_success_0_on_the_screen():
    async def scenario():
        screen, events = Screen(), RememberedEvents()
        monitor_of(screen, Values(), events=events)
        found = Evaluation(versions={SOLVER: Version(3)}, episodes=8, failed=8, metrics={"success": 0.0})
        events.emit(Evaluated(process=CONTROLLER, began=0.0, when="before", step=0, evaluation=asdict(found)))
        assert screen.notes == ["evaluation before training, 8 held-out episodes, 8 failed: success 0.000"]

    run_virtual(scenario())


async def one_step(events):
    """Four seconds of rollout; each trainer works 2 s in it and 2 s after it, the solver's update among them."""
    begin(events, 3)
    with rollout(events, 3):
        await asyncio.sleep(4)
        micro_batch(events, SOLVER, 0, 2.0)
        micro_batch(events, VERIFIER, 0, 2.0)
    await asyncio.sleep(1)
    micro_batch(events, SOLVER, 1, 1.0)
    began = events.now()
    await asyncio.sleep(1)
    updated(events, SOLVER, update(), began)
    micro_batch(events, VERIFIER, 1, 2.0)


def test_training_beside_rollout_is_hidden_and_updates_count_as_training():
    async def scenario():
        values = Values()
        events = figures_of(values)
        await one_step(events)
        settle(events, 4)
        assert values["overlap/training_s"] == 8.0
        assert values["overlap/training_hidden"] == 0.5
        assert (values["time/train_s"], values["time/rollout_s"], values["time/step_s"]) == (4.0, 4.0, 6.0)

    run_virtual(scenario())


def test_each_step_is_judged_alone():
    async def scenario():
        values = Values()
        events = figures_of(values)
        await one_step(events)
        settle(events, 4)
        await asyncio.sleep(1)
        micro_batch(events, SOLVER, 0, 1.0)
        settle(events, 5)
        assert (values["overlap/training_hidden"], values["overlap/training_s"]) == (0.0, 1.0)

    run_virtual(scenario())


def test_a_step_without_training_says_nothing_of_overlap():
    async def scenario():
        values = Values()
        settle(figures_of(values), 1)
        assert not {"overlap/training_hidden", "overlap/training_s", "time/train_s"} & values.keys()

    run_virtual(scenario())


def test_the_publish_lag_runs_from_an_update_to_its_publication_and_the_first_weights_have_none():
    async def scenario():
        values = Values()
        events = figures_of(values)
        published(events, SOLVER, Version(3))
        settle(events, 0)
        assert "publish_lag_s/solver" not in values
        updated(events, SOLVER, update(), events.now())
        await asyncio.sleep(2.5)
        published(events, SOLVER, Version(4))
        settle(events, 1)
        assert values["publish_lag_s/solver"] == 2.5

    run_virtual(scenario())


def test_staleness_counts_the_turns_that_an_update_is_made_from_and_length_bias_the_episodes_taken():
    async def scenario():
        values = Values()
        events = figures_of(values)
        events.emit(GroupPlayed(group=group_of(0, [0.0], tokens=2)))
        events.emit(GroupPlayed(group=group_of(1, [0.0], tokens=6)))
        taken = group_of(0, [0.0], tokens=2)
        events.emit(EpisodesTaken(episodes=taken.finished))
        turns = [turn_of(0, 0, 0, tokens=2, version=1), turn_of(0, 1, 0, tokens=6, version=3)]
        events.emit(TurnsTaken(policy=SOLVER, turns=turns))
        settle(events, 1)
        assert (values["staleness/solver/mean"], values["staleness/solver/max"]) == (0.5, 2)
        assert values["length_bias/ratio"] == 0.5

    run_virtual(scenario())


def test_the_verdicts_on_groups_are_figures_of_each_agent():
    async def scenario():
        values = Values()
        events = figures_of(values)
        for turns, mean in ((1, 1.0), (3, 0.0)):
            events.emit(
                GroupJudged(
                    group=GroupId(turns),
                    effects={AgentName("solver"): {"too_easy": 2}},
                    parts={AgentName("solver"): {"turns": turns, "means": {"outcome": mean}}},
                )
            )
        report = AgentReport(groups=3, effective=1, group_sizes=(2, 4))
        events.emit(GroupsCredited(groups=(GroupId(0),), report={AgentName("solver"): asdict(report)}, parts={}))
        settle(events, 1)
        assert (values["filter/solver/too_easy"], values["reward_part/solver/outcome"]) == (4, 0.25)
        assert (values["credit/solver/groups"], values["credit/solver/effective"]) == (3, 1)
        assert values["credit/solver/group_size"] == 3.0
        assert "credit/solver/notes" not in values

    run_virtual(scenario())


def test_the_journal_has_every_slice_of_training_and_rollout_by_its_own_clock():
    async def scenario():
        await asyncio.sleep(100)
        clock = asyncio.get_running_loop().time
        events = RememberedEvents(lambda: clock() - 100)
        monitor_of(Screen(), events=events)
        await one_step(events)
        slices = [(e.name, e.process, e.began, e.ended) for e in events.of(Timed)]
        assert slices == [
            ("micro_batch", "trainer/solver", 2.0, 4.0),
            ("micro_batch", "trainer/verifier", 2.0, 4.0),
            ("rollout_ended", "controller", 0.0, 4.0),
            ("micro_batch", "trainer/solver", 4.0, 5.0),
            ("updated", "trainer/solver", 5.0, 6.0),
            ("micro_batch", "trainer/verifier", 4.0, 6.0),
        ]
        first = events.of(MicroBatchDone)[0]
        assert (first.policy, first.micro_batch, first.rows, first.tokens) == (
            "solver",
            "solver/3/0",
            8,
            96,
        )
        assert events.of(Updated)[0].report["loss"] == 0.5
        assert len(list(trace_events(events.all))) > 6

    run_virtual(scenario())


async def fail_after(seconds, events):
    with phase(events, "rollout"):
        await asyncio.sleep(seconds)
        raise EngineError("no instance is left")


def test_a_phase_that_fails_is_timed_too_and_leaves_no_line():
    async def scenario():
        values = Values()
        events = figures_of(values)
        with pytest.raises(EngineError):
            await fail_after(2, events)
        await asyncio.sleep(1)
        settle(events, 1)
        assert (values["time/rollout_s"], values["time/step_s"]) == (2.0, 3.0)
        assert events.all == []

    run_virtual(scenario())


def test_queues_go_into_the_journal_when_they_change():
    async def scenario():
        events = RememberedEvents()
        await watched(monitor_of(Screen(), events=events), 10)
        (queues,) = events.of(QueueCounts)
        assert (queues.running, queues.queued, queues.lag_ms) == ({"solver": 0}, {"solver": 0}, 0)

    run_virtual(scenario())


def test_calls_that_wait_in_the_pool_are_queued():
    async def scenario():
        events, engines = RememberedEvents(), [ScriptedEngine(lambda one: "abc", latency_s=1.0) for _ in range(2)]
        async with InferencePool({SOLVER: engines}, PoolSettings(max_running=1)).open() as pool:
            calls = [asyncio.create_task(pool.generate(request(i))) for i in range(5)]
            await asyncio.sleep(1)
            await watched(monitor_of(Screen(), events=events, pool=pool), 0.1)
            for call in calls:
                call.cancel()
        (queues,) = events.of(QueueCounts)
        assert (queues.running, queues.queued) == ({"solver": 2}, {"solver": 3})

    run_virtual(scenario())


def test_the_loss_of_an_instance_does_not_end_the_watch():
    async def scenario():
        screen = Screen()
        ended = await watched(monitor_of(screen, engine=Leaving), 1.1)
        assert isinstance(ended, asyncio.CancelledError)
        alive, lost = ({"solver": 6}, {"solver": 4}), ({"solver": 0}, {"solver": 0})
        assert [(view.running, view.queued) for view in screen.views] == [alive, *[lost] * 4]

    run_virtual(scenario())


def test_a_screen_that_breaks_ends_the_watch_with_its_own_error():
    class Torn(Screen):
        def update(self, view):
            raise BrokenPipeError("the terminal is gone")

    async def scenario():
        assert isinstance(await watched(monitor_of(Torn()), 1), BrokenPipeError)

    run_virtual(scenario())


def test_lag_is_a_metric_of_each_step():
    async def scenario():
        values, events = Values(), RememberedEvents()
        await watched(monitor_of(Screen(), values, events=events), 1)
        settle(events, 1)
        return values

    in_virtual_time = run_virtual(scenario())
    assert in_virtual_time["lag/event_loop_ms"] == pytest.approx(0, abs=1e-6)
    assert in_virtual_time["lag/event_loop_max_ms"] == pytest.approx(0, abs=1e-6)


def test_the_view_says_what_of_a_step_was_not_trained_on():
    async def scenario():
        screen, events = Screen(), RememberedEvents()
        monitor_of(screen, events=events)
        begin(events, 0)
        play(events, [0.0, None, None])
        events.emit(GroupFiltered(group=GroupId(0), reason=FilterReason.FLAT))
        events.emit(UpdateSkipped(policy=SOLVER))
        settle(events, 1)
        begin(events, 1)
        play(events, [0.0, 1.0])
        settle(events, 2)
        first, second = (view.untrained for view in screen.views)
        assert first.lines == ["failed 2/3: failed", "filtered 1/1: flat", "no update: solver"]
        assert second.lines == []

    run_virtual(scenario())


@pytest.mark.parametrize(("evaluated_s", "rollout_s", "speed"), [(0.0, 2.0, 1.0), (3.0, 2.0, 2.5), (3.0, 10.0, 0.5)])
def test_the_speed_of_a_step_leaves_out_an_evaluation_unless_rollout_went_on_in_it(evaluated_s, rollout_s, speed):
    values = {"time/evaluate_s": evaluated_s, "time/rollout_s": rollout_s, "time/step_s": 2.0 + evaluated_s}
    tokens = {0.0: 2.0, 3.0: 5.0}[evaluated_s]
    assert tokens_per_s(values | {"rollout/tokens": tokens}) == speed


def test_the_time_that_is_left_follows_the_pace_of_this_command_alone():
    resumed = ProgressView(step=6, steps=10, elapsed_s=20.0, before=4)
    assert resumed.left_s == 40.0
    assert ProgressView(step=4, steps=10, elapsed_s=20.0, before=4).left_s is None


def test_training_is_hidden_only_where_devices_are_separate():
    """B20."""

    async def scenario():
        values = Values()
        clock = asyncio.get_running_loop().time
        events = RememberedEvents(clock)
        Figures(
            metrics=Metrics(clock, [values]), versions=Versions({SOLVER: Version(3)}), events=events, separate=False
        )
        await one_step(events)
        settle(events, 4)
        assert values["time/train_s"] == 4.0
        assert not {"overlap/training_hidden", "overlap/training_s"} & values.keys()

    run_virtual(scenario())


def test_a_line_of_user_code_that_holds_up_the_run_is_told_once():
    async def scenario():
        screen, events = Screen(), RememberedEvents(asyncio.get_running_loop().time)
        monitor_of(screen, events=events)
        for seconds in (2.04, 3.0):
            events.emit(LoopBlocked(place="team.py:61", seconds=seconds))
        for task in ("t-1", "t-2"):
            events.emit(EpisodeWaits(task=task, place="team.py:70", seconds=60.0, timeout_s=600.0))
        blocked, waits = screen.notes
        assert blocked.startswith(
            "team.py:61 kept all other episodes waiting for 2.0 s; write `await asyncio.sleep(s)`"
        )
        assert waits == (
            "an episode of task t-1 has waited for 60 s at team.py:70, and has no call under way; it ends as timed out "
            "after rollout.episode_timeout_s=600"
        )

    run_virtual(scenario())
