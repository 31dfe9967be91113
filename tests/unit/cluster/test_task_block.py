"""A block with tasks: its own errors come out as they were raised, those of its tasks as a group."""

import asyncio

import pytest

from flexmarl.cluster.concurrency import task_block


async def fails():
    raise ValueError("a task's")


class Block:
    """A block with one task, which waits for ever unless another one is given."""

    def __init__(self, task=None):
        self._task, self.cancelled = task or self._waits, False

    async def run(self, error=None, cause=None, *, on_cancel=None):
        async with task_block() as tasks:
            tasks.create_task(self._task())
            await asyncio.sleep(0)
            if error is not None:
                raise error from cause
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if on_cancel is not None:
                    raise on_cancel from None
                raise

    async def _waits(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True


def test_an_error_of_the_block_cancels_its_tasks_and_comes_out_as_it_was_raised():
    block, cause, error = Block(), OSError("the reason"), KeyError("the block's")
    with pytest.raises(KeyError) as caught:
        asyncio.run(block.run(error, cause))
    assert caught.value is error
    assert (error.__cause__, error.__context__) == (cause, None)
    assert block.cancelled


def test_an_error_of_a_task_ends_the_block_and_comes_as_a_group():
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(Block(fails).run())
    assert [str(error) for error in caught.value.exceptions] == ["a task's"]


def test_errors_of_both_are_in_the_group():
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(Block(fails).run(on_cancel=KeyError("the block's")))
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


def test_a_group_that_the_block_raises_is_not_unwrapped():
    raised = ExceptionGroup("two", [ValueError("a"), ValueError("b")])
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(Block().run(raised))
    assert caught.value is raised


def test_cancelling_the_block_cancels_its_tasks():
    async def scenario():
        block = Block()
        running = asyncio.create_task(block.run())
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert block.cancelled

    asyncio.run(scenario())


def test_a_task_that_failed_in_the_end_leaves_timeouts_around_its_block_as_they_were():
    """asyncio's own groups leave a request of cancellation behind until Python 3.13."""

    async def scenario():
        async with asyncio.timeout(0.01):
            with pytest.raises(ExceptionGroup):
                async with task_block() as tasks:
                    tasks.create_task(fails())
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
