"""Calls are found in text exactly where a model wrote them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.testing.plugin_checks import check_syntax
from flexmarl.tools import (
    FencedSyntax,
    Found,
    FunctionSyntax,
    Incomplete,
    LlamaSyntax,
    Malformed,
    MistralSyntax,
    Syntax,
    TagSyntax,
    ToolCall,
    XmlSyntax,
)

CALL = {"expression": "(1+2)*3"}
SYNTAXES: list[tuple[Syntax, ToolCall]] = [
    (FunctionSyntax(), ToolCall("calculator", "(1+2)*3")),
    (TagSyntax(), ToolCall("calculator", CALL)),
    (TagSyntax(opening="<c>", closing="</c>", one_call=True), ToolCall("calculator", CALL)),
    (XmlSyntax(), ToolCall("calculator", CALL)),
    (LlamaSyntax(), ToolCall("calculator", CALL)),
    (MistralSyntax(), ToolCall("calculator", CALL)),
    (FencedSyntax(), ToolCall("python", "for i in range(3):\n    print(i)")),
]
JSON = (TagSyntax(), LlamaSyntax(), MistralSyntax())
every = pytest.mark.parametrize(("syntax", "call"), SYNTAXES)


@every
def test_every_syntax_passes_the_conformance_check(syntax: Syntax, call: ToolCall) -> None:
    check_syntax(syntax, call=call)


def test_a_syntax_that_forgets_nesting_is_caught() -> None:
    class FirstParenthesis(FunctionSyntax):
        def parse(self, text: str) -> tuple[Found, ...]:
            _, opened, rest = text.partition("calc(")
            argument, closed, _ = rest.partition(")")
            return (ToolCall("calculator", argument),) if opened and closed else ()

    with pytest.raises(AssertionError, match="what is rendered is parsed back"):
        check_syntax(FirstParenthesis(), call=ToolCall("calculator", "(1+2)*3"))


def test_a_syntax_that_takes_a_cut_call_for_a_call_is_caught() -> None:
    class Hasty(FunctionSyntax):
        def parse(self, text: str) -> tuple[Found, ...]:
            found = super().parse(text)
            cut = [ToolCall("calculator", text.partition("calc(")[2]) for one in found if isinstance(one, Incomplete)]
            return tuple(cut) or found

    with pytest.raises(AssertionError, match="is cut, and was read as the call"):
        check_syntax(Hasty(), call=ToolCall("calculator", "1+1"))


def test_only_fenced_calls_are_whole_before_their_last_character() -> None:
    assert {syntax.type: syntax.optional_end for syntax, _ in SYNTAXES if syntax.optional_end} == {"fenced": "\n"}


def test_a_syntax_that_reads_a_call_without_its_last_character_is_caught() -> None:
    class Impatient(TagSyntax):
        def parse(self, text: str) -> tuple[Found, ...]:
            return super().parse(f"{text}>" if text.endswith("</tool_call") else text)

    with pytest.raises(AssertionError, match="is cut, and was read as the call"):
        check_syntax(Impatient(), call=ToolCall("calculator", CALL))


def test_a_syntax_that_drops_the_second_call_is_caught() -> None:
    class First(TagSyntax):
        def parse(self, text: str) -> tuple[Found, ...]:
            return super().parse(text)[:1]

    with pytest.raises(AssertionError, match="so are several calls of one message"):
        check_syntax(First(), call=ToolCall("calculator", CALL))


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
    assert FunctionSyntax().parse(text) == (ToolCall("calculator", argument),)


@pytest.mark.parametrize("text", ["calc(", "calc((1+2)", "calc((1+2)*", "calc(((1)+(2))*3"])
def test_a_call_that_the_engine_cut_at_its_first_parenthesis_goes_on(text: str) -> None:
    (found,) = FunctionSyntax().parse(text)
    assert isinstance(found, Incomplete)


@pytest.mark.parametrize(
    "text", ["", "42", "(a note)", "recalc(1)", "calc 12", "calc", '{"verdict": "reject"}', "```\nx\n```\n", "[1]"]
)
def test_ordinary_text_is_no_call(text: str) -> None:
    assert [syntax.parse(text) for syntax, _ in SYNTAXES] == [()] * len(SYNTAXES)


def test_words_map_to_tools_and_must_be_identifiers() -> None:
    syntax = FunctionSyntax(names={"calc": "calculator", "find": "search"})
    assert syntax.parse("find(pi) calc(2)") == (ToolCall("search", "pi"), ToolCall("calculator", "2"))
    assert syntax.render(ToolCall("search", "pi")) == "find(pi)"
    with pytest.raises(ValidationError, match="'my calc' is no identifier"):
        FunctionSyntax(names={"my calc": "calculator"})


@pytest.mark.parametrize("arguments", ["6*7", {"expression": "6*7"}, {"n": 3}, {"a": 1, "b": {"c": [2]}}, {}])
def test_a_tag_call_takes_the_forms_that_models_write(arguments: object) -> None:
    body = json.dumps({"name": "calculator", "arguments": arguments})
    assert TagSyntax().parse(f"let me see\n<tool_call>\n{body}\n</tool_call>") == (ToolCall("calculator", arguments),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body", ["", "6*7", '{"name": "calculator"}', '{"name": 3, "arguments": ""}', "[1]", "[" * 100_000]
)
def test_a_malformed_call_says_what_is_wrong_with_it(body: str) -> None:
    for text in (f"<tool_call>{body}</tool_call>", f"[TOOL_CALLS]{body}}}", f"<|python_tag|>{body}}}"):
        found = [one for syntax in JSON for one in syntax.parse(text)]
        assert found, text[:60]
        assert all(isinstance(one, Malformed | Incomplete) and one.reason for one in found)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "parameters": {}}',
        '{"name":"f","parameters":{}}',
        '<|python_tag|>{"name": "f", "parameters": {}}',
        'Sure. {"type": "function", "name": "f", "parameters": {}}',
        '{"name": "f", "arguments": {}}',
        '{"parameters": {}, "name": "f"}',
        '{"type": "function", "function": {"name": "f", "parameters": {}}}',
    ],
)
def test_a_llama_call_takes_the_forms_that_models_write(text: str) -> None:
    assert LlamaSyntax().parse(text) == (ToolCall("f", {}),)
    assert LlamaSyntax().parse(f"{text}; {text}") == (ToolCall("f", {}), ToolCall("f", {}))


F, BEHIND = ToolCall("f", {}), Malformed("</tool_call> without <tool_call>")


@pytest.mark.parametrize(
    ("syntax", "text", "found"),
    [
        (TagSyntax(), '{"name": "f", "arguments": {}}\n</tool_call>', (BEHIND,)),
        (
            TagSyntax(),
            '</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call></tool_call>',
            (BEHIND, F, BEHIND),
        ),
        (TagSyntax(), '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', (F,)),
        (XmlSyntax(), "f\n</tool_call>", (BEHIND,)),
        (XmlSyntax(), "<function=f>\n</function>\n</tool_call>", (Malformed("<function= without <tool_call>"),)),
        (XmlSyntax(), "<tool_call><function=f></function>\n<function=f></function></tool_call>", (F, F)),
        (XmlSyntax(), "<tool_call><function=f>1<function=f></function></tool_call>", (Malformed(""),)),
        (XmlSyntax(), "<tool_call><function=f></function><function=f>", (F, Incomplete(""))),
        (XmlSyntax(), "<tool_call><function=f>12 rotten eggs<function=f></function>", (Incomplete(""),)),
        (LlamaSyntax(), '{"name": f}; {"name": "f", "parameters": {}}', (Malformed(""), F)),
        (LlamaSyntax(), '{"name": {"name": f}}; {"name": f', (Malformed(""), Incomplete(""))),
        (LlamaSyntax(), '{"parameters": {}}', ()),
    ],
)
def test_no_call_is_dropped_in_silence(syntax: Syntax, text: str, found: tuple[Found, ...]) -> None:
    """What began or ended as a call is found, readable or not; and calls beside it are. A reason may be any."""
    seen = syntax.parse(text)
    assert [type(one) for one in seen] == [type(one) for one in found]
    for one, expected in zip(seen, found, strict=True):
        if isinstance(expected, ToolCall):
            assert isinstance(one, ToolCall)
            assert one.name == expected.name
        else:
            assert one == expected or not expected.reason


def test_python_behind_the_python_tag_is_a_call_that_cannot_be_read() -> None:
    (found,) = LlamaSyntax().parse('<|python_tag|>brave_search.call(query="x")')
    assert isinstance(found, Malformed)


def test_mistral_calls_have_the_ids_that_its_template_takes() -> None:
    given = '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefGH1"}, {"name": "g", "arguments": {}, "id": "x"}]'
    first, second = MistralSyntax().parse(given)
    assert isinstance(first, ToolCall)
    assert isinstance(second, ToolCall)
    assert (first.name, first.call_id, second.name, second.call_id) == ("f", "abcdefGH1", "g", "")
    newer = '[TOOL_CALLS]f[CALL_ID]abcdefGH1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    assert MistralSyntax().parse(newer) == (ToolCall("f", {"a": 1}), ToolCall("g", {}))


def test_code_in_another_language_is_no_call_and_hides_none() -> None:
    text = "```json\n```python\n```\nso\n```python\nprint(1)\n```"
    assert FencedSyntax().parse(text) == (ToolCall("python", "print(1)"),)


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (TagSyntax(), '<tool_call>{"name"'),
        (XmlSyntax(), "<tool_call>\n<function=f>\n<parameter=a>\n1"),
        (XmlSyntax(), "<tool_call>\n<func"),
        (LlamaSyntax(), '{"name": "f", "parameters": {"a": "}'),
        (MistralSyntax(), '[TOOL_CALLS][{"name"'),
        (FencedSyntax(), "```python\nprint("),
    ],
)
def test_the_beginning_of_a_call_is_incomplete(syntax: Syntax, text: str) -> None:
    (found,) = syntax.parse(text)
    assert isinstance(found, Incomplete)
    call = next(call for one, call in SYNTAXES if one == syntax)
    whole = syntax.parse(f"{syntax.render(call)}\n{text}")
    assert [type(one) for one in whole] == [ToolCall, Incomplete]


BALANCED = st.recursive(
    st.text("0123456789+-* ", max_size=5), lambda inner: st.tuples(inner, inner).map("({0[0]}){0[1]}".format)
)


@given(argument=BALANCED, before=st.text(max_size=10).filter(lambda text: "calc(" not in text and "<" not in text))
@settings(max_examples=200, deadline=None)
def test_what_is_rendered_is_parsed_back(argument: str, before: str) -> None:
    for syntax in (FunctionSyntax(), TagSyntax()):
        call = ToolCall("calculator", argument)
        assert syntax.parse(f"{before} {syntax.render(call)}") == (call,)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab{}[]"\\\n</>;', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(
    arguments=st.lists(
        st.dictionaries(st.text("abc_", min_size=1, max_size=3), values, max_size=3), min_size=1, max_size=3
    )
)
@settings(max_examples=200, deadline=None)
def test_any_json_arguments_come_back_from_the_families_that_write_json(arguments: list[dict[str, object]]) -> None:
    calls = tuple(ToolCall("f", one) for one in arguments)
    for syntax in JSON:
        assert syntax.parse(f"so\n{syntax.render(*calls)}") == calls


@given(
    arguments=st.lists(
        st.dictionaries(st.text("abc_", min_size=1, max_size=3), st.text("ab<>\n =/", max_size=8), max_size=3),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_texts_come_back_from_tags_of_arguments(arguments: list[dict[str, str]]) -> None:
    calls = tuple(ToolCall("f", one) for one in arguments)
    assert XmlSyntax().parse(XmlSyntax().render(*calls)) == calls


@given(st.text(max_size=60) | st.text(alphabet='calc(){}<>/_to"[]`\\n', max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_text_makes_a_syntax_raise(text: str) -> None:
    for syntax, call in SYNTAXES:
        whole = syntax.render(call)
        for around in (text, whole[: len(whole) // 2] + text, *(marker + text for marker in syntax.markers)):
            found = syntax.parse(around)
            assert not any(isinstance(one, Incomplete) for one in found[:-1])
