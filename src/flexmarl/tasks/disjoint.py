"""Decides whether a run would be evaluated on what it was trained on."""

from flexmarl.errors import ConfigError
from flexmarl.tasks.interface import TaskSource

MOST_COMPARED = 200_000


def check_disjoint(source: TaskSource, *, num_train: int, num_held_out: int) -> None:
    """Raises ConfigError naming the first held-out task whose prompt is among the first `num_train` training tasks.

    Of more than `MOST_COMPARED` training tasks only these many are looked at: a run of any length begins soon.
    """
    held_out = {task.prompt: task.input_id for task in reversed(source.held_out(num_held_out))}
    if not held_out:
        return
    if source.num_train is not None:
        num_train = min(num_train, source.num_train)
    for index in range(min(num_train, MOST_COMPARED)):
        task = source.train(index)
        if task.prompt in held_out:
            prompt = task.prompt if len(task.prompt) <= 80 else f"{task.prompt[:77]}..."
            raise ConfigError(
                f"tasks: training task '{task.input_id}' (position {index}) has the prompt of held-out task "
                f"'{held_out[task.prompt]}': {prompt!r}; remove it from one of the two"
            )
