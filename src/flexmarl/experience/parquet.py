"""Parquet files of an experience store: one per agent's table, with values in place of the store's payload keys.

INT, FLOAT, BOOL   int64, double, bool
TEXT, JSON         string; JSON stays JSON text
TENSOR             lists of the tensor's numbers, one level of lists for each dimension

Rows are written in claim order (group, episode, attempt, hop) and in chunks: a store of any size needs the memory of
one chunk.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexmarl.errors import MissingExtra, StoreError, boundary
from flexmarl.experience.interface import ColumnKind, Row
from flexmarl.experience.ledger import claim_order
from flexmarl.experience.store_file import StoreReader
from flexmarl.records import AgentName

if TYPE_CHECKING:
    import pyarrow


CHUNK_ROWS = 1024
"""Rows of one chunk: a few megabytes of ids and logprobs."""
META = {
    "sample_id": "string",
    "group_id": "int64",
    "episode_index": "int64",
    "attempt": "int64",
    "hop": "int64",
    "policy": "string",
    "policy_version": "int64",
    "state": "string",
    "next_agent_id": "int64",
    "cache": "string",
    "settled_version": "int64",
    "reason": "string",
}
"""The columns before the data columns, with pyarrow's names of their types."""
TYPES = {ColumnKind.INT: "int64", ColumnKind.FLOAT: "float64", ColumnKind.BOOL: "bool_"}


def export_parquet(store: StoreReader, out: Path) -> Iterator[Path]:
    """Writes `{agent}.parquet` into `out` for each agent and yields each file.

    Raises MissingExtra if pyarrow is not installed, StoreError if an export fails.
    """
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingExtra("parquet", "Parquet export") from error
    for agent in store.agents:
        with boundary(StoreError, f"exporting table {agent!r} to {out}"):
            out.mkdir(parents=True, exist_ok=True)
            path = _write(store, agent, out / f"{agent}.parquet")
        yield path


def _write(store: StoreReader, agent: AgentName, path: Path) -> Path:
    """Writes one file. It gets its name only when its last row is in it."""
    from pyarrow import parquet

    schema = _schema(store, agent)
    unfinished = path.with_name(f"{path.name}.part")
    with parquet.ParquetWriter(unfinished, schema) as writer:
        for rows in _chunks(store.rows(agent)):
            writer.write_table(_arrow(store, schema, rows))
    return unfinished.replace(path)


def _schema(store: StoreReader, agent: AgentName) -> "pyarrow.Schema":
    import pyarrow

    fields = [(name, getattr(pyarrow, kind)()) for name, kind in META.items()]
    tensors = _tensor_types(store, agent)
    for column in store.columns:
        kind = tensors.get(column.name) or getattr(pyarrow, TYPES.get(column.kind, "string"))()
        fields.append((column.name, kind))
    return pyarrow.schema(fields)


def _tensor_types(store: StoreReader, agent: AgentName) -> dict[str, "pyarrow.DataType"]:
    """Reads all rows once to find the tensors' types, with which a Parquet file begins; tensors may have any type."""
    import pyarrow

    forms: Mapping[str, set[tuple[np.dtype, int]]] = defaultdict(set)
    names = [column.name for column in store.columns if column.kind is ColumnKind.TENSOR]
    for row in store.rows(agent):
        for name in names:
            if name in row.values:
                forms[name].add((row.values[name].dtype, row.values[name].ndim))
    types = {}
    for name in names:
        depths = {depth for _, depth in forms[name]} or {1}
        if len(depths) > 1:
            raise StoreError(
                f"table {agent!r}: tensors of {name} have {' and '.join(map(str, sorted(depths)))} dimensions; "
                f"a Parquet column has one depth of lists. Select them with payload({name}) instead"
            )
        number = np.result_type(*(dtype for dtype, _ in forms[name])) if forms[name] else np.dtype(np.float32)
        types[name] = pyarrow.from_numpy_dtype(number)
        for _ in range(depths.pop()):
            types[name] = pyarrow.list_(types[name])
    return types


def _chunks(rows: Iterator[Row]) -> Iterator[Sequence[Row]]:
    while chunk := list(islice(rows, CHUNK_ROWS)):
        yield chunk


def _arrow(store: StoreReader, schema: "pyarrow.Schema", rows: Sequence[Row]) -> "pyarrow.Table":
    import pyarrow

    columns = [list(cells) for cells in zip(*map(_meta, rows), strict=True)]
    for column in store.columns:
        columns.append([_plain(column.kind, row.values.get(column.name)) for row in rows])
    arrays = [pyarrow.array(cells, field.type) for cells, field in zip(columns, schema, strict=True)]
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _meta(row: Row) -> tuple[Any, ...]:
    place = claim_order(row.sample_id)
    lineage = (row.policy, row.version, row.state, row.next_agent_id, row.cache, row.settled_version, row.reason)
    return (row.sample_id, *place, *lineage)


def _plain(kind: ColumnKind, value: Any) -> Any:
    """Converts a value for pyarrow. An array of one dimension stays one: no Python object for each of its numbers."""
    if kind is ColumnKind.JSON and value is not None:
        return json.dumps(value)
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return value.tolist()
    return value
