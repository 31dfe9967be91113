"""Object held for others: the worker's side of a call, the same in any process; requests and replies are bytes."""

import asyncio
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from flexmarl.errors import FlexmarlError

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Host:
    """Makes one object and calls its methods, on the event loop of its process.

    >>> host = Host()
    >>> answer(asyncio.run(host.make(request(list, "abc"))))
    >>> answer(asyncio.run(host.call(request("index", "b"))))
    1
    """

    def __init__(self, *, path: Sequence[str] = (), threads: int | None = None) -> None:
        """Sets where modules are found and how many threads torch gets; must come before anything imports torch."""
        sys.path.extend(folder for folder in path if folder not in sys.path)
        if threads is not None:
            os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
        self._hosted: Any = None

    async def pid(self) -> int:
        """Process that this is."""
        return os.getpid()

    async def hold(self) -> None:
        """Never returns: it fails when the process dies, and so whoever waits for it knows."""
        await asyncio.Event().wait()

    async def make(self, make: bytes) -> bytes:
        """Makes the object from a request whose first part is called with the others."""
        return await replied(lambda: self._make(*pickle.loads(make)))

    async def call(self, call: bytes) -> bytes:
        """Answers a request whose first part is a method's name."""
        return await replied(lambda: self._call(*pickle.loads(call)))

    def _make(self, make: Callable[..., Any], args: Sequence[Any]) -> None:
        self._hosted = make(*args)

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        return getattr(self._hosted, method)(*args)


def request(what: str | Callable[..., Any], *args: Any) -> bytes:
    """What `Host` reads. Plain pickle, in one piece: arrays arrive writable, unlike those in Ray's own messages."""
    return pickle.dumps((what, args), protocol=5)


def answer(reply: bytes, *, whose: str = "") -> Any:
    """The result in a reply; raises the error in it, with the worker's traceback as a note."""
    result, error, origin = pickle.loads(reply)
    if error is None:
        return result
    error.add_note(f"in {whose or 'a worker'}:\n{origin}")
    raise error


async def replied(work: Callable[[], Any]) -> bytes:
    """Result or error of the work, async or not, as `answer` reads it."""
    try:
        result = work()
        if inspect.isawaitable(result):
            result = await result
        return pickle.dumps((result, None, ""), protocol=5)
    except Exception as error:
        return pickle.dumps((None, portable(error), traceback.format_exc()), protocol=5)


def portable(error: Exception) -> Exception:
    """The error itself if it survives pickling, else the nearest thing to it that does."""
    for candidate in (error, Bare(error)):
        try:
            back = pickle.loads(pickle.dumps(candidate))
        except Exception:  # whatever its own __init__ raises, the next form is tried
            continue
        if type(back) is type(error):
            return candidate
    kind = FlexmarlError if isinstance(error, FlexmarlError) else RuntimeError
    return kind(f"{type(error).__name__}: {error}")


class Bare(Exception):
    """Pickles as another error that is rebuilt without its `__init__`, for one with arguments of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self._error), self._error.args, self._error.__dict__)


def rebuild(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """An error of this class with these arguments and attributes, its `__init__` not called."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
