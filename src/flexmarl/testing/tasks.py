"""Conformance check of task sources, and a small source to write tests with.

    check_task_source(lambda: MySource(seed=0))

It runs without a test framework.
"""

import pickle
from collections.abc import Callable

from flexmarl.records import Task
from flexmarl.tasks import SourceExhausted, TaskSource, check_disjoint


def check_task_source(make: Callable[[], TaskSource], *, num_tasks: int = 100) -> None:
    """Raises AssertionError naming the law that the source breaks in its first `num_tasks` tasks."""
    source = make()
    n = num_tasks if source.num_train is None else min(num_tasks, source.num_train)
    tasks = [source.train(index) for index in range(n)]
    assert [source.train(index) for index in reversed(range(n))] == tasks[::-1], "the position alone decides"
    assert [make().train(index) for index in (0, n - 1)] == [tasks[0], tasks[-1]], "so it does in another instance"
    held_out = source.held_out(num_tasks)
    assert make().held_out(num_tasks) == held_out, "the same tasks are held out in another instance"
    assert source.held_out(1) == held_out[:1], "fewer held-out tasks are the first of more"
    assert len({task.input_id for task in held_out}) == len(held_out), "held-out tasks have ids of their own"
    for task in (*tasks, *held_out):
        assert pickle.loads(pickle.dumps(task)) == task, f"task {task.input_id} crosses processes"
    check_disjoint(source, num_train=n, num_held_out=num_tasks)
    if source.num_train is not None:
        _check_end(source, source.num_train)


def _check_end(source: TaskSource, end: int) -> None:
    try:
        source.train(end)
    except SourceExhausted as error:
        said = str(error)
    else:
        said = "nothing"
    assert str(end) in said, f"past the end is SourceExhausted naming position {end}; the source said {said}"


class FakeTasks:
    """Finite or endless sums: `0+1`, `1+1`, ...; held-out ones have another second term."""

    def __init__(self, num_train: int | None = None) -> None:
        self.num_train = num_train

    def train(self, index: int) -> Task:
        """Returns the task `{index}+1`. Raises SourceExhausted past the end."""
        if self.num_train is not None and index >= self.num_train:
            raise SourceExhausted(f"there are {self.num_train} tasks, none at position {index}")
        return Task(input_id=f"sum-{index}", prompt=f"{index}+1", reference=str(index + 1))

    def held_out(self, n: int) -> tuple[Task, ...]:
        """Returns the first `n` tasks `{index}+2`."""
        return tuple(
            Task(input_id=f"held-out-{index}", prompt=f"{index}+2", reference=str(index + 2)) for index in range(n)
        )
