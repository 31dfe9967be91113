"""Tools that are functions: the schema of the signature, arguments that fit it, and observations."""

import asyncio
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.testing.plugin_checks import check_tool
from flexmarl.tools import TOOLS, Calculator, Observation, Refusal, Tool, ToolContext, is_pure, tool
from flexmarl.tools.arguments import BadArguments, check_schema, example_of, fitted, signature
from flexmarl.tools.function_tool import tool_of_function
from flexmarl.tools.interface import max_parallel_of


@tool
def add(a: int, b: Annotated[int, Field(ge=0)] = 1, *, unit: Literal["m", "km"] = "m") -> str:
    """Adds two
    lengths.

    Args:
        a: First length.
        unit: Unit of both.

    Returns:
        The sum.
    """
    if a > 100:
        raise Refusal("too long")
    return f"{a + b} {unit}"


@tool("many")
async def join(words: list[str], options: dict[str, float]) -> dict[str, Any]:
    """Joins words."""
    return {"text": "".join(words), "sum": sum(options.values())}


@tool("raw")
def encoded(text: str) -> bytes:
    """Encodes a text."""
    return text.encode()


def made(name: str) -> Tool:
    return TOOLS[name]()  # type: ignore[call-arg]


def called(of: Tool, arguments: Mapping[str, Any]) -> Observation:
    async def call() -> Observation:
        async with of.open(ToolContext(episode="g0e0a0", seed=1)) as bound:
            return await bound.call(arguments)

    return asyncio.run(call())


def test_the_schema_is_that_of_the_signature_and_the_docstring() -> None:
    assert (made("add").name, made("add").description) == ("add", "Adds two lengths.")
    assert made("add").parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "First length."},
            "b": {"type": "integer", "minimum": 0, "default": 1},
            "unit": {"type": "string", "enum": ["m", "km"], "default": "m", "description": "Unit of both."},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert signature(made("add").parameters) == 'a: integer, b: integer = 1, unit: "m" | "km" = "m"'


def test_plain_and_coroutine_functions_conform() -> None:
    check_tool(made("add"), good=[{"a": 1}, {"a": "2", "b": 3, "unit": "km"}, "4"])
    check_tool(made("many"), good=[{"words": ["a"], "options": {"x": 1}}, '{"words": [], "options": {}}'])


def test_what_a_function_returns_is_the_observation() -> None:
    assert called(made("add"), {"a": 2, "unit": "km"}) == Observation("3 km")
    assert called(made("many"), {"words": ["a", "b"], "options": {"x": 0.5}}) == Observation('{"text":"ab","sum":0.5}')
    assert called(made("add"), {"a": 101}) == Observation("too long", ok=False)
    assert called(made("add"), {"a": 1, "b": -1}).ok is False
    with pytest.raises(EpisodeError, match="the tool 'raw' returned bytes; return a text"):
        called(made("raw"), {"text": "a"})


@pytest.mark.parametrize(
    ("given_", "fault"),
    [
        ({}, "'a' is a required property"),
        ({"a": "one"}, "a: 'one' is not of type 'integer'"),
        ({"a": 1, "b": -2}, "b: -2 is less than the minimum of 0"),
        ({"a": 1, "unit": "mile"}, "unit: 'mile' is not one of ['m', 'km']"),
        ({"a": 1, "c": 2}, "('c' was unexpected)"),
        ({"a": "x" * 1_000_000}, "is not of type 'integer'"),
        ("[" * 10_000, "is not of type 'integer'"),
    ],
)
def test_a_bad_argument_is_named(given_: Any, fault: str) -> None:
    found = fitted(given_, made("add").parameters)
    assert isinstance(found, BadArguments)
    assert fault in found.reason
    assert len(found.reason) < 400
    assert "the arguments are: a: integer" in found.reason


@pytest.mark.parametrize("name", ["add", "many"])
def test_the_example_of_a_call_has_arguments_of_their_types(name: str) -> None:
    schema = made(name).parameters
    example = {argument: example_of(one) for argument, one in schema["properties"].items()}
    assert not isinstance(fitted(example, schema), BadArguments)
    assert {type(value) for value in example.values()} == {"add": {int, str}, "many": {list, dict}}[name]


def test_a_text_that_the_schema_takes_stays_a_text() -> None:
    schema = {"type": "object", "properties": {"code": {"type": "string"}, "n": {"anyOf": [{"type": "integer"}]}}}
    assert fitted({"code": "3", "n": "3"}, schema) == {"code": "3", "n": 3}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"code": "6*7"}', {"code": "6*7"}),
        ('{"code": "6*7", "n": "3"}', {"code": "6*7", "n": 3}),
        ('{"n": 3}', {"code": '{"n": 3}'}),
        ('{"code": 1, "other": 2}', {"code": '{"code": 1, "other": 2}'}),
        ("{6*7}", {"code": "{6*7}"}),
        ('["code"]', {"code": '["code"]'}),
        ("", {"code": ""}),
    ],
)
def test_a_text_that_names_the_arguments_is_read_and_any_other_is_the_only_argument(text, arguments) -> None:
    schema = {
        "type": "object",
        "properties": {"code": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["code"],
    }
    assert fitted(text, schema) == arguments


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(arguments=st.text(max_size=40) | st.dictionaries(st.sampled_from(["a", "b", "unit", "x"]), values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_arguments_fit_and_can_be_called_or_are_refused_with_a_reason(arguments: Any) -> None:
    found = fitted(arguments, made("add").parameters)
    if isinstance(found, BadArguments):
        assert found.reason
    else:
        assert found["a"] == int(found["a"])
        assert fitted(found, made("add").parameters) == found, "what fits fits again"


def test_an_error_of_the_function_is_none_of_the_models() -> None:
    async def gone(x: int) -> str:
        """Asks a server."""
        raise OSError("server gone")

    with pytest.raises(OSError, match="server gone"):
        called(tool_of_function(gone, "gone")(), {"x": 1})  # type: ignore[call-arg]


def test_a_tool_is_sent_to_another_process() -> None:
    sent = TOOLS["add"](name="plus", max_parallel=3)  # type: ignore[call-arg]
    received = pickle.loads(pickle.dumps(sent))
    assert max_parallel_of(received) == 3
    assert (received, received.name, called(received, {"a": 1})) == (sent, "plus", Observation("2 m"))


def no_docstring(a: int) -> str:
    return str(a)


def no_type(a) -> str:  # type: ignore[no-untyped-def]
    """Says a."""
    return str(a)


def no_names(*a: int) -> str:
    """Says a."""
    return str(a)


def no_schema(a: Callable[[], int]) -> str:
    """Says a."""
    return str(a)


def no_such_argument(a: int) -> str:
    """Says a.

    Args:
        b: Not there.
    """
    return str(a)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "the tool 'odd': its function has no docstring"),
        (no_type, "the tool 'odd': the argument 'a' has no type; annotate it"),
        (no_names, "the tool 'odd': '\\*a: int' has no name that a model can give"),
        (no_schema, "the tool 'odd': no JSON schema of its signature"),
        (no_such_argument, "the tool 'odd': its docstring describes an argument 'b' that it does not have"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tool("odd")(function)
    assert "odd" not in list(TOOLS)


def test_a_tool_whose_parameters_are_no_schema_is_refused() -> None:
    class Odd:
        name, description, parameters = "odd", "Is odd.", {"type": "string"}

    with pytest.raises(
        ConfigError, match=r"tool 'odd': its parameters must be the schema of an object, got type 'string'"
    ):
        check_schema(Odd())  # type: ignore[arg-type]


@tool(pure=True)
def twice(x: int) -> int:
    """Doubles a number."""
    if x < 0:
        raise Refusal("negative")
    return 2 * x if threading.current_thread() is threading.main_thread() else 0


@tool("thrice", pure=True)
def three_times(x: int) -> int:
    """Triples a number."""
    return 3 * x


def test_a_pure_function_is_called_in_the_event_loop_and_stays_pure_in_another_process() -> None:
    assert [is_pure(made(name)) for name in ("twice", "thrice", "calculator", "add", "many")] == [
        *[True] * 3,
        False,
        False,
    ]
    check_tool(made("twice"), good=[{"x": 1}])
    for one in (made("twice"), pickle.loads(pickle.dumps(made("twice")))):
        assert is_pure(one)
        assert called(one, {"x": 21}) == Observation("42")
        assert called(one, {"x": -1}) == Observation("negative", ok=False)
    assert called(made("thrice"), {"x": 2}) == Observation("6")
    assert tool_of_function(twice, "twice") is TOOLS["twice"], "a package may offer a function that is decorated, too"


def test_what_waits_cannot_be_pure() -> None:
    async def ask(x: int) -> int:
        """Asks a server."""
        return x

    with pytest.raises(
        ConfigError, match=r"the tool 'ask': pure=True is for .* waits for nothing; write it with `def`"
    ):
        tool(pure=True)(ask)
    with pytest.raises(ConfigError, match="pure=True is for functions"):
        tool(pure=True)(Calculator)
