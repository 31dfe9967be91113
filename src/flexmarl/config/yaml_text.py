"""Decides what a YAML text of a config says, with bounded work: a text that is too large or too deep is refused early.

A hostile or broken text of a few lines may be nested thousands of levels deep, or stand for a billion values by its
aliases. Depth and size are counted while nodes are composed. An alias counts as everything that it stands for.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

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
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key.value}' stands here twice", problem_mark=key.start_mark
                )
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+$"), list("+-0123456789")
)
