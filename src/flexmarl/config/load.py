"""Reads a run's YAML, applies dotted overrides, and turns every validation error into one line that helps.

flexmarl train run.yaml batch.groups=8 policies.solver.training.optimizer.lr=3e-4
"""

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flexmarl.config.run import RunSettings
from flexmarl.errors import ConfigError


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunSettings:
    """The settings of a run; relative paths in it are relative to the file's folder.

    Raises ConfigError with one line per problem: the key, the value, and what would work.
    """
    raw = read_yaml(path)
    for override in overrides:
        keys, value = parse_override(override)
        _assign(raw, keys, value, override)
    raw.setdefault("base", str(path.resolve().parent))
    try:
        return RunSettings.model_validate(raw)
    except ValidationError as error:
        lines = [explain(detail) for detail in error.errors(include_url=False)]
        raise ConfigError(f"{path}: " + "\n".join(dict.fromkeys(lines))) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    if not path.is_file():
        raise ConfigError(f"config file '{path}' does not exist; give the path of a run's YAML file")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]} {_place(error)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(raw).__name__}")
    return _unshared(raw)


def _unshared(node: Any) -> Any:
    """A copy in which what a YAML anchor shares is apart: an override of one place must not change the other."""
    if isinstance(node, dict):
        return {key: _unshared(value) for key, value in node.items()}
    return [_unshared(value) for value in node] if isinstance(node, list) else node


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"(line {mark.line + 1}, column {mark.column + 1})" if mark else ""


_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""YAML 1.1 reads 1e-3, which has no dot, as text."""


def parse_override(text: str) -> tuple[list[str], Any]:
    """Splits `a.b=value`; the value is YAML, so `true`, `1e-3`, `[a, b]` and `null` mean what they look like.

    >>> parse_override("batch.groups=8")
    (['batch', 'groups'], 8)
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override '{text}' must look like key.subkey=value, e.g. batch.groups=8")
    parsed = yaml.safe_load(value) if value else ""
    if isinstance(parsed, str) and _EXPONENT.fullmatch(parsed):
        parsed = float(parsed)
    return key.strip().split("."), parsed


def _assign(raw: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    node: Any = raw
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                where = ".".join(keys[:depth])
                raise ConfigError(
                    f"override '{override}': '{where}' is a list of {len(node)}; '{key}' is no index of it"
                )
            if last:
                node[int(key)] = value
            else:
                node = node[int(key)]
        elif isinstance(node, dict):
            if last:
                node[key] = value
            else:
                node = node.setdefault(key, {})
        else:
            raise ConfigError(
                f"override '{override}': '{'.'.join(keys[:depth])}' is the value {node!r}, it has no keys"
            )


def explain(detail: ErrorDetails) -> str:
    """One validation error as a sentence: key, value, what would work."""
    keys = _without_union_tags(detail["loc"])
    where = ".".join(keys) or "the file"
    value = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            known = _known_keys(detail["loc"][:-1])
            near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(sorted(known))}"
            return f"{where} is not a setting (its value: {value!r}); {hint}"
        case "missing":
            return f"{where} is missing; it has no default"
        case "union_tag_invalid":
            context = detail.get("ctx", {})
            return f"{where}.type must be one of {context.get('expected_tags')}, got {context.get('tag')!r}"
        case "union_tag_not_found":
            return f"{where}.type is missing, got {value!r}; it says which kind this is"
        case "value_error":
            message = str(detail["msg"]).removeprefix("Value error, ")
            return f"{where}: {message}" if keys else message
        case _:
            message = detail["msg"][0].lower() + detail["msg"][1:]
            return f"{where}: {message.removeprefix('input ')}, got {value!r}"


def _without_union_tags(location: tuple[int | str, ...]) -> list[str]:
    """Pydantic puts the chosen tag of a union into the location; a reader of the YAML has no such key."""
    return [str(part) for part, node in zip(location, _walk(location), strict=True) if node is not _TAG]


_TAG = object()


def _walk(location: Iterable[int | str]) -> Iterator[Any]:
    """For every part of a location: the annotation it leads to, or _TAG if the part is a union's tag."""
    node: Any = RunSettings
    for part in location:
        members = {_tag(member): member for member in _members(node)} if len(_members(node)) > 1 else {}
        if part in members:
            node = members[str(part)]
            yield _TAG
            continue
        node = _step(node, part)
        yield node


def _step(node: Any, part: int | str) -> Any:
    for member in _members(node):
        if isinstance(member, type) and issubclass(member, BaseModel) and part in member.model_fields:
            return member.model_fields[str(part)].annotation
        origin = typing.get_origin(member)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return typing.get_args(member)[1]
        if origin in (list, tuple):
            return typing.get_args(member)[0]
    return None


def _members(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, `None` left out."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [m for arg in typing.get_args(annotation) for m in _members(arg) if m is not type(None)]
    return [annotation]


def _tag(member: Any) -> str | None:
    if isinstance(member, type) and issubclass(member, BaseModel) and "type" in member.model_fields:
        return str(member.model_fields["type"].default)
    return None


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    node: Any = RunSettings
    for member in _walk_nodes(location):
        node = member
    return [
        name
        for member in _members(node)
        if isinstance(member, type) and issubclass(member, BaseModel)
        for name in member.model_fields
    ]


def _walk_nodes(location: tuple[int | str, ...]) -> Iterator[Any]:
    node: Any = RunSettings
    for part in location:
        members = {_tag(member): member for member in _members(node)} if len(_members(node)) > 1 else {}
        node = members.get(str(part)) or _step(node, part)
        yield node
