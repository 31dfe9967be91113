"""`flexmarl store` on stores of a run that is over, that still writes, and that was killed."""

import asyncio
import csv
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from flexmarl.cli.store import store
from flexmarl.errors import ConfigError, FlexmarlError, StoreError
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.interface import Outcome, PartialRow
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.records import AgentName, PolicyName, RowState, SampleId, Version

SOLVER, VERIFIER = AgentName("solver"), AgentName("verifier")
LONG = "because\n" * 100
WRITER = """
import asyncio, sys, time
from pathlib import Path
from flexmarl.experience.backends.sqlite import DurableStore
from tests.unit.cli.test_store import fill
store = DurableStore.{how}
asyncio.run(fill(store))
print("written", flush=True)
time.sleep(600)
"""


def sample(group: int) -> SampleId:
    return SampleId(f"sum-{group}_0_g{group}e0a0")


async def fill(store: DurableStore) -> None:
    """Three rows of the solver, of groups 2, 10 and 11; group 2's is ready. The verifier has none."""
    rows = [
        PartialRow(
            sample_id=sample(group),
            policy=PolicyName("shared"),
            version=Version(1),
            values={"text": f"{group} {LONG}", "response_ids": np.arange(group, dtype=np.int32), "reward": group / 4},
        )
        for group in (10, 2, 11)
    ]
    await store.put(SOLVER, rows)
    await store.settle([sample(2)], Outcome(state=RowState.READY))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that is over."""

    async def play() -> None:
        made = DurableStore.create(tmp_path / "experience.sqlite", agents=[SOLVER, VERIFIER], columns=TURN_COLUMNS)
        await fill(made)
        await made.close()

    asyncio.run(play())
    return tmp_path


def called(*arguments: object) -> Result:
    app = Typer()
    app.command()(store)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shown(*arguments: object) -> str:
    result = called(*arguments)
    assert result.exit_code == 0, result.exception
    return result.stdout


def refusal(*arguments: object) -> FlexmarlError:
    error = called(*arguments).exception
    assert isinstance(error, FlexmarlError), error
    return error


def test_without_sql_it_shows_tables_states_columns_and_queries_that_work(run: Path):
    text = shown(run)
    assert "2 open, 1 ready" in text
    assert "reward (float)" in text
    examples = [line.split("'")[1] for line in text.splitlines() if line.startswith("flexmarl store")]
    assert len(examples) == 2
    for sql in examples:
        shown(run, sql)


def test_long_payloads_are_shortened_and_every_row_is_one_line(run: Path):
    text = shown(run, "SELECT sample_id, payload(text) AS text, reward FROM solver ORDER BY group_id")
    rows = [line for line in text.splitlines() if "sum-" in line]
    assert len(rows) == 3
    assert all("because" in row and "…" in row and len(row) <= 80 for row in rows)
    assert rows[0].rstrip().endswith("0.5"), "numbers are at the right"


def test_rows_with_more_columns_than_the_screen_takes_are_shown_one_by_one(run: Path):
    text = shown(run, "SELECT * FROM solver ORDER BY group_id")
    for number in (1, 2, 3):
        assert f"row {number}" in text
    assert len(re.findall(r"^ *sample_id +sum-", text, re.MULTILINE)) == 3
    assert len(re.findall(r"^ *reward +0\.5 *$", text, re.MULTILINE)) == 1
    assert all(len(line) <= 80 for line in text.splitlines())


def test_what_the_limit_hides_is_said(run: Path):
    text = shown(run, "SELECT sample_id FROM solver ORDER BY group_id", "--limit", 2)
    assert "sum-11" not in text
    assert "1 more rows: use --limit 3" in text


def test_machines_get_nothing_but_the_data_and_all_of_it(run: Path):
    sql = "SELECT sample_id, payload(text) AS text, payload(response_ids) AS ids, reward FROM solver ORDER BY group_id"
    rows = json.loads(shown(run, sql, "--json", "--limit", 1))
    assert [row["reward"] for row in rows] == [0.5, 2.5, 2.75]
    assert rows[0] == {"sample_id": sample(2), "text": f"2 {LONG}", "ids": "[0, 1]", "reward": 0.5}
    header, first, *rest = csv.reader(io.StringIO(shown(run, sql, "--csv")))
    assert header == ["sample_id", "text", "ids", "reward"]
    assert first == [sample(2), f"2 {LONG}", "[0, 1]", "0.5"]
    assert len(rest) == 2


def test_a_file_is_taken_as_it_is(run: Path):
    assert json.loads(shown(run / "experience.sqlite", "SELECT count(*) AS n FROM solver", "--json")) == [{"n": 3}]


@pytest.mark.parametrize("killed", [False, True])
def test_it_reads_while_a_run_writes_and_after_it_was_killed(tmp_path: Path, killed: bool):
    how = f"create(Path({str(tmp_path / 'experience.sqlite')!r}), agents=['solver', 'verifier'], columns=TURN_COLUMNS)"
    code = "from flexmarl.experience.turn_rows import TURN_COLUMNS" + WRITER.format(how=how)
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout
            assert writer.stdout.readline() == "written\n"
            if killed:
                os.kill(writer.pid, signal.SIGKILL)
                assert writer.wait() == -signal.SIGKILL
            assert "2 open, 1 ready" in shown(tmp_path)
        finally:
            writer.kill()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["SELECT ids FROM solver"], "no such column: ids; tables: solver, verifier, payloads"),
        (["DELETE FROM solver"], "one SELECT statement works"),
        (["SELECT 1; SELECT 2"], "one SELECT statement works"),
        (["SELECT sample_id, sample_id FROM solver", "--json"], "rename with AS"),
        (["--csv"], "give one after RUN"),
        (["SELECT 1", "--csv", "--json"], "give one of them"),
        (["SELECT 1", "--parquet", "out"], "use --csv for a SELECT"),
    ],
)
def test_a_wrong_command_says_what_works(run: Path, arguments: list[str], named: str):
    error = refusal(run, *arguments)
    assert isinstance(error, ConfigError)
    assert named in str(error)
    assert json.loads(shown(run, "SELECT count(*) AS n FROM solver", "--json")) == [{"n": 3}]


def test_what_is_no_run_is_refused(tmp_path: Path):
    assert "give the path that `train` printed last" in str(refusal(tmp_path / "nowhere"))
    (tmp_path / "config.yaml").touch()
    assert "`store.type: sqlite` keeps them" in str(refusal(tmp_path))
    (tmp_path / "notes.txt").write_text("no database, however long one reads on and on" * 50)
    assert "no SQLite file" in str(refusal(tmp_path / "notes.txt"))
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE solver (x)").connection.close()
    error = refusal(tmp_path / "other.sqlite")
    assert isinstance(error, StoreError)
    assert "no experience store" in str(error)


def test_parquet_writes_one_file_per_agent(run: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert shown(run, "--parquet", out).split() == [f"{out}/solver.parquet", f"{out}/verifier.parquet"]
    assert pyarrow.parquet.read_table(out / "solver.parquet")["reward"].to_pylist() == [0.5, 2.5, 2.75]
