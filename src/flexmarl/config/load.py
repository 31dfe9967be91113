"""Reads a run's YAML file and the files that it extends, applies dotted overrides, and checks the result.

flexmarl train run.yaml batch.groups=8 policies.solver.training.optimizer.learning_rate=3e-4

Texts are read with bounded work. A hostile or broken text of a few lines may be nested thousands of levels deep, or
stand for a billion values by its aliases. Depth and size are counted while nodes are composed. An alias counts as
everything that it stands for.
"""

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import count, starmap
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from flexmarl.config.explain import explain
from flexmarl.config.run_settings import RunSettings
from flexmarl.errors import ConfigError

MAX_CHARACTERS = 4_000_000
MAX_DEPTH = 64
"""Levels of nesting; settings have about ten."""
MAX_NODES = 50_000
"""Keys and values, with aliases written out. The largest config of this project has a few hundred."""


def parse_yaml(text: str) -> Any:
    """Returns the value in a YAML text. Each alias gets a copy of its own, so that changing one leaves the others.

    Raises yaml.YAMLError, and nothing else, with a problem that names the place.
    """
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"{len(text)} characters are too many for a config: {MAX_CHARACTERS} at most")
    return _unshared(yaml.load(text, Loader=_Loader))


def problem_of(error: yaml.YAMLError) -> str:
    """Returns one line that says what is wrong, and where."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return (str(error).splitlines() or [type(error).__name__])[0]
    mark = error.problem_mark
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{error.problem or error.context}{place}"


def _unshared(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _unshared(value) for key, value in node.items()}
    return [_unshared(value) for value in node] if isinstance(node, list) else node


class _Loader(yaml.SafeLoader):
    """Loader with bounds. A key must be a scalar, and may occur once: the first of two would be lost silently.

    As in YAML 1.2, 1e-3 is a number although it has no dot.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = self._deepest = 0
        self._extents: dict[str, tuple[int, int]] = {}
        """For each complete anchor: the number of its nodes, and of the levels below it."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes a node, and counts nodes and levels. An alias counts as everything that it names."""
        event: Any = self.peek_event()
        alias, anchor = isinstance(event, yaml.AliasEvent), event.anchor
        if alias and anchor in self.anchors and anchor not in self._extents:
            raise yaml.MarkedYAMLError(
                problem=f"the YAML anchor '{anchor}' contains itself; write it out", problem_mark=event.start_mark
            )
        nodes, levels = self._extents.get(anchor, (1, 0)) if alias else (1, 0)
        before, above = self._nodes, self._deepest
        self._nodes, self._deepest = before + nodes, self._depth + levels
        if self._nodes > MAX_NODES or self._deepest > MAX_DEPTH:
            many = f"{MAX_DEPTH} levels of nesting" if self._deepest > MAX_DEPTH else f"{MAX_NODES} keys and values"
            raise yaml.MarkedYAMLError(
                problem=f"more than {many}, aliases written out; no config needs that", problem_mark=event.start_mark
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor and not alias:
            self._extents[anchor] = (self._nodes - before, self._deepest - self._depth)
        self._deepest = max(above, self._deepest)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Constructs a value. If it looks like a date or a number but is none, the error names its place."""
        try:
            value = super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise yaml.MarkedYAMLError(
                problem=f"a value that cannot be read: {error}", problem_mark=node.start_mark
            ) from None
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise yaml.MarkedYAMLError(
                problem=f"no text can hold {value[:60]!r}: NUL and lone surrogates are no characters",
                problem_mark=node.start_mark,
            )
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = set[str]()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                what = "a list" if isinstance(key, yaml.SequenceNode) else "a mapping"
                raise yaml.MarkedYAMLError(
                    problem=f"a key must be a text, got {what}; put a text that begins with a bracket into quotes",
                    problem_mark=key.start_mark,
                )
            if key.value in keys and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' is given twice", problem_mark=key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$"), list("+-0123456789")
)


MAX_FILES = 100
"""Most files read for one config; a file counts each time it is named. Twenty levels of two would be a million."""
_SHOWN = 200
"""Most characters of an override that an error shows."""
MAX_KEYS = 64
"""Most keys in the path of one override."""


Overrides = Sequence[str] | Mapping[str, Any]
"""Texts as on the command line, `["batch.groups=8"]`, or values by dotted key, `{"batch.groups": 8}`."""


def load_run(path: Path, overrides: Overrides = ()) -> RunSettings:
    """Returns the settings of a run. All relative paths, also those in extended files, start at the folder of `path`.

    Raises ConfigError with one line per problem: the file, the key, the value, and what would work.
    """
    for place in (Path.cwd(), path.absolute()):
        if not is_utf8(place):
            raise ConfigError(
                f"the path {str(place)!r} is not UTF-8, which model files, stores and logs need; work in a "
                f"folder with another name"
            )
    raw = read_extended(path)
    given = starmap(as_override, overrides.items()) if isinstance(overrides, Mapping) else overrides
    for override in given:
        keys, value = parse_override(override)
        _check_named(raw, keys, override)
        _assign(raw, keys, value, override)
    raw.setdefault("base", str(path.resolve().parent))
    try:
        return RunSettings.model_validate(raw)
    except ConfigError as error:  # Of a file under `code`.
        raise ConfigError(f"{path}: {error}") from error
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


_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that JSON may have as they are, and YAML not."""


def as_override(key: str, value: Any) -> str:
    """Writes an override with a Python value as a text. Raises ConfigError for a value that no setting can have.

    >>> as_override("team.agents.solver.sampling", {"max_tokens": 8, "stop": ["end"]})
    'team.agents.solver.sampling={"max_tokens": 8, "stop": ["end"]}'
    """
    if "=" in key:
        raise ConfigError(f"override {_short(repr(key))} must be a dotted key without '=', e.g. 'batch.groups'")
    try:
        text = json.dumps(_plain(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(
            f"override '{_short(str(key))}': the value {_short(repr(value))} is a {type(value).__name__}; a setting is "
            f"a finite number, a text, a path, True, False or None, or lists and dicts of these"
        ) from None
    return f"{key}={_ESCAPED.sub(_escape, text)}"


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


_NAMED = {("policies",): "policy", ("team", "agents"): "agent"}
"""Sections whose keys are names that the user chose."""


def _check_named(raw: dict[str, Any], keys: list[str], override: str) -> None:
    """Raises ConfigError if an override is below a policy or an agent that does not exist, but others do.

    It is most often a misspelt name. A new one is given whole: `policies.judge={model: m}`.
    """
    for section, what in _NAMED.items():
        depth = len(section)
        if tuple(keys[:depth]) != section or len(keys) <= depth + 1:
            continue
        node: Any = raw
        for key in section:
            node = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and node and keys[depth] not in node:
            raise ConfigError(
                f"override '{_short(override)}': there is no {what} {keys[depth]}; there are: "
                f"{', '.join(map(str, node))}; a new one is given whole, {'.'.join(keys[: depth + 1])}={{...}}"
            )


def _assign(raw: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    """Sets the value at the path `keys`. Sections on the way that are absent or null are made."""
    node: Any = raw
    prefix = f"override '{_short(override)}'"
    for depth, key in enumerate(keys):
        where, last = ".".join(keys[:depth]), depth == len(keys) - 1
        place: Any = key
        if isinstance(node, list):
            if not (key.isdecimal() and len(key) < 10) or int(key) >= len(node):
                raise ConfigError(f"{prefix}: '{where}' is a list of {len(node)}; it has no '{key}'")
            place = int(key)
        elif not isinstance(node, dict):
            raise ConfigError(f"{prefix}: '{where}' is the value {_short(repr(node))}, which has no keys")
        if last:
            node[place] = value
        elif isinstance(node, dict) and node.get(place) is None:
            node[place] = {}
        node = node[place]
