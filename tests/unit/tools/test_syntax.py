"""Calls are found in text exactly where a model wrote them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.testing.plugin_checks import check_syntax
from flexmarl.tools import FunctionSyntax, Incomplete, Malformed, Parsed, TagSyntax, ToolCall
from flexmarl.tools.syntax import Syntax


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("calc(12*34)", "12*34"),
        ("so calc((1+2)*3) it is", "(1+2)*3"),
        ("recalc(1) calc(2)", "2"),
        ("(a note) calc(2)*", "2"),
        ("calc()", ""),
    ],
)
def test_a_function_call_ends_where_its_parentheses_balance(text: str, argument: str) -> None:
    assert FunctionSyntax().parse(text) == ToolCall("calculator", argument)


@pytest.mark.parametrize("text", ["calc(", "calc((1+2)", "calc((1+2)*", "calc(((1)+(2))*3"])
def test_a_call_that_the_engine_cut_at_its_first_parenthesis_goes_on(text: str) -> None:
    assert isinstance(FunctionSyntax().parse(text), Incomplete)


@pytest.mark.parametrize("text", ["", "42", "(a note)", "recalc(1)", "calc 12", "calc"])
def test_ordinary_text_is_no_call(text: str) -> None:
    assert FunctionSyntax().parse(text) is None
    assert TagSyntax().parse(text) is None


def test_words_map_to_tools_and_must_be_identifiers() -> None:
    syntax = FunctionSyntax(names={"calc": "calculator", "find": "search"})
    assert syntax.parse("find(pi)") == ToolCall("search", "pi")
    assert syntax.render(ToolCall("search", "pi")) == "find(pi)"
    with pytest.raises(ValidationError, match="'my calc' is no identifier"):
        FunctionSyntax(names={"my calc": "calculator"})


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ("6*7", "6*7"),
        ({"expression": "6*7"}, "6*7"),
        ({"n": 3}, "3"),
        ({"a": 1, "b": 2}, '{"a": 1, "b": 2}'),
        ({}, "{}"),
    ],
)
def test_a_tag_call_takes_the_forms_that_models_write(arguments: object, argument: str) -> None:
    body = json.dumps({"name": "calculator", "arguments": arguments})
    assert TagSyntax().parse(f"let me see\n<tool_call>\n{body}\n</tool_call>") == ToolCall("calculator", argument)


@pytest.mark.parametrize(
    "body", ["", "6*7", '{"name": "calculator"}', '{"name": 3, "arguments": ""}', "[1]", "[" * 100_000]
)
def test_a_malformed_tag_call_tells_the_model_what_is_wrong(body: str) -> None:
    parsed = TagSyntax().parse(f"<tool_call>{body}</tool_call>")
    assert isinstance(parsed, Malformed)
    assert parsed.observation.startswith("error: ")


def test_an_open_tag_is_incomplete() -> None:
    assert TagSyntax().parse('<tool_call>{"name"') == Incomplete("error: <tool_call> without </tool_call>")


BALANCED = st.recursive(
    st.text("0123456789+-* ", max_size=5), lambda inner: st.tuples(inner, inner).map("({0[0]}){0[1]}".format)
)


@given(argument=BALANCED, before=st.text(max_size=10).filter(lambda text: "calc(" not in text and "<" not in text))
@settings(max_examples=200, deadline=None)
def test_what_is_rendered_is_parsed_back(argument: str, before: str) -> None:
    call = ToolCall("calculator", argument)
    for syntax in (FunctionSyntax(), TagSyntax()):
        assert syntax.parse(f"{before} {syntax.render(call)}") == call
        assert syntax.render(call).endswith(syntax.stop)


@given(st.text(max_size=60) | st.text(alphabet='calc(){}<>/_to"', max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_a_syntax_raise(text: str) -> None:
    for syntax in (FunctionSyntax(), TagSyntax()):
        syntax.parse(text)
        syntax.parse(f"<tool_call>{text}</tool_call> calc({text}")


@pytest.mark.parametrize("syntax", [FunctionSyntax(), TagSyntax()])
def test_every_syntax_passes_the_conformance_check(syntax: Syntax) -> None:
    check_syntax(syntax, call=ToolCall("calculator", "(1+2)*3"))


def test_a_syntax_that_forgets_nesting_is_caught() -> None:
    class FirstParenthesis(FunctionSyntax):
        def parse(self, text: str) -> Parsed:
            _, opened, rest = text.partition("calc(")
            argument, closed, _ = rest.partition(")")
            return ToolCall("calculator", argument) if opened and closed else None

    with pytest.raises(AssertionError, match="what is rendered is parsed back"):
        check_syntax(FirstParenthesis(), call=ToolCall("calculator", "(1+2)*3"))
