"""What is seen of a run: figures by step, and a live view."""

import asyncio
from dataclasses import asdict

import pytest

from flexmarl.analysis.timeline import trace_events
from flexmarl.errors import EngineError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.metrics import Metrics
from flexmarl.events.progress import NullProgress
from flexmarl.events.serving_events import QueueCounts
from flexmarl.events.training_events import MicroBatchDone, Updated
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import EngineUse, PolicyName, Version, WorkerId
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine
from flexmarl.training.interface import UpdateReport
from tests.unit.inference.models import request
from tests.unit.orchestrator.groups import group_of

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")


class Values(dict):
    """A sink."""

    def write(self, step, values):
        self.update(values)

    def close(self):
        pass


class Screen(NullProgress):
    def __init__(self):
        self.views, self.stopped = [], False

    def update(self, view):
        self.views.append(view)

    def stop(self):
        self.stopped = True


def monitor_of(screen, *sinks, events=None, engine=ScriptedEngine, pool=None):
    """Its journal's clock starts now."""
    clock = asyncio.get_running_loop().time
    events = events or RememberedEvents(clock)
    monitor = Monitor(
        name="run",
        steps=5,
        metrics=Metrics(clock, sinks),
        progress=screen,
        pool=pool or InferencePool({SOLVER: [engine(lambda request: "a"), engine(lambda request: "a")]}),
        versions=Versions({SOLVER: Version(3)}),
        events=events,
        processes=lambda: 4,
    )
    monitor.events = events
    return monitor


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
        screen = Screen()
        monitor = monitor_of(screen)
        watching = asyncio.create_task(monitor.watch())
        await asyncio.sleep(0.9)
        monitor.begin(0, "rollout")
        monitor.group_finished(group_of(0, [0.0, 1.0, None]))
        await asyncio.sleep(0.2)
        monitor.flush(1)
        await asyncio.sleep(0.2)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert [view.phase for view in screen.views] == ["starting"] * 4 + ["rollout, 1 groups finished"] * 3
        assert [view.step for view in screen.views] == [0, 0, 0, 0, 0, 1, 1]
        last = screen.views[-1]
        assert (last.rewards, last.versions, last.running) == ({"solver": 0.5}, {"solver": 3}, {"solver": 0})
        assert last.processes == 4
        assert screen.stopped

    run_virtual(scenario())


def test_failed_episodes_are_counted_and_are_no_success():
    async def scenario():
        values = Values()
        monitor = monitor_of(Screen(), values)
        monitor.group_finished(group_of(0, [0.25, None, None, 0.75]))
        monitor.flush(1)
        assert values["rollout/episodes"] == 4
        assert values["rollout/failed_episodes"] == 2
        assert values["rollout/tokens"] == 8
        assert values["reward/solver"] == 0.5
        assert values["team/success"] == 0.0

    run_virtual(scenario())


def test_a_step_that_ends_with_an_evaluation_is_shown_even_if_no_success_was_reported():
    async def scenario():
        screen = Screen()
        monitor = monitor_of(screen)
        monitor.begin(0, "rollout")
        monitor.group_finished(group_of(0, [0.0, 1.0]))
        monitor.begin(1, "evaluating after training")
        monitor.flush(1)
        watching = asyncio.create_task(monitor.watch())
        await asyncio.sleep(0.1)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert (screen.views[-1].rewards, screen.views[-1].success_curve) == ({"solver": 0.5}, ())

    run_virtual(scenario())


async def one_step(monitor):
    """Four seconds of rollout; each trainer works 2 s in it and 2 s after it, the solver's update among them."""
    monitor.begin(3, "rollout and training")
    with monitor.rollout():
        await asyncio.sleep(4)
        micro_batch(monitor.events, SOLVER, 0, 2.0)
        micro_batch(monitor.events, VERIFIER, 0, 2.0)
    await asyncio.sleep(1)
    micro_batch(monitor.events, SOLVER, 1, 1.0)
    began = monitor.events.now()
    await asyncio.sleep(1)
    updated(monitor.events, SOLVER, update(), began)
    micro_batch(monitor.events, VERIFIER, 1, 2.0)


def test_training_beside_rollout_is_hidden_and_updates_count_as_training():
    async def scenario():
        values = Values()
        monitor = monitor_of(Screen(), values)
        await one_step(monitor)
        monitor.flush(4)
        assert values["overlap/training_s"] == 8.0
        assert values["overlap/training_hidden"] == 0.5
        assert (values["time/train_s"], values["time/rollout_s"], values["time/step_s"]) == (4.0, 4.0, 6.0)

    run_virtual(scenario())


def test_each_step_is_judged_alone():
    async def scenario():
        values = Values()
        monitor = monitor_of(Screen(), values)
        await one_step(monitor)
        monitor.flush(4)
        await asyncio.sleep(1)
        micro_batch(monitor.events, SOLVER, 0, 1.0)
        monitor.flush(5)
        assert (values["overlap/training_hidden"], values["overlap/training_s"]) == (0.0, 1.0)

    run_virtual(scenario())


def test_a_step_without_training_says_nothing_of_overlap():
    async def scenario():
        values = Values()
        monitor_of(Screen(), values).flush(1)
        assert not {"overlap/training_hidden", "overlap/training_s", "time/train_s"} & values.keys()

    run_virtual(scenario())


def test_the_journal_has_every_slice_of_training_and_rollout_by_its_own_clock():
    async def scenario():
        await asyncio.sleep(100)
        clock = asyncio.get_running_loop().time
        events = RememberedEvents(lambda: clock() - 100)
        await one_step(monitor_of(Screen(), events=events))
        slices = [(e.name, e.process, e.began, e.ended) for e in events.all]
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


def test_a_rollout_that_fails_is_in_the_journal_too():
    async def scenario():
        events = RememberedEvents()
        with pytest.raises(EngineError), monitor_of(Screen(), events=events).rollout():
            raise EngineError("no instance is left")
        assert [entry.name for entry in events.all] == ["rollout_ended"]

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
        values = Values()
        monitor = monitor_of(Screen(), values)
        await watched(monitor, 1)
        monitor.flush(1)
        return values

    in_virtual_time = run_virtual(scenario())
    assert in_virtual_time["lag/event_loop_ms"] == pytest.approx(0, abs=1e-6)
    assert in_virtual_time["lag/event_loop_max_ms"] == pytest.approx(0, abs=1e-6)
