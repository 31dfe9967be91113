"""The tools `python`, `shell` and `sql`, in boxes."""

import asyncio
import pickle
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from flexmarl.agents.settings import TeamSettings
from flexmarl.errors import EpisodeError
from flexmarl.records import GroupId, GroupRecord, Task
from flexmarl.rollout.player import Player
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.settings import SandboxSettings
from flexmarl.testing.agents import ScriptedModel
from flexmarl.tools import Observation, Tool, ToolContext
from flexmarl.tools.boxed import CUT, LOST, PythonTool, ShellTool
from flexmarl.tools.sql import SqlTool
from tests.commands import run_commands
from tests.sandbox.conftest import remains
from tests.unit.agents.tables import TOKENIZER, says, spec, text

SCRIPT = "CREATE TABLE sales(city TEXT, amount INT); INSERT INTO sales VALUES ('Bern', 3), ('Bern', 4), ('Oslo', NULL);"


def called(sandbox: Any, tool: Tool, *calls: Mapping[str, Any], files: Mapping[str, str] = {}) -> list[Observation]:
    async def run() -> list[Observation]:
        async with tool.open(ToolContext(episode="g0e0a0", seed=1, files=files, sandbox=sandbox)) as bound:
            return [await bound.call(arguments) for arguments in calls]

    return asyncio.run(run())


def code(*texts: str) -> list[Mapping[str, Any]]:
    return [{"code": text} for text in texts]


def test_python_keeps_its_session_and_says_when_it_is_lost(sandbox):
    texts = ("x = 6", "x * 7", "1 / 0", "import os; os.kill(os.getpid(), 9)", "x")
    set_, used, failed, killed, anew = called(sandbox, PythonTool(), *code(*texts))
    assert (set_.text, used.text) == ("(no output)", "42")
    assert failed.shown.startswith("error: Traceback")
    assert LOST in killed.text
    assert "NameError" in anew.text
    assert remains() == []


def test_python_without_a_session_begins_anew_with_the_files_of_the_task(sandbox):
    texts = ("x = 1; open('made', 'w')", "import os; sorted(os.listdir())", "x")
    _, files, lost = called(sandbox, PythonTool(session=False), *code(*texts), files={"data.csv": "1"})
    assert files.text == "['data.csv']"
    assert "NameError" in lost.text


def test_what_a_tool_shows_has_no_control_characters(sandbox):
    (seen,) = called(
        sandbox, PythonTool(), *code("print('a\\x1b[2J\\x00b\\r')\nprint('\\ud800'.encode(errors='replace'))")
    )
    assert "a\\x1b[2J\\x00b\\x0d" in seen.shown
    assert "\x1b" not in seen.shown


def test_a_tool_that_takes_too_long_is_an_observation(sandbox):
    late, then = called(sandbox, PythonTool(timeout_s=0.3), *code("y = 1\nwhile True: pass", "y"))
    assert (late.ok, late.text) == (False, "it took longer than 0.3 s")
    assert then.text == "1"


def test_a_cancelled_call_ends_its_box_and_leaves_the_tool_usable(sandbox):
    async def run() -> str:
        context = ToolContext(episode="g0e0a0", seed=1, sandbox=sandbox)
        async with PythonTool(timeout_s=600).open(context) as bound:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await bound.call({"code": "while True: pass"})
            return (await bound.call({"code": "6 * 7"})).text

    assert asyncio.run(run()) == f"42\n{CUT}"
    assert remains() == []


def test_a_call_has_its_time_also_where_the_end_of_the_episode_was_moved(sandbox):
    """The episode's limit stands still while calls are held, and what a tool was opened with is the first one."""

    async def run() -> Observation:
        soon = asyncio.get_running_loop().time() + 0.01
        async with PythonTool().open(ToolContext(episode="e", seed=1, deadline=soon, sandbox=sandbox)) as bound:
            return await bound.call({"code": "import time; time.sleep(0.2); 'done'"})

    assert asyncio.run(run()).text == "'done'"


def test_without_a_sandbox_a_call_is_a_fault():
    with pytest.raises(EpisodeError, match="needs a sandbox"):
        called(None, PythonTool(), *code("1"))


def test_shell_keeps_files_and_tells_the_status(sandbox):
    commands = [{"command": text} for text in ("echo one > f; cat f", "cat f; exit 3", "printf '\\0'")]
    first, second, _ = called(sandbox, ShellTool(), *commands)
    assert first.text == "one"
    assert (second.ok, second.text) == (False, "one\nexit status 3")


def queries(*texts: str) -> list[Mapping[str, Any]]:
    return [{"query": text} for text in texts]


SLOW = "SELECT instr(printf('%.*c', 9000000, 'a'), printf('%.*c', 4000000, 'a') || 'b')"
"""One step of SQLite's machine, which takes minutes."""


def test_a_query_that_costs_its_box_costs_the_next_ones_nothing(sandbox):
    async def run() -> list[str]:
        tool = SqlTool(script=SCRIPT, timeout_s=3)
        async with tool.open(ToolContext(episode="e", seed=1, sandbox=sandbox)) as bound:
            asked = [{"query": query} for query in (SLOW, "SELECT count(*) FROM sales")]
            found = [*await asyncio.gather(*map(bound.call, asked)), await bound.call(asked[1])]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await bound.call(asked[0])
            found.append(await bound.call(asked[1]))
        return [one.text for one in found]

    lost, *others = asyncio.run(run())
    assert lost == f"it took longer than 3 s\n{LOST}"
    assert others == ["count(*)\n3"] * 3


def test_an_answer_of_sql_that_was_cut_is_an_observation():
    few = Bubblewrap(SandboxSettings(output_kib=4))
    (cut,) = called(few, SqlTool(script=SCRIPT), *queries("SELECT printf('%.*c', 9000, 'a')"))
    assert not cut.text.startswith("{'a'")
    assert "bytes of output were not kept" in cut.text


def test_a_database_that_takes_too_long_is_named_with_its_tool_and_its_time(sandbox):
    tool = SqlTool(script=SCRIPT, timeout_s=0.001)
    with pytest.raises(EpisodeError, match=r"database of the tool 'sql' cannot be loaded in timeout_s=0\.001: it took"):
        called(sandbox, tool, *queries("SELECT 1"))


def test_sql_answers_with_rows_and_shows_its_tables_to_the_model(sandbox):
    tool = SqlTool(script=SCRIPT)
    assert "CREATE TABLE sales(city TEXT, amount INT);" in tool.description
    rows, wrong, columns = called(
        sandbox,
        tool,
        *queries("SELECT city, sum(amount) FROM sales GROUP BY 1", "SELECT missing", "PRAGMA table_info(sales)"),
    )
    assert rows.text == "city | sum(amount)\nBern | 7\nOslo | NULL"
    assert rows.data == {"columns": ["city", "sum(amount)"], "rows": [["Bern", 7], ["Oslo", None]]}
    assert (wrong.ok, wrong.text) == (False, "no such column: missing")
    assert "amount" in columns.text


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM sales",
        "DROP TABLE sales",
        "ATTACH '/usr/share/x' AS other",
        "ATTACH ':memory:' AS other",
        "PRAGMA writable_schema = 1",
        "PRAGMA database_list",
        "SELECT load_extension('/usr/lib/x.so')",
        "CREATE TEMP TABLE mine(a)",
        "VACUUM INTO '/tmp/copy'",
        "SELECT 1; SELECT 2",
        "BEGIN",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT hex(zeroblob(900000000))",
    ],
)
def test_a_query_that_may_not_be_answered_is_a_mistake_and_the_copy_stays_as_it_is(query, sandbox):
    tool = SqlTool(script=SCRIPT, max_steps=1_000_000)
    refused, after = called(sandbox, tool, *queries(query, "SELECT count(*) FROM sales"))
    assert refused.ok is False
    assert after.text == "count(*)\n3"


def test_with_write_each_episode_changes_a_copy_of_its_own(sandbox):
    tool = SqlTool(script=SCRIPT, write=True)
    for _ in range(2):
        changed, after = called(sandbox, tool, *queries("DELETE FROM sales", "SELECT count(*) FROM sales"))
        assert (changed.text, after.text) == ("done", "count(*)\n0")


def test_a_database_may_be_a_file_or_a_file_of_the_task(tmp_path, sandbox):
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCRIPT)
    (counted,) = called(sandbox, SqlTool(database=path), *queries("SELECT count(*) FROM sales"))
    of_task = SqlTool(task_file="tables.sql")
    (also,) = called(sandbox, of_task, *queries("SELECT count(*) FROM sales"), files={"tables.sql": SCRIPT})
    assert counted.text == also.text == "count(*)\n3"
    with pytest.raises(EpisodeError, match=r"no file 'tables\.sql'"):
        called(sandbox, of_task, *queries("SELECT 1"))


def test_long_results_are_cut_by_rows_and_characters(sandbox):
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 50) SELECT i FROM n"
    (cut,) = called(sandbox, SqlTool(script=SCRIPT, max_rows=3), *queries(numbers))
    assert cut.text == "i\n1\n2\n3\n... (more rows are left out)"


def test_an_agent_of_an_episode_runs_code_in_a_box_and_reads_what_it_printed(sandbox):
    say = '<tool_call>{{"name": "python", "arguments": {{"code": "{}"}}}}</tool_call>'
    replies = [say.format("seen = open('a.txt').read()"), say.format("seen * 2"), "twice"]
    model = ScriptedModel(TOKENIZER, says(*replies))
    agent = {"tools": [{"type": "python"}], "syntax": {"type": "tag"}, "tell_tools": "none"}

    async def run(task: Task, team: Any) -> None:
        (await team.solver.act(task.prompt)).reward(1.0)

    team = replace(spec({"solver": agent}), run=run, sandbox=pickle.loads(pickle.dumps(sandbox)))
    task = Task(input_id="x", prompt="1", data={"files": {"a.txt": "ab"}})
    player = Player(team=team, generate=model, run_seed=1, timeout_s=600.0)
    episode = asyncio.run(player.play(GroupRecord(group=GroupId(0), task=task, step=0), 0))
    assert episode.finished, episode.reason
    last = text(episode.turns[-1].prompt_ids)
    assert "'abab'" in last
    assert remains() == []


def test_a_tool_with_a_state_is_refused_in_a_tree_of_turns():
    agent = {"tools": [{"type": "python"}], "policy": "p"}
    tree = {"type": "turns", "turn": "any", "candidates": 2}
    with pytest.raises(ValueError, match="session: false, or candidates: 1"):
        TeamSettings.model_validate({"agents": {"solver": agent}, "workflow": tree})
    agent["tools"] = [{"type": "python", "session": False}]
    TeamSettings.model_validate({"agents": {"solver": agent}, "workflow": tree})


def test_a_run_with_boxed_tools_trains_and_check_shows_what_was_tried(small_run, tmp_path):
    with_tool = ("team.agents.solver.tools=[{type: python}]", "policies.one.engine.max_len=512")
    commands = (("check", small_run, *with_tool), ("train", small_run, *with_tool, "steps=1", f"out={tmp_path}/out"))
    checked, trained = run_commands(*commands, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert b"sandbox, filesystem" in checked.stdout
    assert trained.returncode == 0, trained.stderr
