"""Decides how a value is stored, and which names tables and columns may have (FlexMARL section 4.2).

    numbers, short strings    INT, FLOAT, BOOL, WORD  by value, in the row of the agent's table
    strings, lists, tensors   TEXT, JSON, TENSOR      by reference: the row holds a key, the table `payloads` the value

Every stored value is read back equal to the last bit. None is not a value: a column without a value is left out.
"""

import ast
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flexmarl.errors import StoreError
from flexmarl.events.safe_json import json_text
from flexmarl.experience.interface import Column, ColumnKind
from flexmarl.records import AgentName

Stored = int | float | str | bytes
"""Types of a database cell."""

META_COLUMNS = (
    "sample_id",
    "group_id",
    "episode_index",
    "attempt",
    "hop",
    "policy",
    "policy_version",
    "state",
    "is_processing",
    "next_agent_id",
    "holder",
    "cache",
    "settled_version",
    "reason",
)
SHARED_TABLES = ("payloads", "samples", "tally", "pruned", "layout")
"""Tables other than the agents': the values stored by reference, the table that each sample is in, the number of rows
in each state, the groups that have been pruned, and (in a file) the layout of the tables."""


def quote(name: str) -> str:
    """Quotes a name as an SQL identifier, whatever characters it has.

    >>> quote("math solver")
    '"math solver"'
    """
    return '"' + name.replace('"', '""') + '"'


def status_column(name: str) -> str:
    """The name of a data column's status column."""
    return f"{name}_status"


def check_names(agents: Sequence[AgentName], columns: Sequence[Column]) -> None:
    """Raises StoreError for names that cannot be used or that collide. SQL ignores upper and lower case."""
    _check_distinct("agent", agents, SHARED_TABLES)
    _check_distinct("column", [name for c in columns for name in (c.name, status_column(c.name))], META_COLUMNS)
    if not agents:
        raise StoreError("a store needs at least one agent, got none")
    for agent in agents:
        if agent.lower().startswith("sqlite_"):
            raise StoreError(f"agent {agent!r} cannot have a table: SQLite keeps 'sqlite_'; choose another name")


def _check_distinct(what: str, names: Sequence[str], reserved: Sequence[str]) -> None:
    owner = {name: f"the store's own {name!r}" for name in reserved}
    for name in names:
        if not name or "\0" in name or name != name.encode(errors="replace").decode():
            raise StoreError(f"{what} {name!r} is no name; use one or more characters, none of them NUL")
        if name.lower() in owner:
            raise StoreError(
                f"{what} {name!r} collides with {owner[name.lower()]}; choose another (case does not count)"
            )
        owner[name.lower()] = f"the {what} {name!r}"


def encode(table: str, column: Column, value: Any) -> Stored:
    """Encodes a value as a cell. Raises StoreError if the column's kind does not take the value."""
    try:
        return CODECS[column.kind].encode(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise StoreError(
            f"table {table!r}, column {column.name!r}: {column.kind} does not take {reprlib.repr(value)}"
            f"{f' ({error})' if str(error) else ''}; it takes {CODECS[column.kind].takes}"
        ) from error


def decode(kind: ColumnKind, stored: Stored) -> Any:
    """Decodes the value in a cell. An array is a fresh copy that the caller owns."""
    return CODECS[kind].decode(stored)


def as_text(payload: str | bytes) -> str:
    """A payload as readable text: strings and JSON as they are, a tensor as JSON lists, other bytes as in SQL.

    >>> as_text(b"\\xff\\x00")
    "x'ff00'"
    """
    if isinstance(payload, str):
        return payload
    try:
        return tensor_text(decode_tensor(payload))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # Not the bytes of a tensor.
        return f"x'{payload.hex()}'"


def tensor_text(array: np.ndarray) -> str:
    """A tensor as strict JSON lists."""
    return json_text(array.tolist())


@dataclass(frozen=True, slots=True)
class Codec:
    """How one kind of column is stored."""

    sql_type: str
    by_reference: bool
    takes: str
    """Describes the values that it takes, for error messages."""
    encode: Callable[[Any], Stored]
    """Raises ValueError, TypeError or OverflowError for any other value."""
    decode: Callable[[Any], Any]


def _encode_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError
    if not -(2**63) <= value < 2**63:
        raise OverflowError
    return int(value)


def _encode_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError
    if float(value) != value:  # NaN, which SQLite would turn into NULL, or an integer that a float cannot hold
        raise ValueError
    return float(value)


def _encode_bool(value: Any) -> int:
    if not isinstance(value, bool | np.bool_):
        raise TypeError
    return int(value)


def _encode_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()
    return str(value)


_ATOMS = frozenset({str, int, float, bool, type(None)})
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def _encode_json(value: Any) -> str:
    text = _JSON.encode(value)
    if not _is_plain(value) and json.loads(text) != value:
        raise ValueError(f"it would come back as {reprlib.repr(text)}")
    return text


def _is_plain(value: Any) -> bool:
    """True if JSON certainly gives the value back. To decode every turn's tags again would take as long as encoding."""
    if type(value) is dict:
        return all(type(key) is str and (type(one) in _ATOMS or _is_plain(one)) for key, one in value.items())
    if type(value) is list:
        return all(type(one) in _ATOMS or _is_plain(one) for one in value)
    return type(value) in _ATOMS


def encode_tensor(value: Any) -> bytes:
    """Encodes dtype and shape as one line, then the numbers. Raises TypeError or ValueError for any other value."""
    if not isinstance(value, np.ndarray):
        raise TypeError
    return _tensor_header(value.dtype, value.shape) + value.tobytes()


def decode_tensor(stored: bytes) -> np.ndarray:
    """Decodes what `encode_tensor` wrote, into an array that the caller owns."""
    end = stored.index(b"\n")
    dtype, shape = _tensor_form(stored[:end])
    values = np.frombuffer(stored, dtype, offset=end + 1) if len(stored) > end + 1 else []
    return np.array(values, dtype).reshape(shape)


@lru_cache(maxsize=4096)
def _tensor_form(header: bytes) -> tuple[np.dtype, tuple[int, ...]]:
    dtype, _, shape = header.decode().rpartition(";")
    return _dtype_from(dtype), tuple(int(size) for size in shape.split(",") if size)


@lru_cache(maxsize=4096)
def _tensor_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    header = repr(np.lib.format.dtype_to_descr(dtype))
    if dtype.hasobject or "\n" in header or _dtype_from(header) != dtype:
        raise ValueError(f"dtype {dtype}")
    return f"{header};{','.join(map(str, shape))}\n".encode()


@lru_cache
def _dtype_from(header: str) -> np.dtype:
    return np.lib.format.descr_to_dtype(ast.literal_eval(header))


CODECS: Mapping[ColumnKind, Codec] = {
    ColumnKind.INT: Codec("INTEGER", False, "an integer of at most 64 bits", _encode_int, int),
    ColumnKind.FLOAT: Codec("REAL", False, "a number that is not NaN", _encode_float, float),
    ColumnKind.BOOL: Codec("BOOLEAN", False, "True or False", _encode_bool, bool),
    ColumnKind.WORD: Codec("TEXT", False, "a string that UTF-8 can encode", _encode_text, str),
    ColumnKind.TEXT: Codec("INTEGER", True, "a string that UTF-8 can encode", _encode_text, str),
    ColumnKind.JSON: Codec(
        "INTEGER",
        True,
        "lists and dicts of strings, booleans and finite numbers, with strings as keys",
        _encode_json,
        json.loads,
    ),
    ColumnKind.TENSOR: Codec(
        "INTEGER", True, "a numpy array of numbers (for types numpy lacks, a view)", encode_tensor, decode_tensor
    ),
}
