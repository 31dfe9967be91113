"""The error model: whose fault an error is, where it is recorded, and who may try again.

| class           | whose fault            | recorded                                | retried by                      |
|-----------------|------------------------|-----------------------------------------|---------------------------------|
| ConfigError     | the user's settings    | printed, exit code 2                    | nobody: the user changes a key  |
| MissingExtra    | the installation       | printed, exit code 2                    | nobody: the user installs it    |
| EpisodeError    | a workflow or a tool   | the episode's record; the run continues | the admission rule              |
| EngineError     | an inference engine    | the failed turn's record                | the pool, then the episode      |
| StoreError      | the experience store   | the journal; ends the run               | the user, with `--resume`       |
| CreditError     | a workflow's rewards   | the journal; ends the run               | the user, who changes it        |
| TrainingError   | a trainer              | the journal; ends the run               | the user, with `--resume`       |
| RankLost        | a process that died    | `worker_lost` in the journal            | its group, from a copy, if any  |
| ObjectError     | room for weights       | the journal; ends the run               | the user, with `--resume`       |
| WorkerError     | a process that died    | `worker_lost` in the journal            | the pool, with a new engine     |
| CheckpointError | a file                 | printed, exit code 1                    | the user, with an older one     |

A failed episode is a record; a failed step is an exception. Cancellation is neither: it always passes through.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import requires
from traceback import walk_tb
from types import FrameType, ModuleType

from flexmarl.imports import collected_later

MAX_TEXT = 10_000
"""Characters of an error's text that are kept."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters except tab and newline."""


class FlexmarlError(Exception):
    """Any error that flexmarl raises on purpose; its text says what would work."""


class ConfigError(FlexmarlError):
    """A setting is wrong: the text names the key, shows the value and says what would work."""


class MissingExtra(ConfigError):
    """A feature needs packages that the core install leaves out; the text names the extra."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the extra '{extra}': pip install {packages_of(extra)}")
        self.extra = extra


def packages_of(extra: str) -> str:
    """The packages of an extra, as `pip install` takes them, e.g. `'pyarrow>=22'`.

    They are named by themselves: `flexmarl[...]` would be looked for on an index that does not have it.
    """
    named = [line.partition(";") for line in requires("flexmarl") or ()]
    wanted = f"extra == '{extra.replace('_', '-')}'"  # As metadata spells it.
    found = [package.strip() for package, _, marker in named if marker.replace('"', "'").strip() == wanted]
    return " ".join(f"'{package}'" for package in found) or f"'flexmarl[{extra}]'"


class EpisodeError(FlexmarlError):
    """A workflow, tool or environment failed: the episode is recorded as failed and masked from training."""


class EngineError(FlexmarlError):
    """An inference engine could not serve a request."""


class StoreError(FlexmarlError):
    """The experience store refused an operation or lost contact; everything that it acknowledged is safe."""


class StoreInUse(StoreError):
    """Another process runs on the experience store; the text has its process id."""


class ObjectError(FlexmarlError):
    """Weights could not be stored or fetched. The text says why."""


class ObjectSpaceError(ObjectError):
    """An object finds no room on a node. The text says how to make it."""


class TransitionError(StoreError):
    """A row or group was asked to make a move that its life cycle does not have."""


class CreditError(FlexmarlError):
    """Rewards or tags from which no advantage can be computed; the text names the sample or the group."""


class TrainingError(FlexmarlError):
    """A trainer could not accumulate, step or publish."""


class RankLost(TrainingError):
    """A training process of a place has died, or does not answer."""


class WorkerError(FlexmarlError):
    """A worker's process has died, perhaps during a call to it."""


class CheckpointError(FlexmarlError):
    """A checkpoint is missing, incomplete or of another run."""


def cause_of(error: BaseException) -> BaseException:
    """The first FlexmarlError in an exception group, else the group's first error; any other error is its own cause.

    >>> cause_of(ExceptionGroup("two tasks", [ValueError("torn"), EngineError("lost")]))
    EngineError('lost')
    """
    left, first = [error], None
    while left:
        one = left.pop()
        if isinstance(one, BaseExceptionGroup):
            left.extend(reversed(one.exceptions))
        elif isinstance(one, FlexmarlError):
            return one
        elif first is None:
            first = one
    assert first is not None, "an exception group holds an exception"
    return first


def described(error: BaseException) -> str:
    """Type and text of an error; the text alone of a FlexmarlError, which says enough.

    >>> described(KeyError("answer"))
    "KeyError: 'answer'"
    """
    return text_of(error) if isinstance(error, FlexmarlError) else f"{type_name(error)}: {text_of(error)}"


def place_of(error: BaseException) -> str:
    """File and line of the user's code at which an error was raised, e.g. `team.py:61`; "" without a traceback.

    It is the innermost line that is neither of this package, nor of Python's library, nor of an installed package that
    is no plug-in (`count_as_users`). If there is none, it is the innermost line of all. The error that an error was
    raised from counts first.
    """
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None and len(causes) < MOST_CAUSES:
        causes.append(causes[-1].__cause__)
    innermost = ""
    for cause in reversed(causes):
        lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(cause.__traceback__)]
        if found := users_line(lines):
            return found
        innermost = innermost or next((_as_place(*line) for line in reversed(lines)), "")
    return innermost


def frame_of(thread: int | None) -> FrameType | None:
    """The frame that a thread runs now; None if it has ended.

    Python before 3.11.9 makes objects while it holds a lock that a thread needs to start. A collection at that time may
    wait for such a thread, and the process stands still for ever (issue 106883 of CPython).
    """
    with collected_later():
        return sys._current_frames().get(thread or 0)  # noqa: TID251


def users_line(lines: Sequence[tuple[str, int]]) -> str:
    """The last of the lines, each a file and a number, that is in the user's own code; "" if none is."""
    for file, number in reversed(lines):
        installed = "site-packages" in file and not file.startswith(tuple(_PLUGINS))
        if not installed and not file.startswith(_NOT_THE_USERS):
            return _as_place(file, number)
    return ""


def count_as_users(module: ModuleType) -> None:
    """From now on, lines of an installed module, or of the package that it is, are of the user's own code."""
    if module.__file__ is not None:
        is_package = hasattr(module, "__path__")
        _PLUGINS.add(os.path.dirname(module.__file__) + os.sep if is_package else module.__file__)


_PLUGINS = set[str]()
"""How file names of installed plug-ins begin."""


def _as_place(file: str, number: int) -> str:
    return writable(f"{os.path.basename(file)}:{number}")


MOST_CAUSES = 20
"""Errors that are searched in a chain of causes; a chain may be a circle."""
_NOT_THE_USERS = (os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep, "<frozen ", "<string>")
"""How file names of this package, of Python's library, of frozen modules and of dataclasses' own methods begin."""


def type_name(error: BaseException) -> str:
    """Name of an error's type, even if its metaclass overrides `__name__`."""
    return writable(type.__dict__["__name__"].__get__(type(error)))


def text_of(error: BaseException) -> str:
    """The text of any error, made `writable`. Raises nothing but KeyboardInterrupt."""
    try:
        return writable(str(error))
    except KeyboardInterrupt:
        raise
    except BaseException as broken:  # A foreign exception's `__str__` may raise anything.
        return f"(its __str__ raised {type_name(broken)})"


def writable(text: str) -> str:
    """A text that any file, database or terminal accepts: surrogates and control characters escaped, length bounded.

    >>> writable("half a pair: \\ud83d")
    'half a pair: \\\\ud83d'
    """
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}... ({len(text)} characters)"
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), encodable)


def is_unicode(text: str) -> bool:
    """True if UTF-8 can encode the text; it cannot if the text holds half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def boundary(kind: type[FlexmarlError], doing: str, *, users_code: bool = False) -> Iterator[None]:
    """Turns any foreign exception inside the block into `kind`, saying what was being done.

    A FlexmarlError and cancellation pass unchanged. An exception group counts as its cause (`cause_of`). Where
    `users_code` is called, the text ends with the file and line that raised it.

    >>> with boundary(EpisodeError, "scoring task 7"):
    ...     int("four")
    Traceback (most recent call last):
    ...
    flexmarl.errors.EpisodeError: scoring task 7: ValueError: invalid literal for int() with base 10: 'four'
    """
    try:
        yield
    except FlexmarlError:
        raise
    except Exception as error:
        cause = cause_of(error)
        if isinstance(cause, FlexmarlError):
            raise cause from error
        place = place_of(cause) if users_code else ""
        raise kind(f"{doing}: {described(cause)}{place and f' ({place})'}") from error
