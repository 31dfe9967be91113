"""The tool `search`: the best documents for some words, by BM25, in an index of SQLite (FTS5) in memory."""

import asyncio
import re
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.events.safe_json import parse_json
from flexmarl.settings import Settings
from flexmarl.tools.boxed import shown
from flexmarl.tools.interface import Observation, ToolContext

_WORD = re.compile(r"\w+")
MOST_WORDS = 32
"""Words of a query that count."""


class TextIndex:
    """The documents of one file. Any number of threads may search it, one at a time."""

    def __init__(self, path: Path) -> None:
        """Reads a JSONL file. Raises ConfigError that names the line at fault."""
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        self._connection.executemany("INSERT INTO documents VALUES (?, ?)", _documents(path))
        self._connection.execute("PRAGMA query_only = 1")

    def best(self, query: str, most: int) -> list[tuple[str, str]]:
        """Title and text of the best documents, best first. A query is words; nothing in it is an operator."""
        words = _WORD.findall(query)[:MOST_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        sql = "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?"
        with self._lock:
            return self._connection.execute(sql, (match, most)).fetchall()


def _documents(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tools: the documents {str(path)!r} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            document = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"tools: {path}:{number} is no JSON: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise ConfigError(f'tools: {path}:{number} must be an object with a text, e.g. {{"title": "", "text": ""}}')
        found.append((str(document.get("title", "")), document["text"]))
    return found


@lru_cache(maxsize=16)
def _index(path: Path, changed: int) -> TextIndex:
    """The index of a file in the state that it had at a time."""
    return TextIndex(path)


class SearchTool(Settings):
    """Finds the documents that fit some words best. Its index is built once per process."""

    type: Literal["search"] = "search"
    name: str = Field(default="search", min_length=1)
    """Name that agents call it by."""
    description: str = "Finds the documents that fit the words best."
    """Description that a model may be given."""
    max_parallel: int | None = Field(default=None, ge=1)
    """Calls of tools with this name that run at once in the run; others wait. null: no bound."""
    documents: Path
    """A JSONL file with an object per line: `text`, and `title` if it has one. A relative path starts from the working
    directory."""
    top: int = Field(default=3, ge=1, le=100)
    """Documents that a call finds, at most."""
    max_chars: int = Field(default=1000, ge=16)
    """Most characters of a document that are shown."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """One text, `query`."""
        query = {"type": "string", "description": "Words to search for."}
        return {"type": "object", "properties": {"query": query}, "required": ["query"]}

    def open(self, context: ToolContext) -> AbstractAsyncContextManager["SearchTool"]:
        """The tool itself, which has no state per episode."""
        return nullcontext(self)

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Finds documents."""
        found = await asyncio.to_thread(self._found, arguments["query"])
        lines = [
            f"[{place}] {_line(title, text, self.max_chars)}" for place, (title, text) in enumerate(found, start=1)
        ]
        data = [{"title": title, "text": text} for title, text in found]
        return Observation(shown("\n".join(lines)) or "nothing was found", data=data)

    def _found(self, query: str) -> list[tuple[str, str]]:
        try:
            changed = self.documents.stat().st_mtime_ns
        except OSError as error:
            raise EpisodeError(f"the documents {str(self.documents)!r} cannot be read: {error.strerror}") from error
        return _index(self.documents, changed).best(query, self.top)


def _line(title: str, text: str, most: int) -> str:
    cut = text if len(text) <= most else f"{text[:most]} ... [{len(text) - most} characters left out]"
    return f"{title}: {cut}" if title else cut
