"""The tool `search`: documents by BM25."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.testing.plugin_checks import check_tool
from flexmarl.tools import Observation, ToolContext
from flexmarl.tools.search import SearchTool, TextIndex

LINES = (
    '{"title": "Bern", "text": "Bern is the capital of Switzerland."}',
    '{"title": "Oslo", "text": "Oslo is the capital of Norway, and Oslo is old."}',
    '{"text": "Nothing about towns."}',
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "documents.jsonl"
    path.write_text("\n".join(LINES))
    return path


def test_the_best_document_comes_first_and_scorers_get_it_whole(documents):
    tool = SearchTool(documents=documents, top=2, max_chars=20)
    found = asyncio.run(tool.call({"query": "capital of norway"}))
    assert found.text.splitlines()[0] == "[1] Oslo: Oslo is the capital  ... [27 characters left out]"
    assert found.data[0]["text"] == "Oslo is the capital of Norway, and Oslo is old."


def test_the_tool_conforms(documents):
    check_tool(SearchTool(documents=documents), good=[{"query": "oslo"}, {"query": ""}, {"query": 'NEAR( " * :'}])


@given(query=st.text(max_size=60))
def test_no_query_is_an_error(documents, query):
    assert isinstance(TextIndex(documents.read_text(), "documents").best(query, 3), list)


def test_a_line_that_is_no_document_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"title": "no text"}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2 must be an object with a text"):
        asyncio.run(SearchTool(documents=tmp_path / "bad.jsonl").call({"query": "good"}))


def searched(files: dict[str, str | bytes], query: str) -> Observation:
    """What a call finds among the documents of a task."""

    async def call() -> Observation:
        async with SearchTool(task_file="facts.jsonl", top=1).open(
            ToolContext(episode="e", seed=0, files=files)
        ) as tool:
            return await tool.call({"query": query})

    return asyncio.run(call())


def test_each_task_has_documents_of_its_own():
    one, other = ('{"title": "k7 boss", "text": "m3"}', b'{"title": "k7 boss", "text": "p1"}')
    assert searched({"facts.jsonl": one}, "boss of k7").text == "[1] k7 boss: m3"
    assert searched({"facts.jsonl": other}, "boss of k7").text == "[1] k7 boss: p1"


def test_documents_of_a_task_that_are_missing_or_broken_fail_the_episode():
    with pytest.raises(EpisodeError, match=r"no file 'facts\.jsonl'"):
        searched({}, "k7")
    with pytest.raises(EpisodeError, match=r"facts\.jsonl:1 is no JSON"):
        searched({"facts.jsonl": "k7 boss m3"}, "k7")
    with pytest.raises(EpisodeError, match="cannot be read"):
        searched({"facts.jsonl": b"\xff"}, "k7")


@pytest.mark.parametrize(("sources", "got"), [({}, "none"), ({"documents": "a", "task_file": "b"}, "both")])
def test_documents_have_one_source(sources, got):
    with pytest.raises(ValidationError, match=f"needs one of documents and task_file, got {got}"):
        SearchTool(**sources)
