"""Tables of things that users name in a config, and the loading of the files that fill them."""

import difflib
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from flexmarl.errors import ConfigError

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Functions of one kind by name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._table: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator that gives a function its name. A name is given once."""

        def add(function: F) -> F:
            if name in self._table:
                raise ConfigError(
                    f"two {self._kind}s are called {name!r}: {_place(self._table[name])} and {_place(function)}; "
                    "rename one"
                )
            self._table[name] = function
            return function

        return add

    def __getitem__(self, name: str) -> F:
        """The function of this name; ConfigError with the nearest names if there is none."""
        if name not in self._table:
            near = difflib.get_close_matches(name, self._table, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ConfigError(f"there is no {self._kind} {name!r}; {hint}there are: {', '.join(self) or 'none'}")
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        """The names, sorted."""
        return iter(sorted(self._table))

    def __contains__(self, name: object) -> bool:
        return name in self._table


def load_code(path: str | Path) -> ModuleType:
    """Imports a user's file by its path, once per process, so that what it registers can be named in a config."""
    path = Path(path).resolve()
    # Named by path: two files called team.py are two modules, and what they define can be pickled.
    name = f"flexmarl_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"code: {str(path)!r} is no Python file; give the path of a .py file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ConfigError(f"code: {path}:{_line(error, path)}: {type(error).__name__}: {error}") from error
    return module


def _line(error: Exception, path: Path) -> int:
    """The line of the file at which the error left it."""
    if isinstance(error, SyntaxError):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if frame.filename == str(path)), 1)


def _place(function: Callable[..., object]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
