import doctest
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexmarl.agents.context
import flexmarl.agents.interpret
from flexmarl.agents.interpret import PARSERS, Choice


@pytest.mark.parametrize("module", [flexmarl.agents.interpret, flexmarl.agents.context])
def test_the_examples_in_the_docs_are_true(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("name", "text", "parsed"),
    [
        ("text", " 7 \n", "7"),
        ("text", " ", None),
        ("last_line", "so\n\n 7 \n \n", "7"),
        ("last_line", "", None),
        ("integer", "-12", -12),
        ("integer", "1,234,567", 1234567),
        ("integer", "3.5", None),
        ("integer", "x12 v3", None),
        ("integer", "it is 42.", 42),
        ("integer", "1" * 5000, None),
        ("boxed", r"\boxed{1} then \boxed{ 2 }", "2"),
        ("boxed", r"\boxed{1", None),
        ("boxed", "1", None),
        ("json", '```json\n{"a": [1, {"b": 2}]}\n```', {"a": [1, {"b": 2}]}),
        ("json", '{"a": 1} {"b": 2} {', {"b": 2}),
        ("json", "[1]", None),
    ],
)
def test_parsers_read_what_was_said(name, text, parsed):
    assert PARSERS[name](text) == parsed


@pytest.mark.parametrize(
    ("text", "choice"), [("Reject", "reject"), ("approved", None), ("reject? no: approve.", "approve"), ("", None)]
)
def test_a_choice_is_the_option_said_last(text, choice):
    assert Choice(options=("approve", "reject"))(text) == choice


@given(st.text() | st.text(st.sampled_from('{}[]"\\boxed,:1-. ')))
def test_no_text_makes_a_parser_raise(text):
    for name in PARSERS:
        PARSERS[name](text)
    Choice(options=("a", "b"))(text)


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())), st.text("abc \n"))
def test_json_is_read_back_from_any_text_without_braces(value, around):
    assert PARSERS["json"](f"{around}{json.dumps(value)}{around}") == value
