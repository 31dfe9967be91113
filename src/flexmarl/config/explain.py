"""Decides how a validation error reads: which key, which value, what would work.

pydantic's                                             ours
batch.groups: Input should be greater than 0           batch.groups must be greater than 0, got -1
team.agents.solver.tols: Extra inputs not permitted    team.agents.solver.tols is not a setting (...); did you mean ...
"""

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flexmarl.events.safe_json import MASK, is_secret_key, masked
from flexmarl.plugins import SettingsTable

Location = tuple[int | str, ...]

_MODEL_TYPES = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_SHOWN = 120
"""Most characters of a value that an error shows."""


def explain(root: type[BaseModel], details: Sequence[ErrorDetails]) -> list[str]:
    """Returns the sentences about each wrong key of a config that `root` refused."""
    by_key: dict[str, list[str]] = {}
    for detail in details:
        for where, sentence in _sentences(root, detail):
            by_key.setdefault(where, [])
            if sentence not in by_key[where]:
                by_key[where].append(sentence)
    return [line for sentences in by_key.values() for line in _joined(sentences)]


def _joined(sentences: list[str]) -> Iterator[str]:
    """Joins the sentences about one value into one: each alternative of a union says what it would take."""
    parts = [re.fullmatch(r"(\S+) (must .+), got (.+)", sentence) for sentence in sentences]
    if len(sentences) > 1 and all(parts):
        first = parts[0]
        assert first is not None
        yield f"{first[1]} {', or '.join(part[2] for part in parts if part)}, got {first[3]}"
    else:
        yield from sentences


def _sentences(root: type[BaseModel], detail: ErrorDetails) -> Iterator[tuple[str, str]]:
    keys, nodes = _walk(root, detail["loc"])
    where, value, context = ".".join(keys) or "the config", _shown(keys, detail["input"]), detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            yield where, f"{where} is not a setting (its value: {value}); {_hint(keys[-1], nodes[-2])}"
        case "missing":
            yield where, f"{where} is missing, and has no default{_meaning(nodes[-1])}"
        case "union_tag_invalid":
            tags = str(context["expected_tags"])
            near = difflib.get_close_matches(str(context["tag"]), re.findall(r"'([^']+)'", tags), n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            yield where, f"{where}.type must be one of {tags}, got {_shown(keys, context['tag'])}{hint}"
        case "union_tag_not_found":
            yield where, f"{where}.type must be one of {_kinds(nodes[-1])}, and is missing in {value}"
        case "value_error":
            for line in str(context["error"]).splitlines():
                yield where, _placed(keys, nodes[-1], line)
        case "string_pattern_mismatch":
            yield where, f"{where} must match {context['pattern']}{_meaning(nodes[-1])}, got {value}"
        case kind if kind in _MODEL_TYPES and (known := _known_keys(nodes[-1])):
            some = f"with a type: {kinds}" if (kinds := _kinds(nodes[-1])) else f"({', '.join(known)})"
            yield where, f"{where} must be a mapping of settings {some}, got {value}"
        case kind:
            wanted = re.sub(r"^\w+ should ", "must ", detail["msg"]).replace(" after validation", "")
            wanted = wanted if wanted.startswith("must ") else f"must be right: {wanted[0].lower()}{wanted[1:]}"
            yield where, f"{where} {wanted}, got {value}{_quotes(kind, detail['input'])}"


def _quotes(kind: str, value: Any) -> str:
    """Returns a hint about quotes if a number was given for a text, or a text for a number; else ""."""
    if kind == "string_type" and isinstance(value, bool | int | float):
        return "; put it in quotes"
    is_quoted = isinstance(value, str) and re.fullmatch(r"\s*([+-]?[\d_.]+([eE][+-]?\d+)?|true|false)\s*", value)
    return "; leave out the quotes" if kind in ("int_type", "float_type", "bool_type") and is_quoted else ""


def _placed(keys: Sequence[str], node: Any, line: str) -> str:
    """Puts the full key before a validator's sentence, which may begin with its own key or with a key below it."""
    if not keys:
        return line
    where = ".".join(keys)
    first = re.match(r"[\w.]+", line)
    if first and first[0] == keys[-1]:
        return f"{where}{line[first.end() :]}"
    if first and first[0].split(".")[0] in _known_keys(node):
        return f"{where}.{line}"
    return f"{where}: {line}"


def _shown(keys: Sequence[str], value: Any) -> str:
    counts = isinstance(value, int | float) and abs(value) < 1e6  # `max_token: 3` is a typo, and no secret.
    text = MASK if keys and is_secret_key(keys[-1]) and not counts else masked(repr(value))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _hint(key: str, parent: Any) -> str:
    known = _known_keys(parent)
    for name in known:
        below = key.removeprefix(f"{name}_")
        if below != key and below in _known_keys(_step(_members(parent)[0], name)):
            return f"did you mean '{name}.{below}'?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"


def _meaning(node: Any) -> str:
    description = node.description if isinstance(node, FieldInfo) else None
    return f" ({description.rstrip('.')})" if description else ""


def _known_keys(node: Any) -> list[str]:
    members = _members(node)
    return ["type"] if isinstance(members[0], SettingsTable) else sorted({n for one in members for n in _fields(one)})


def _walk(root: type[BaseModel], location: Location) -> tuple[list[str], list[Any]]:
    """Returns the location as keys of the YAML, and the type expected at the root and at each key.

    pydantic puts the chosen member of a union into the location. The YAML has no such key, so it is left out.
    """
    keys: list[str] = []
    nodes: list[Any] = [root]
    for part in location:
        members = _members(nodes[-1])
        if isinstance(members[0], SettingsTable):
            nodes[-1] = members[0][str(part)]
        elif len(members) > 1:
            nodes[-1] = next((member for member in members if _is_labelled(member, str(part))), None)
        elif part != "[key]":
            keys.append(str(part))
            nodes.append(_step(members[0], part))
    return keys, nodes


def _is_labelled(member: Any, label: str) -> bool:
    """Returns True if pydantic labels the union's member so: by its tag, or by the name of its type."""
    name = getattr(typing.get_origin(member) or member, "__name__", "?")
    return label in (_tag(member), name) or label.startswith(name.lower())


def _step(node: Any, part: int | str) -> Any:
    if part in (known := _fields(node)):
        return known[str(part)]
    origin, arguments = typing.get_origin(node), typing.get_args(node)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return arguments[1]
    if origin is tuple and isinstance(part, int) and ... not in arguments:
        return arguments[min(part, len(arguments) - 1)]
    return arguments[0] if origin in (list, tuple) else None


def _fields(member: Any) -> Mapping[str, FieldInfo]:
    return member.model_fields if isinstance(member, type) and issubclass(member, BaseModel) else {}


def _members(node: Any) -> list[Any]:
    """Returns the alternatives of a field or annotation, without `None`; or the table of its settings classes."""
    annotation, metadata = (node.annotation, node.metadata) if isinstance(node, FieldInfo) else (node, [])
    if typing.get_origin(annotation) is typing.Annotated:
        annotation, *metadata = typing.get_args(annotation)
    if tables := [one for one in metadata if isinstance(one, SettingsTable)]:
        return tables
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [m for arg in typing.get_args(annotation) for m in _members(arg) if m is not type(None)]
    return [annotation]


def _tag(member: Any) -> str | None:
    field = _fields(member).get("type")
    return field.default if field and isinstance(field.default, str) else None


def _kinds(node: Any) -> str:
    """Returns the values that `type` may have; empty if there is no choice by type."""
    members = _members(node)
    tags = list(members[0]) if isinstance(members[0], SettingsTable) else map(_tag, members)
    return ", ".join(repr(tag) for tag in tags if tag)
