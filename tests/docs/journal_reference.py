"""Makes docs/howto/journal.md from the catalogue of events.

    python tests/docs/journal_reference.py > docs/howto/journal.md

The page cannot say what the code does not: names, fields and meanings are read from the classes.
"""

import ast
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any

from flexmarl.events.catalogue import PAGES, events_in
from flexmarl.events.event import Event, Timed
from flexmarl.events.journal import FORMAT
from flexmarl.records import InstanceId, WorkerId

HEAD = f"""# What is in a journal

Made from the catalogue of events by `python tests/docs/journal_reference.py`; a test compares the two.

`journal.jsonl` of a run folder has one line for every event of the run, as JSON, in the order in which they happened:

```
{{"t":0.0,"event":"journal","format":{FORMAT}}}
{{"t":12.25,"event":"group_admitted","because":"2 of 4 slots free","group":3,"step":1,"task":"add-3"}}
```

The first line says the format, which is {FORMAT}. A run folder of another format is refused by every command that reads
it: use the version that wrote the run. A field that has its default is left out. Times are seconds since the command
began; a resumed run continues the file, and its clock begins again at 0. In Python, `read_run` of
[`events/journal.py`](../../src/flexmarl/events/journal.py) yields the events as the types below, all on one clock.

A field that numbers the step under way, as `step` of `step_ended`, counts from 0. The screen, `metrics.jsonl` and
`flexmarl show` count from 1. A field that says how many steps were done, as `step` of `evaluated`, has the same number
everywhere.

What the parts of a run say, they say by emitting these events; the journal, the balancer and whoever else wants to know
listen to a type: `events.listen(Called, heard)`. See [`events/event.py`](../../src/flexmarl/events/event.py). A
`Notice` ([`events/notices.py`](../../src/flexmarl/events/notices.py)) reaches listeners likewise, and has no line here.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_section("Every event", [Event, Timed]), *_pages()])


def _pages() -> Iterator[str]:
    for title, module in PAGES.items():
        yield from _section(title, events_in(module))


def _section(title: str, kinds: list[type[Event]]) -> Iterator[str]:
    yield f"## {title}\n"
    for kind in kinds:
        took = " It took time." if issubclass(kind, Timed) and kind is not Timed else ""
        yield (
            f"**`{kind.name}`** (`{kind.__name__}`). {_text(kind.__doc__)}{took}\n"
            if kind.name
            else (f"**`{kind.__name__}`.** {_text(kind.__doc__)}\n")
        )
        if rows := list(_rows(kind)):
            yield from ("| field | type | meaning |", "|---|---|---|", *rows, "")


def _rows(kind: type[Event]) -> Iterator[str]:
    hints, meanings = typing.get_type_hints(kind), _docstrings(kind)
    for field in fields(kind):
        if field.name in meanings and field.name != "command":
            yield f"| `{field.name}` | {_type(hints[field.name])}{_default(field)} | {_text(meanings[field.name])} |"


def _default(field: Field[Any]) -> str:
    plain = field.default is not MISSING and field.name not in ("t", "ended")
    value = f"`{field.default}`" if isinstance(field.default, Enum) else repr(field.default).replace("''", "empty")
    return f", default {value}" if plain else ""


def _type(kind: Any) -> str:
    kind = getattr(kind, "__supertype__", kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_type, arguments))
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping" if arguments[1] is Any else f"{_type(arguments[1])} by name"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " / ".join(f"`{member.value}`" for member in kind)
    named = {str: "text", int: "integer", float: "number", bool: "true / false"}
    return named.get(kind) or {InstanceId: "`policy/number`", WorkerId: "`kind/policy/number`"}[kind]


def _docstrings(kind: type[Event]) -> dict[str, str]:
    """Texts below the fields of a class, by field."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    return {
        line.target.id: text.value.value
        for line, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference())
