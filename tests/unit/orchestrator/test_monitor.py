"""What is seen of a run: figures by step, and a live view."""

import asyncio

from flexmarl.inference.pool import InferencePool
from flexmarl.observability.metrics import Metrics
from flexmarl.observability.progress import NullProgress
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import PolicyName, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine
from tests.unit.orchestrator.groups import group_of

SOLVER = PolicyName("solver")


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


def monitor_of(screen, *sinks):
    clock = asyncio.get_running_loop().time
    pool = InferencePool({SOLVER: [ScriptedEngine(lambda request: "a"), ScriptedEngine(lambda request: "a")]})
    versions = Versions({SOLVER: Version(3)})
    return Monitor(name="run", steps=5, metrics=Metrics(clock, sinks), progress=screen, pool=pool, versions=versions)


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
        assert [view.phase for view in screen.views] == ["starting"] * 4 + ["rollout, 1 groups finished"] * 2
        assert [view.step for view in screen.views] == [0, 0, 0, 0, 0, 1]
        last = screen.views[-1]
        assert (last.rewards, last.versions, last.running) == ({"solver": 0.5}, {"solver": 3}, {"solver": 0})
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
