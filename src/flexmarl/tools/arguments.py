"""Decides whether the arguments of a call fit a tool's JSON schema, and how a model reads the schema as plain text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from flexmarl.errors import ConfigError
from flexmarl.events.safe_json import parse_json
from flexmarl.tools.interface import Tool

MOST_SAID = 200
"""Characters of a fault that a model reads. A fault quotes the value, which may be long."""


@dataclass(frozen=True, slots=True)
class BadArguments:
    """The reason why arguments do not fit."""

    reason: str


def check_schema(tool: Tool) -> None:
    """Raises ConfigError if the tool's parameters are no JSON schema of an object."""
    schema = dict(tool.parameters)
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ConfigError(f"tool {tool.name!r}: its parameters are no JSON schema: {error.message}") from None
    if schema.get("type") != "object":
        raise ConfigError(
            f"tool {tool.name!r}: its parameters must be the schema of an object, got type {schema.get('type')!r}; "
            f'use {{"type": "object", "properties": {{...}}}}'
        )


def fitted(given: Mapping[str, Any] | str, schema: Mapping[str, Any]) -> dict[str, Any] | BadArguments:
    """The arguments by name, or the reason why they do not fit the schema.

    A text stands for the only argument, or the only one that is required, unless it is a JSON object that names
    arguments of the schema, that one among them; without such a one it must be an object. Some syntaxes have nothing
    but text. So a text in place of a number, bool, list or object is read as JSON.

    >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    >>> fitted("3", schema), fitted({"n": "4"}, schema)
    ({'n': 3}, {'n': 4})
    >>> fitted({"n": "four"}, schema)
    BadArguments(reason="n: 'four' is not of type 'integer'; the arguments are: n: integer")
    """
    properties: Mapping[str, Any] = schema.get("properties", {})
    named = _named(given, only_argument_of(schema), properties)
    if named is None:
        return _bad("several arguments must be a JSON object", schema)
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    arguments = {name: _read(value, properties.get(name), definitions) for name, value in named.items()}
    try:
        fault = best_match(Draft202012Validator(dict(schema)).iter_errors(arguments))
        if fault is None:
            return arguments
        place = ".".join(map(str, fault.absolute_path))
        return _bad(f"{place}: {fault.message}" if place else fault.message, schema)
    except RecursionError:
        return _bad("the arguments are nested too deep", schema)


def only_argument_of(schema: Mapping[str, Any]) -> str | None:
    """Name of the argument that a plain text stands for: the only one, or the only one that is required.

    None if there is none, or if there are several, which must be a JSON object.
    """
    properties = schema.get("properties", {})
    names = [*properties] if len(properties) == 1 else [*schema.get("required", ())]
    return names[0] if len(names) == 1 else None


def _named(given: Mapping[str, Any] | str, only: str | None, properties: Mapping[str, Any]) -> Any:
    if not isinstance(given, str):
        return given
    try:
        read = parse_json(given) if given.strip() else {}
    except ValueError:
        read = None
    if only is None:
        return read if isinstance(read, dict) else None
    return read if isinstance(read, dict) and only in read and read.keys() <= properties.keys() else {only: given}


def _read(value: Any, schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The JSON value that a text stands for, if its schema takes this value and not the text."""
    if not isinstance(value, str) or not isinstance(schema, Mapping):
        return value
    validator = Draft202012Validator({**schema, **definitions})
    if validator.is_valid(value):
        return value
    try:
        read = parse_json(value)
    except ValueError:
        return value
    return read if validator.is_valid(read) else value


def _bad(fault: str, schema: Mapping[str, Any]) -> BadArguments:
    said = fault if len(fault) <= MOST_SAID else f"{fault[: MOST_SAID // 2]} ... {fault[-MOST_SAID // 2 :]}"
    return BadArguments(f"{said}; the arguments are: {signature(schema) or 'none'}")


def as_text(arguments: Mapping[str, Any] | str) -> str:
    """The only argument as text, or all of them as JSON."""
    values = [*arguments.values()] if isinstance(arguments, Mapping) else [arguments]
    only = values[0] if len(values) == 1 else dict(arguments) if isinstance(arguments, Mapping) else arguments
    return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)


def signature(schema: Mapping[str, Any]) -> str:
    """The arguments in a line.

    >>> signature({"properties": {"unit": {"enum": ["m", "km"], "default": "m"}}})
    'unit: "m" | "km" = "m"'
    """
    return ", ".join(
        f"{name}: {_kind(one)}" + (f" = {json.dumps(one['default'])}" if "default" in one else "")
        for name, one in schema.get("properties", {}).items()
    )


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    if "anyOf" in schema:
        return " | ".join(_kind(one) for one in schema["anyOf"])
    if schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
        return f"list of {_kind(schema['items'])}"
    kind = schema.get("type", "value")
    return " | ".join(kind) if isinstance(kind, list) else str(kind)


_EXAMPLES: Mapping[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}


def example_of(schema: Mapping[str, Any]) -> Any:
    """A value that stands for an argument in an example of a call: of its type, or `...` for a text.

    >>> [example_of({"type": "integer"}), example_of({"enum": ["m", "km"]}), example_of({"type": "string"})]
    [1, 'm', '...']
    """
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return example_of(schema["anyOf"][0])
    if schema.get("type") == "array" and isinstance(schema.get("items"), Mapping):
        return [example_of(schema["items"])]
    kind = schema.get("type")
    return _EXAMPLES.get(str(kind[0] if isinstance(kind, list) else kind), "...")


def described_tools(tools: Sequence[Tool], how: str) -> str:
    """The tools as a role prompt explains them, for templates without a place for them. `how`: an example of a call."""
    lines = [f"- {tool.name}({signature(tool.parameters)}): {tool.description}" for tool in tools]
    for tool in tools:
        for name, one in tool.parameters.get("properties", {}).items():
            if "description" in one:
                lines.append(f"  {tool.name}, {name}: {one['description']}")
    return "\n".join(("You can call these tools:", *lines, "Write a call like this:", how))
