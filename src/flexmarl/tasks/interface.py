"""Interface of a task source, and the rules of sound tasks.

No held-out prompt is trained on, and each task can be played and recorded.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

from flexmarl.errors import ConfigError, is_unicode, writable
from flexmarl.records import Spoken, Task

Split = Literal["train", "held_out"]


class SourceExhausted(ConfigError):
    """A finite source was asked for a task past its end; the text names the position."""


class TaskSource(Protocol):
    """Tasks by position. The same settings and seed give the same task at the same position, in any process and for any
    order of calls. One integer is therefore all that a run must remember of its source."""

    @property
    def num_train(self) -> int | None:
        """Number of positions that `train` has, all epochs together; None: no end."""
        ...

    def train(self, index: int) -> Task:
        """The task at position `index`, from 0. Raises SourceExhausted past the end."""
        ...

    def held_out(self, n: int) -> tuple[Task, ...]:
        """The first n held-out tasks, or all if there are fewer; never trained on."""
        ...


MOST_COMPARED = 200_000


def check_disjoint(source: TaskSource, *, num_train: int, num_held_out: int) -> None:
    """Raises ConfigError naming the first held-out task whose prompt is among the first `num_train` training tasks."""
    for index, task, held_out in shared_prompts(source, num_train=num_train, num_held_out=num_held_out):
        prompt = task.prompt if len(task.prompt) <= 80 else f"{task.prompt[:77]}..."
        raise ConfigError(
            f"tasks: training task '{task.input_id}' (position {index}) has the prompt of held-out task "
            f"'{held_out}': {prompt!r}; remove it from one of the two"
        )


def shared_prompts(source: TaskSource, *, num_train: int, num_held_out: int) -> Iterator[tuple[int, Task, str]]:
    """Yields each of the first `num_train` training tasks whose prompt is held out: its position, it, the other's id.

    Looks at no more than `MOST_COMPARED` training tasks, so that a run of any length begins soon.
    """
    held_out = {task.question: task.input_id for task in reversed(source.held_out(num_held_out))}
    if not held_out:
        return
    if source.num_train is not None:
        num_train = min(num_train, source.num_train)
    for index in range(min(num_train, MOST_COMPARED)):
        task = source.train(index)
        if task.question in held_out:
            yield index, task, held_out[task.question]


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters and line ends."""


def checked_task(task: Any, where: str) -> Task:
    """Returns the task. Raises ConfigError that names `where` and the fault if the task is not sound.

    The id must be one line of text, because it names rows, calls and lines of the journal. UTF-8 must be able to encode
    all texts; JSON and broken tools sometimes write a lone surrogate, half of a character, which it cannot.
    """
    if not isinstance(task, Task):
        raise ConfigError(f"{where}: a task must be a flexmarl.records.Task, got {type(task).__name__}")
    for name in ("input_id", "prompt", "reference"):
        text = getattr(task, name)
        if not isinstance(text, str):
            raise ConfigError(f"{where}: the {name} must be a text, got {writable(repr(text))[:80]}")
        if not is_unicode(text):
            at = next(place for place, letter in enumerate(text) if not is_unicode(letter))
            raise ConfigError(
                f"{where}: the {name} holds half a surrogate pair, {text[at]!r}, at character {at}, which UTF-8 cannot "
                f"encode; remove it, or write the whole character"
            )
    check_opening(task.opening, where)
    if not task.input_id.strip():
        raise ConfigError(f"{where}: the input_id {task.input_id!r} is blank; give the task a name of its own")
    if found := _CONTROL.search(task.input_id):
        raise ConfigError(
            f"{where}: the input_id {task.input_id[:80]!r} holds {found[0]!r}; it must be one line without control "
            f"characters"
        )
    return task


def check_opening(opening: Any, where: str) -> None:
    """Raises ConfigError unless these messages can stand before a prompt: a system prompt, then rounds of user and
    assistant."""
    expected = "user"
    for number, message in enumerate(opening):
        if not isinstance(message, Spoken) or not isinstance(message.content, str):
            raise ConfigError(
                f"{where}: message {number}: must be a flexmarl.records.Spoken with a text, got {str(message)[:80]!r}"
            )
        if not is_unicode(message.content):
            raise ConfigError(
                f"{where}: message {number}: holds half a surrogate pair, which UTF-8 cannot encode; remove it"
            )
        if message.role == "system" and number == 0:
            continue
        if message.role != expected:
            raise ConfigError(
                f"{where}: message {number}: has the role {message.role!r}, and {expected!r} is due; a system prompt "
                f"may come first, then user and assistant take turns, and the last message, the prompt, is the user's"
            )
        expected = "assistant" if expected == "user" else "user"
    if expected != "user":
        raise ConfigError(f"{where}: the message before the prompt is the user's; an assistant's must stand between")


def check_params(
    function: Callable[..., object], params: Mapping[str, Any], *, given: int, key: str, name: str
) -> None:
    """Raises ConfigError that names the key of a parameter which a plug-in's function lacks, or does not get.

    `given`: the number of arguments that it gets besides, before them.
    """
    parameters = list(inspect.signature(function).parameters.values())[given:]
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    takes_any = len(known) < len(parameters)
    required = {parameter.name for parameter in parameters if parameter.default is parameter.empty} & known
    takes = f"'{name}' takes {', '.join(sorted(known)) or 'none'}"
    if (unknown := sorted(set(params) - known)) and not takes_any:
        raise ConfigError(f"{key}.{unknown[0]}: unknown; {takes}")
    if missing := sorted(required - set(params)):
        raise ConfigError(f"{key}.{missing[0]}: missing; {takes}")
