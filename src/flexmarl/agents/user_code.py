"""Loads the files of the user's own that a config lists under `code`."""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from flexmarl.errors import ConfigError


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
