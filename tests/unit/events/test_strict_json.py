"""JSON that any program reads, and JSON of anybody, read in bounded work."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import ConfigError, FlexmarlError
from flexmarl.events.journal import read_lines
from flexmarl.events.safe_json import READ_DEPTH, json_text, parse_json
from flexmarl.tasks.table import read_jsonl

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=12,
)


def strictly(text):
    """As a reader takes it that knows no more than the standard."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(VALUES, st.booleans())
def test_whatever_is_written_is_strict_json_of_ascii_without_steering_characters(value, figures):
    text = json_text(value, figures=figures)
    strictly(text)
    assert text.isascii()
    assert text.isprintable()


def test_numbers_that_json_lacks_are_texts_and_as_figures_null():
    odd = {"a": math.inf, "b": [math.nan, -math.inf, 1.5], "c": (2,)}
    assert strictly(json_text(odd)) == {"a": "inf", "b": ["nan", "-inf", 1.5], "c": [2]}
    assert strictly(json_text(odd, figures=True)) == {"a": None, "b": [None, None, 1.5], "c": [2]}


@given(st.text() | st.binary() | VALUES.map(lambda value: json.dumps(value)))
def test_any_text_is_read_or_refused_as_a_value_error(text):
    try:
        parse_json(text)
    except ValueError:
        return
    strictly(text)


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
ODD = r""""\ud800" NaN [Infinity,-Infinity] "\ud83d\ude00" "\u0000\/\b" {"a":1,"a":2} [1,] 1. 01 -0 1e999 tru"""


@given(NUMBERS | st.sampled_from(ODD.split()) | VALUES.map(lambda value: json.dumps(value, ensure_ascii=False)))
def test_a_text_is_read_as_python_reads_it(text):
    def read(how):
        try:
            return repr(how(text))
        except ValueError:
            return None

    def refuse(constant):
        raise ValueError(constant)

    assert read(parse_json) == read(lambda one: json.loads(one, parse_constant=refuse))


@pytest.mark.parametrize("depth", [READ_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_what_is_nested_too_deep_is_refused_however_deep(tmp_path, depth, opening, closing):
    text = f"{opening * depth}1{closing * depth}"
    with pytest.raises(ValueError, match="more than 200 levels of nesting"):
        parse_json(text)
    (tmp_path / "tasks.jsonl").write_text(f'{{"prompt": "1+1"}}\n{{"prompt": {text}}}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2: not JSON: more than 200 levels"):
        read_jsonl(tmp_path / "tasks.jsonl", "tasks.file")
    with pytest.raises(FlexmarlError, match=r"tasks\.jsonl, line 2: not JSON"):
        list(read_lines(tmp_path / "tasks.jsonl"))


def test_as_deep_as_is_allowed_and_as_wide_as_can_be_is_read():
    deepest = "[" * READ_DEPTH + "]" * READ_DEPTH
    assert parse_json(deepest) is not None
    assert len(parse_json(f"[{','.join(['[]'] * 1000)}]")) == 1000


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_a_damaged_journal_is_read_or_refused_by_its_line(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    refusal = ""
    try:
        assert all(isinstance(entry, dict) for entry in read_lines(path))
    except FlexmarlError as error:
        refusal = str(error)
    assert not refusal or f"{path}, line " in refusal
