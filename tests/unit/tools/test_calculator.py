"""The calculator agrees with Python on its grammar, and nothing a model writes can hurt it."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from flexmarl.testing.plugin_checks import check_tool
from flexmarl.tools import TOOLS, AnyTool, Calculator, Observation

NUMBERS = st.integers(0, 10**6).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%", " - ", " * "]), inner).map("".join),
        st.tuples(inner, st.just("**"), st.integers(0, 3).map(str)).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("12*(3+4)", "84"),
        ("12345*67890", "838102050"),
        ("  6 * 7 ", "42"),
        ("007", "7"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("2*-3", "-6"),
        ("8/4/2", "1"),
        ("0**0", "1"),
        ("(-1)**99999999999", "-1"),
    ],
)
def test_the_calculator_computes_exact_integers(expression: str, answer: str) -> None:
    assert Calculator().compute(expression) == Observation(answer)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("", "error: the expression ends too early"),
        ("1+", "error: the expression ends too early"),
        ("(1", "error: the expression ends too early"),
        ("1)", "error: unexpected ')'"),
        ("1 2", "error: unexpected '2'"),
        ("7/2", "error: 7/2 is no integer; use // or %"),
        ("7/0", "error: division by zero"),
        ("7//(1-1)", "error: division by zero"),
        ("7%0", "error: division by zero"),
        ("2**-1", "error: negative exponents are not allowed"),
        ("__import__('os')", "error: '_' is not allowed; use integers and + - * / // % ** ( )"),
        ("1.5", "error: '.' is not allowed; use integers and + - * / // % ** ( )"),
        ("٣+1", "error: '٣' is not allowed; use integers and + - * / // % ** ( )"),
        ("9**9**9**9", "error: a number has more than 256 digits"),
        ("9" * 256 + "*2", "error: the expression has 258 characters; 256 are allowed"),
        ("(" * 120 + "1" + ")" * 120, "error: nested more than 50 deep"),
        ("-" * 200 + "1", "error: nested more than 50 deep"),
    ],
)
def test_a_mistake_comes_back_as_text_that_says_what_is_wrong(expression: str, reason: str) -> None:
    observation = asyncio.run(Calculator().call({"expression": expression}))
    assert (observation.shown, observation.ok) == (reason, False)


@given(EXPRESSIONS)
@settings(max_examples=300, deadline=None)
def test_the_calculator_agrees_with_python_or_says_why_not(expression: str) -> None:
    result = Calculator(max_chars=4096, max_digits=400, max_depth=100).compute(expression).shown
    try:
        # Digits without leading zeros, our operators and parentheses: nothing else reaches eval.
        expected = eval(expression, {"__builtins__": {}})
    except ZeroDivisionError:
        assert result == "error: division by zero"
    else:
        assert result == str(expected) or result == "error: a number has more than 400 digits"


@given(st.text(alphabet="0123456789+-*/%() ", max_size=300) | st.text(max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_text_gives_a_number_or_an_error(text: str) -> None:
    result = Calculator().compute(text)
    assert not result.ok or abs(int(result.text)) < 10**256


@given(st.integers(2, 10**6), st.integers(0, 2000))
@settings(max_examples=200, deadline=None)
def test_a_power_is_refused_exactly_when_it_is_too_large(base: int, exponent: int) -> None:
    fits = base**exponent < 10**256
    assert Calculator().compute(f"{base}**{exponent}").ok == fits


@pytest.mark.parametrize("digits", [1, 4000])
def test_the_widest_limits_still_print(digits: int) -> None:
    calculator = Calculator(max_digits=digits, max_chars=4096)
    largest = "9" * digits
    assert calculator.compute(largest).shown == largest
    assert calculator.compute(f"{largest}+1").shown == f"error: a number has more than {digits} digits"
    assert not calculator.compute("9" * 4096).ok


def test_every_tool_of_the_table_is_chosen_by_its_type() -> None:
    needed = {"sql": {"script": "CREATE TABLE t (x)"}, "search": {"documents": "documents.jsonl"}}
    needed["mcp"] = {"name": "time", "command": ["server"], "tools_file": "time.json"}
    for name in TOOLS.built_in:
        assert isinstance(TypeAdapter(AnyTool).validate_python({"type": name, **needed.get(name, {})}), TOOLS[name])


def test_the_calculator_passes_the_conformance_check() -> None:
    check_tool(Calculator(), good=["12*(3+4)", "-2**2"])


def test_a_tool_that_refuses_what_it_should_understand_is_caught() -> None:
    with pytest.raises(AssertionError, match="'7/2' is understood, but the tool said 'error: 7/2 is no integer"):
        check_tool(Calculator(), good=["7/2"])
