"""The tool `search`: the best documents for some words, by BM25, in an index of SQLite (FTS5) in memory."""

import asyncio
import re
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.events.safe_json import parse_json
from flexmarl.settings import Settings
from flexmarl.tools.interface import Observation, ToolContext

_WORD = re.compile(r"\w+")
MOST_WORDS = 32
"""Words of a query that count."""


class TextIndex:
    """The documents of one file. Any number of threads may search it, one at a time."""

    def __init__(self, content: str, name: str) -> None:
        """Reads JSONL. Raises ConfigError that names the line at fault, after the file's `name`."""
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        self._connection.executemany("INSERT INTO documents VALUES (?, ?)", _documents(content, name))
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


def _documents(content: str, name: str) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            document = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"tools: {name}:{number} is no JSON: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise ConfigError(f'tools: {name}:{number} must be an object with a text, e.g. {{"title": "", "text": ""}}')
        found.append((str(document.get("title", "")), document["text"]))
    return found


@lru_cache(maxsize=16)
def _index(path: Path, changed: int) -> TextIndex:
    """The index of a file in the state that it had at a time."""
    try:
        return TextIndex(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tools: the documents {str(path)!r} cannot be read: {error}") from error


@lru_cache(maxsize=16)
def _index_of_task(content: str | bytes, name: str) -> TextIndex:
    """The index of a task's file, which the episodes of the task share. Raises EpisodeError if it is no JSONL."""
    try:
        return TextIndex(content if isinstance(content, str) else content.decode(), name)
    except (ConfigError, UnicodeDecodeError) as error:
        raise EpisodeError(f"the documents of the task cannot be read: {error}") from error


class BoundSearch:
    """The searches of one seat in one episode, in the documents of its task."""

    def __init__(self, settings: "SearchTool", content: str | bytes) -> None:
        self._settings, self._content = settings, content

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Finds documents."""
        return await asyncio.to_thread(self._found, arguments["query"])

    def _found(self, query: str) -> Observation:
        settings = self._settings
        return settings.observation(_index_of_task(self._content, settings.task_file).best(query, settings.top))


class SearchTool(Settings):
    """Finds the documents that fit some words best.

    The index of a file is built once per process, that of a task's file once for the episodes that play it together.
    """

    type: Literal["search"] = "search"
    name: str = Field(default="search", min_length=1)
    """Name that agents call it by."""
    description: str = "Finds the documents that fit the words best."
    """Description that a model may be given."""
    max_parallel: int | None = Field(default=None, ge=1)
    """Calls of tools with this name that run at once in the run; others wait. null: no bound."""
    documents: Path | None = None
    """A JSONL file with an object per line: `text`, and `title` if it has one. A relative path starts from the working
    directory."""
    task_file: str = ""
    """Name of such a file among the files of the task, `data["files"]`: each task has documents of its own."""
    top: int = Field(default=3, ge=1, le=100)
    """Documents that a call finds, at most."""
    max_chars: int = Field(default=1000, ge=16)
    """Most characters of a document that are shown."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """One text, `query`."""
        query = {"type": "string", "description": "Words to search for."}
        return {"type": "object", "properties": {"query": query}, "required": ["query"]}

    @model_validator(mode="after")
    def _has_one_source(self) -> "SearchTool":
        if (self.documents is None) == (not self.task_file):
            got = "both" if self.task_file else "none"
            raise ValueError(f"the tool {self.name!r} needs one of documents and task_file, got {got}")
        return self

    def open(self, context: ToolContext) -> "AbstractAsyncContextManager[SearchTool | BoundSearch]":
        """The tool itself, which has no state per episode; or the documents of the task."""
        if not self.task_file:
            return nullcontext(self)
        if self.task_file not in context.files:
            raise EpisodeError(f"the task has no file {self.task_file!r}, which the tool {self.name!r} reads")
        return nullcontext(BoundSearch(self, context.files[self.task_file]))

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Finds documents."""
        return self.observation(await asyncio.to_thread(self._found, arguments["query"]))

    def observation(self, found: Sequence[tuple[str, str]]) -> Observation:
        """Titles and texts, as an agent reads them and as a scorer does."""
        lines = [
            f"[{place}] {_line(title, text, self.max_chars)}" for place, (title, text) in enumerate(found, start=1)
        ]
        data = [{"title": title, "text": text} for title, text in found]
        return Observation("\n".join(lines) or "nothing was found", data=data)

    def _found(self, query: str) -> list[tuple[str, str]]:
        assert self.documents is not None, "with documents of a task, each episode has a tool of its own"
        try:
            changed = self.documents.stat().st_mtime_ns
        except OSError as error:
            raise EpisodeError(f"the documents {str(self.documents)!r} cannot be read: {error.strerror}") from error
        return _index(self.documents, changed).best(query, self.top)


def _line(title: str, text: str, most: int) -> str:
    cut = text if len(text) <= most else f"{text[:most]} ... [{len(text) - most} characters left out]"
    return f"{title}: {cut}" if title else cut
