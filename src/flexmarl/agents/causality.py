"""Causality on asyncio's tasks: which calls of an episode may have had a part in a call. No clock is asked.

A task knows of the calls it made itself, of those that were known where it was created, and of those of the tasks it
created that have ended. What it sends depends on what it knows then:

    draft = await team.writer.act(text)                             hop 0
    await asyncio.gather(team.critic.act(draft.text),               hop 1, after 0
                         team.editor.act(draft.text))               hop 2, after 0
    await team.writer.act("once more")                              hop 3, after 1 and 2
"""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class _Scope:
    """What one task knows of."""

    numbers: Iterator[int]
    """Of the next calls, of all tasks of the workflow."""
    known: int = 0
    """Calls, each the bit of its number."""
    created: "list[tuple[asyncio.Future[Any], _Scope]]" = field(default_factory=list)
    """Its tasks that may still learn of calls."""

    def look(self) -> int:
        """The calls that are known now."""
        for task, scope in self.created:
            if task.done():
                self.known |= scope.look()
        self.created = [(task, scope) for task, scope in self.created if not task.done()]
        return self.known


_SCOPE: ContextVar[_Scope | None] = ContextVar("scope", default=None)


@contextmanager
def traced() -> Iterator[None]:
    """Within the block the loop's tasks inherit what is known where they are created."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop.get_task_factory(), _Factory):
        loop.set_task_factory(_Factory(loop.get_task_factory()))
    token = _SCOPE.set(_Scope(itertools.count()))
    try:
        yield
    finally:
        _SCOPE.reset(token)


class _Factory:
    """Makes a loop's tasks as they were made before; each within a workflow has a scope of its own."""

    def __init__(self, make: Any) -> None:
        self._make = make or (lambda loop, coroutine, **kwargs: asyncio.Task(coroutine, loop=loop, **kwargs))

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, /, **kwargs: Any) -> asyncio.Future[Any]:
        creator = _SCOPE.get()
        if creator is None:
            return self._make(loop, coroutine, **kwargs)
        scope = _Scope(creator.numbers, creator.look())
        # A task keeps a copy of the variables as they are when it is made.
        token = _SCOPE.set(scope)
        try:
            task = self._make(loop, coroutine, **kwargs)
        finally:
            _SCOPE.reset(token)
        creator.created.append((task, scope))
        return task


class CallGraph:
    """The calls of one episode: which depend on which."""

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}
        """Of each hop."""
        self._hop_of: dict[int, int] = {}
        self._earlier: dict[int, int] = {}
        """What was known when a call was sent, by its number."""
        self._mine = 0
        """The numbers, as bits: a task may know of other episodes' calls too."""
        self._untraced = _Scope(itertools.count())
        """For seats that are tried outside a workflow: each call knows of all that were answered."""

    def sent(self, hop: int, extends: int | None = None) -> tuple[int, ...]:
        """Hops of the calls that a call sent now directly depends on, the one whose tokens it `extends` among them."""
        scope = _SCOPE.get() or self._untraced
        number, known = next(scope.numbers), scope.look()
        if extends is not None:
            parent = self._number_of[extends]
            known |= self._earlier[parent] | 1 << parent
        self._number_of[hop], self._hop_of[number], self._earlier[number] = number, hop, known
        self._mine |= 1 << number
        return self._latest(known & self._mine)

    def answered(self, hop: int) -> None:
        """The task that sent it goes on, and knows of it. Of a call that fails, nobody learns anything."""
        number = self._number_of[hop]
        (_SCOPE.get() or self._untraced).known |= self._earlier[number] | 1 << number

    def _latest(self, calls: int) -> tuple[int, ...]:
        """Those that none of the others depends on."""
        hops: list[int] = []
        while calls:
            number = calls.bit_length() - 1  # Sent last: none of the others can depend on it.
            hops.append(self._hop_of[number])
            calls &= ~(self._earlier[number] | 1 << number)
        return tuple(sorted(hops))
