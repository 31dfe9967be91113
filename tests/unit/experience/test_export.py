"""Parquet files of a store hold what was put, whatever the types, and are never seen half written."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from flexmarl.errors import MissingExtra, StoreError
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.interface import Column, ColumnKind, PartialRow
from flexmarl.experience.parquet import CHUNK_ROWS, META, export_parquet
from flexmarl.experience.store_file import read_store
from flexmarl.records import AgentName, PolicyName, SampleId, Version

SOLVER, VERIFIER = AgentName("solver"), AgentName("verifier")
COLUMNS = tuple(Column(kind.value, kind) for kind in ColumnKind)


def written(folder: Path, values: Sequence[Mapping[str, Any]]) -> Path:
    """A store in which the solver has a row of each values, one group each; the verifier has none."""

    async def fill() -> None:
        store = DurableStore.create(folder / "experience.sqlite", agents=[SOLVER, VERIFIER], columns=COLUMNS)
        rows = [
            PartialRow(sample_id=SampleId(f"x_0_g{g}e1a0"), policy=PolicyName("p"), version=Version(3), values=given)
            for g, given in enumerate(values)
        ]
        await store.put(SOLVER, rows)
        await store.close()

    asyncio.run(fill())
    return folder / "experience.sqlite"


def exported(folder: Path, values: Sequence[Mapping[str, Any]]) -> pyarrow.Table:
    with read_store(written(folder, values)) as store:
        list(export_parquet(store, folder / "out"))
    return pyarrow.parquet.read_table(folder / "out" / "solver.parquet")


def test_every_kind_of_column_comes_back(tmp_path: Path):
    ids = np.arange(5, dtype=np.int32)
    values = {"int": 7, "float": 0.1, "bool": True, "text": "é\n", "json": [1, {"a": "b"}], "tensor": ids}
    table = exported(tmp_path, [values, {}])
    full, empty = table.to_pylist()
    assert {name: full[name] for name in values} == values | {"json": '[1, {"a": "b"}]', "tensor": [0, 1, 2, 3, 4]}
    assert {name: empty[name] for name in values} == dict.fromkeys(values)
    assert table.schema.field("tensor").type == pyarrow.list_(pyarrow.field("element", pyarrow.int32()))
    assert (full["sample_id"], full["group_id"], full["episode_index"]) == ("x_0_g0e1a0", 0, 1)
    assert (full["policy"], full["policy_version"], full["state"]) == ("p", 3, "open")


def test_more_rows_than_a_chunk_come_in_the_order_of_their_groups(tmp_path: Path):
    count = 2 * CHUNK_ROWS + 1
    table = exported(tmp_path, [{"tensor": np.full(3, row, np.float32)} for row in range(count)])
    assert table["group_id"].to_pylist() == list(range(count))
    assert np.array_equal(table["tensor"].combine_chunks().flatten(), np.arange(count).repeat(3))
    assert pyarrow.parquet.ParquetFile(tmp_path / "out" / "solver.parquet").num_row_groups == 3


def test_tensors_of_several_dtypes_get_one_that_holds_all(tmp_path: Path):
    table = exported(tmp_path, [{"tensor": np.array([1], np.int32)}, {"tensor": np.array([0.5], np.float32)}])
    assert table["tensor"].to_pylist() == [[1.0], [0.5]]
    assert table.schema.field("tensor").type.value_type == pyarrow.float64()


def test_a_matrix_is_lists_of_lists(tmp_path: Path):
    assert exported(tmp_path, [{"tensor": np.eye(2, dtype=np.int64)}])["tensor"].to_pylist() == [[[1, 0], [0, 1]]]


def test_tensors_of_several_depths_are_refused_and_leave_no_file(tmp_path: Path):
    with pytest.raises(StoreError, match=r"tensors of tensor have 1 and 2 dimensions.*payload\(tensor\)"):
        exported(tmp_path, [{"tensor": np.zeros(2)}, {"tensor": np.zeros((2, 2))}])
    assert list((tmp_path / "out").iterdir()) == []


def test_an_agent_without_rows_has_a_file_without_rows(tmp_path: Path):
    exported(tmp_path, [])
    table = pyarrow.parquet.read_table(tmp_path / "out" / "verifier.parquet")
    assert table.num_rows == 0
    assert table.column_names == [*META, *(column.name for column in COLUMNS)]


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with read_store(written(tmp_path, [])) as store, pytest.raises(MissingExtra, match=r"pip install 'pyarrow>=\d+'$"):
        next(export_parquet(store, tmp_path / "out"))
