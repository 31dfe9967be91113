"""The program that answers queries of a model inside a box, on a private copy of a database in memory.

It is sent to the session of the box as text, and imports nothing of flexmarl. SQLite's authorizer refuses what a query
may not do; the box bounds its memory, time and files.
"""

import json
import sqlite3

READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
WRITING = {
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,
    sqlite3.SQLITE_CREATE_VIEW,
    sqlite3.SQLITE_DROP_TABLE,
    sqlite3.SQLITE_DROP_INDEX,
    sqlite3.SQLITE_DROP_VIEW,
    sqlite3.SQLITE_ALTER_TABLE,
    sqlite3.SQLITE_REINDEX,
    sqlite3.SQLITE_SAVEPOINT,
}
FORBIDDEN_FUNCTIONS = {"load_extension", "writefile", "readfile", "edit", "fts3_tokenizer"}


class Database:
    """The copy, and the bounds of its answers."""

    def __init__(self, *, write: bool, steps: int) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        self.allowed = READING | WRITING if write else READING
        self.steps = steps
        self.left = steps

    def load(self, script: str) -> None:
        """Fills the copy, before any query of a model."""
        self.connection.executescript(script)
        self.guard()

    def copy(self, path: str) -> None:
        """Fills the copy from a file of SQLite."""
        source = sqlite3.connect(path)
        source.backup(self.connection)
        source.close()
        self.guard()

    def guard(self) -> None:
        """From now on, queries are a model's."""
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000_000)
        self.connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self.connection.set_authorizer(self.authorize)
        self.connection.set_progress_handler(self.count, 1000)

    def authorize(self, action: int, first: object, second: object, *_: object) -> int:
        """Says whether a query may do this."""
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if first == "table_info" else sqlite3.SQLITE_DENY
        if action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FORBIDDEN_FUNCTIONS:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in self.allowed else sqlite3.SQLITE_DENY

    def count(self) -> int:
        """Ends a query that has taken all its steps."""
        self.left -= 1000
        return int(self.left < 0)

    def answer(self, query: str, most_rows: int, most_chars: int) -> str:
        """The answer to one query, as JSON: `error`, or `columns`, `rows`, and how many rows are left out."""
        self.left = self.steps
        try:
            cursor = self.connection.execute(query)
            rows, size, more = [], 0, False
            for row in cursor:
                cells = [one if isinstance(one, (int, float, type(None))) else str(one) for one in row]
                size += sum(len(str(one)) for one in cells)
                if len(rows) == most_rows or size > most_chars:
                    more = True
                    break
                rows.append(cells)
            columns = [one[0] for one in cursor.description or ()]
            cursor.close()
            return json.dumps({"columns": columns, "rows": rows, "more": more})
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            said = f"it takes more than {self.steps} steps" if "interrupt" in str(error) else str(error)
            return json.dumps({"error": said})
