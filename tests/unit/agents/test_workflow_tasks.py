"""Tasks of workflows: what they may do to the loop they run on, and how they end."""

import asyncio
import contextlib

import pytest

from flexmarl.agents.workflow_tasks import Outside, WorkflowTasks, end_leftover_tasks
from flexmarl.errors import EpisodeError
from flexmarl.simulator.virtual_time import run_virtual


async def swallow(counts):
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
        counts.append(asyncio.get_running_loop().time())


def started(run, *args):
    tasks = WorkflowTasks()
    return tasks, tasks.start(run, *args, name="workflow")


@pytest.mark.parametrize("in_a_task", [False, True])
def test_sys_exit_fails_its_task_and_not_the_loop(in_a_task):
    async def leave():
        raise SystemExit(3)

    async def workflow():
        await (asyncio.create_task(leave()) if in_a_task else leave())

    async def scenario():
        _, task = started(workflow)
        await asyncio.wait([task])
        assert isinstance(task.exception(), EpisodeError)
        assert "sys.exit(3)" in str(task.exception())

    run_virtual(scenario())


def test_a_workflow_that_ends_when_it_is_cancelled_has_time_to_clean_up():
    cleaned = []

    async def workflow():
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(2)
            cleaned.append(True)

    async def scenario():
        tasks, task = started(workflow)
        await asyncio.sleep(1)
        assert await tasks.end(task, grace_s=3)
        assert task.cancelled()
        assert cleaned

    run_virtual(scenario())


@pytest.mark.parametrize("parallel", [False, True])
def test_what_is_given_up_is_never_resumed(parallel):
    woke: list[float] = []

    async def workflow():
        await (asyncio.gather(*(swallow(woke) for _ in range(3))) if parallel else swallow(woke))

    async def scenario():
        tasks, task = started(workflow)
        await asyncio.sleep(5.5)
        assert not await tasks.end(task, grace_s=2)
        woke.clear()
        await asyncio.sleep(100)
        assert task.cancelled()

    run_virtual(scenario())
    assert not woke


def test_a_workflow_that_takes_its_cancellation_back_is_given_up_all_the_same():
    woke: list[float] = []

    async def workflow():
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()
            woke.append(asyncio.get_running_loop().time())

    async def scenario():
        tasks, task = started(workflow)
        await asyncio.sleep(5.5)
        assert not await tasks.end(task, grace_s=2)
        woke.clear()
        await asyncio.sleep(100)
        assert task.cancelled()

    run_virtual(scenario())
    assert not woke


def test_a_task_that_nobody_has_cancelled_survives_its_workflow():
    """Others may use it: a connection, say, that the first episode opened."""
    woke: list[float] = []

    async def serve():
        for _ in range(10):
            await asyncio.sleep(1)
            woke.append(asyncio.get_running_loop().time())

    async def workflow():
        shared.append(asyncio.create_task(serve()))
        await swallow([])

    shared: list[asyncio.Task] = []

    async def scenario():
        tasks, task = started(workflow)
        await asyncio.sleep(1.5)
        assert not await tasks.end(task, grace_s=2)
        await shared[0]

    run_virtual(scenario())
    assert len(woke) == 10


def test_at_the_end_nothing_that_workflows_left_behind_goes_on():
    woke: list[float] = []

    async def workflow():
        asyncio.create_task(swallow(woke))  # noqa: RUF006

    async def scenario():
        _, task = started(workflow)
        await task
        await end_leftover_tasks(grace_s=2)
        woke.clear()
        await asyncio.sleep(100)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(scenario())
    assert not woke


def test_the_loop_makes_its_tasks_as_before_once_the_last_one_has_ended():
    made: list[str] = []

    async def workflow():
        await asyncio.create_task(asyncio.sleep(1))

    async def scenario():
        loop = asyncio.get_running_loop()
        make = loop.get_task_factory()
        loop.set_task_factory(ours := lambda *args, **how: made.append("task") or make(*args, **how))
        for _ in range(2):
            await started(workflow)[1]
            assert loop.get_task_factory() is ours
        assert len(made) == 4
        loop.set_task_factory(None)
        await started(workflow)[1]
        assert loop.get_task_factory() is None
        loop.set_task_factory(make)

    run_virtual(scenario())


def test_what_the_system_does_for_a_workflow_is_none_of_its_tasks():
    async def serve():
        await asyncio.sleep(5)
        return "served"

    async def workflow():
        with Outside():
            serving.append(asyncio.create_task(serve()))
        await swallow([])

    serving: list[asyncio.Task] = []

    async def scenario():
        tasks, task = started(workflow)
        await asyncio.sleep(1)
        await tasks.end(task, grace_s=1)
        await end_leftover_tasks(grace_s=1)
        assert await serving[0] == "served"

    run_virtual(scenario())


@pytest.mark.parametrize("number", [100, 400])
def test_to_make_a_task_looks_at_no_other(number):
    """Ten thousand acts that are started together took the event loop minutes."""
    looks = []

    class Seen(asyncio.Task):
        def done(self):
            looks.append(self)
            return super().done()

    async def workflow():
        await asyncio.gather(*(asyncio.sleep(1) for _ in range(number)))

    async def scenario():
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coroutine, **how: Seen(coroutine, loop=loop, **how))
        await started(workflow)[1]

    run_virtual(scenario())
    assert len(looks) <= 5 * number
