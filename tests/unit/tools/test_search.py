"""The tool `search`: documents by BM25."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import ConfigError
from flexmarl.testing.plugin_checks import check_tool
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
    assert isinstance(TextIndex(documents).best(query, 3), list)


def test_a_line_that_is_no_document_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"title": "no text"}\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2 must be an object with a text"):
        TextIndex(tmp_path / "bad.jsonl")
