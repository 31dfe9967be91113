"""Reads a run's YAML file and the files that it extends, applies dotted overrides, and checks the result.

flexmarl train run.yaml batch.groups=8 policies.solver.training.optimizer.learning_rate=3e-4
"""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from flexmarl.config.explain import explain
from flexmarl.config.run_settings import RunSettings
from flexmarl.config.yaml_text import parse_yaml, problem_of
from flexmarl.errors import ConfigError

MAX_FILES = 100
"""Most files read for one config; a file counts each time it is named. Twenty levels of two would be a million."""
_SHOWN = 200
"""Most characters of an override that an error shows."""
MAX_KEYS = 64
"""Most keys in the path of one override."""


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunSettings:
    """Returns the settings of a run. All relative paths, also those in extended files, start at the folder of `path`.

    Raises ConfigError with one line per problem: the file, the key, the value, and what would work.
    """
    for place in (Path.cwd(), path.absolute()):
        if not is_utf8(place):
            raise ConfigError(
                f"the path {str(place)!r} is not UTF-8, which model files, stores and logs take for granted; work in a "
                f"folder with another name"
            )
    raw = read_extended(path)
    for override in overrides:
        keys, value = parse_override(override)
        _assign(raw, keys, value, override)
    raw.setdefault("base", str(path.resolve().parent))
    try:
        return RunSettings.model_validate(raw)
    except ValidationError as error:
        lines = explain(RunSettings, error.errors(include_url=False))
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from None


def is_utf8(path: Path) -> bool:
    """Returns True if a path is UTF-8 text. On Linux a path may hold any bytes."""
    return str(path) == str(path).encode(errors="replace").decode()


def read_extended(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file, merged over the files that its key `extends` names. Later files win.

    `extends: base.yaml` or `extends: [workload.yaml, system.yaml]`, relative to the file that names them.
    """
    return _read_extended(path, (), count())


def _read_extended(path: Path, extending: tuple[Path, ...], files: Iterator[int]) -> dict[str, Any]:
    if path.resolve() in extending:
        raise ConfigError(f"{path}: extends leads back to itself: {' > '.join(map(str, (*extending, path.resolve())))}")
    if next(files) == MAX_FILES:
        raise ConfigError(f"{path}: extends leads to more than {MAX_FILES} files; write some of them into one")
    own = read_yaml(path)
    named = own.pop("extends", [])
    parents = [named] if isinstance(named, str) else named
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError(f"{path}: extends must be a YAML file or a list of them, got {named!r}")
    merged: dict[str, Any] = {}
    for parent in parents:
        merged = _on_top(merged, _read_extended(path.parent / parent, (*extending, path.resolve()), files))
    return _on_top(merged, own)


def _on_top(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges mappings key by key. A mapping of another `type`, a list or a value replaces what was there.

    >>> _on_top({"batch": {"groups": 4, "episodes": 8}}, {"batch": {"groups": 2}})
    {'batch': {'groups': 2, 'episodes': 8}}
    """
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _on_top(below[key], value) if _same_kind(below.get(key), value) else value
    return merged


def _same_kind(below: Any, above: Any) -> bool:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return False
    return above.get("type", below.get("type")) == below.get("type")


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the mapping in a YAML file. Raises ConfigError."""
    try:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise ConfigError(f"config file '{path}' {what}; give the path of a run's YAML file")
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {problem_of(error)}") from None
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(raw).__name__}: {str(raw)[:60]!r}")
    return raw


def parse_override(text: str) -> tuple[list[str], Any]:
    """Splits `a.b=value`; the value is YAML, so `true`, `1e-3`, `[a, b]` and `null` mean what they look like.

    >>> parse_override("batch.groups=8")
    (['batch', 'groups'], 8)
    """
    key, equals, value = text.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys) or len(keys) > MAX_KEYS:
        raise ConfigError(f"override '{_short(text)}' must look like key.subkey=value, e.g. batch.groups=8")
    try:
        return keys, parse_yaml(value) if value else ""
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override '{_short(text)}': the value '{_short(value)}' is not YAML: {problem_of(error)}; "
            f"put a text into quotes"
        ) from None


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _assign(raw: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    """Sets the value at the path `keys`. Sections on the way that are absent or null are made."""
    node: Any = raw
    said = f"override '{_short(override)}'"
    for depth, key in enumerate(keys):
        where, last = ".".join(keys[:depth]), depth == len(keys) - 1
        place: Any = key
        if isinstance(node, list):
            if not (key.isdecimal() and len(key) < 10) or int(key) >= len(node):
                raise ConfigError(f"{said}: '{where}' is a list of {len(node)}; it has no '{key}'")
            place = int(key)
        elif not isinstance(node, dict):
            raise ConfigError(f"{said}: '{where}' is the value {_short(repr(node))}, which has no keys")
        if last:
            node[place] = value
        elif isinstance(node, dict) and node.get(place) is None:
            node[place] = {}
        node = node[place]
