"""The tool `sql`: queries on a private copy of a database, in a box."""

import inspect
import json
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.settings import Settings
from flexmarl.tools import sql_driver
from flexmarl.tools.boxed import BoxedCalls
from flexmarl.tools.interface import Observation, ToolContext

FILE = ".database"
"""Name of the database in the box."""


class BoundSql:
    """The queries of one seat in one episode, which share one copy."""

    def __init__(self, calls: BoxedCalls, settings: "SqlTool") -> None:
        self._calls, self._settings = calls, settings

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Answers one query."""
        most = f"{self._settings.max_rows}, {self._settings.max_chars}"
        outcome = await self._calls.run(f"print(database.answer({arguments['query']!r}, {most}))")
        if not outcome.ok or outcome.dropped_bytes:
            return self._calls.observation(outcome)
        answer = json.loads(outcome.stdout)
        if "error" in answer:
            return Observation(answer["error"], ok=False)
        rows = [["NULL" if cell is None else str(cell) for cell in row] for row in answer["rows"]]
        lines = [" | ".join(row) for row in (answer["columns"], *rows)]
        if answer["more"]:
            lines.append("... (more rows are left out)")
        text = "\n".join(lines) if answer["columns"] else "done"
        return Observation(text, data={"columns": answer["columns"], "rows": answer["rows"]})


class SqlTool(Settings):
    """Answers SQL queries on a SQLite database; each agent of each episode has a copy of its own.

    Queries can only read, unless `write` is set. They cannot attach files, load extensions, or use any PRAGMA but
    table_info.
    """

    type: Literal["sql"] = "sql"
    name: str = Field(default="sql", min_length=1)
    """Name that agents call it by."""
    about: str = "Answers one SQL query (SQLite)."
    """Description that a model may be given; the statements that make the tables follow it."""
    max_parallel: int | None = Field(default=None, ge=1)
    """Calls of tools with this name that run at once in the run; others wait. null: no bound."""
    database: Path | None = None
    """A file of SQLite, or a script with the ending .sql. A relative path starts from the working directory."""
    script: str = ""
    """Statements that make the tables."""
    task_file: str = ""
    """Name of a script among the files of the task, `data["files"]`: each task has tables of its own."""
    write: bool = False
    """True: queries may change the copy."""
    timeout_s: float = Field(default=5.0, gt=0, le=600)
    """Longest query."""
    max_steps: int = Field(default=20_000_000, ge=1000)
    """Most steps of SQLite's machine in one query."""
    max_rows: int = Field(default=100, ge=1)
    """Most rows of a result."""
    max_chars: int = Field(default=20_000, ge=1)
    """Most characters of the values of a result."""

    needs_box: ClassVar[bool] = True

    @model_validator(mode="after")
    def _has_one_database(self) -> "SqlTool":
        given = [name for name in ("database", "script", "task_file") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"the tool {self.name!r} needs one of database, script and task_file, got {', '.join(given) or 'none'}"
            )
        return self

    @property
    def keeps_state(self) -> bool:
        """True if queries may change the copy."""
        return self.write

    @property
    def description(self) -> str:
        """The description, with the tables. Raises ConfigError if the database cannot be read."""
        tables = "" if self.task_file else schema_of(self.database, self.script)
        return f"{self.about} {tables}".strip()

    @property
    def parameters(self) -> Mapping[str, Any]:
        """One text, `query`."""
        query = {"type": "string", "description": "One SQL statement."}
        return {"type": "object", "properties": {"query": query}, "required": ["query"]}

    @asynccontextmanager
    async def open(self, context: ToolContext) -> AsyncIterator[BoundSql]:
        """Opens the tool; its copy is made at the first query."""
        files: dict[str, str | bytes] = {}
        if self.task_file:
            if self.task_file not in context.files:
                raise EpisodeError(f"the task has no file {self.task_file!r}, which the tool {self.name!r} reads")
            files[FILE] = context.files[self.task_file]
        else:
            files[FILE] = self.script or _content(self.database)
        binary = self.database is not None and self.database.suffix != ".sql"
        source = "" if binary else f"database.load(open({FILE!r}).read())"
        code = inspect.getsource(sql_driver)
        made = f"database = Database(write={self.write}, steps={self.max_steps})"
        prepared = "\n".join((code, made, source or f"database.copy({FILE!r})"))
        boxed = ToolContext(
            episode=context.episode, seed=context.seed, files=files, deadline=context.deadline, sandbox=context.sandbox
        )
        fails = f"the database of the tool {self.name!r} cannot be loaded in timeout_s={self.timeout_s:g}"
        calls = BoxedCalls(boxed, timeout_s=self.timeout_s, session=True, first=(prepared, fails))
        try:
            yield BoundSql(calls, self)
        finally:
            await calls.close()


def _content(path: Path | None) -> bytes:
    assert path is not None, "the settings have one source"
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tools: the database {str(path)!r} cannot be read: {error.strerror}") from error


@lru_cache(maxsize=64)
def schema_of(database: Path | None, script: str) -> str:
    """The statements that make the tables of a database or a script."""
    content = script.encode() if database is None else _content(database)
    connection = sqlite3.connect(":memory:")
    try:
        if database is not None and database.suffix != ".sql":
            connection.deserialize(content)
        else:
            connection.executescript(content.decode())
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:
        what = f"the database {str(database)!r}" if database else "the script"
        raise ConfigError(f"tools: {what} of the tool `sql` is no SQLite: {error}") from error
    finally:
        connection.close()
    return " ".join(f"{' '.join(sql.split())};" for (sql,) in rows)
