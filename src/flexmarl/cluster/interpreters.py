"""Other Python interpreters of this machine, for residents with an environment of their own.

They must have this process's Python, Ray and flexmarl: objects cross between processes as pickles.
"""

import json
import subprocess
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flexmarl.errors import ConfigError

ANSWER_S = 60.0
"""Seconds that an interpreter may take to answer: it imports nothing."""
_ASK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
def of(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None
facts = {"Python": ".".join(map(str, sys.version_info[:3])), "ray": of("ray"), "flexmarl": of("flexmarl")}
print(json.dumps([facts, {package: find_spec(package) is not None for package in sys.argv[1:]}]))
"""


def require_interpreter(python: Path, key: str, *, packages: tuple[str, ...] = ()) -> None:
    """Raises ConfigError that begins with `key` unless an interpreter has ours of all, and `packages`."""
    facts, has = _facts(python, key, packages)
    ours = {"Python": ".".join(map(str, sys.version_info[:3])), "ray": version("ray"), "flexmarl": version("flexmarl")}
    unlike = [
        f"{name} {facts[name] or 'missing'} there, {mine} here" for name, mine in ours.items() if facts[name] != mine
    ]
    if unlike:
        raise ConfigError(
            f"{key}: {python} has another environment than this process: {'; '.join(unlike)}; install the same "
            "versions there, flexmarl with `pip install --no-deps`"
        )
    if missing := [package for package in packages if not has[package]]:
        raise ConfigError(f"{key}: {python} does not have {', '.join(missing)}; install it there")


@lru_cache(maxsize=8)
def _facts(python: Path, key: str, packages: tuple[str, ...]) -> Any:
    try:
        asked = subprocess.run(
            [str(python), "-c", _ASK, *packages], capture_output=True, text=True, timeout=ANSWER_S, check=True
        )
        return json.loads(asked.stdout)
    except FileNotFoundError:
        raise ConfigError(
            f"{key}: there is no {python}; give that of an environment, e.g. .venv-vllm/bin/python"
        ) from None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"{key}: {python} is no Python that answers: {error}") from error
