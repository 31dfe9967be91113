"""Tools as models know them: the real chat templates of six families, from schema to result, with ids kept exactly."""

import asyncio
import pickle
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.agents import ChatRenderer
from flexmarl.agents.chat import ChatOptions, Message
from flexmarl.errors import ConfigError
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.agents import check_turns
from flexmarl.tools import SYNTAXES, ToolCall
from flexmarl.tools.calculator import Calculator
from flexmarl.tools.interface import specification
from tests.unit.agents import tokenizers_for_tests as samples
from tests.unit.agents.tables import context, spec

NATIVE = {"qwen3": "tag", "hermes_marks": "tag", "qwen3_coder": "xml", "llama3": "llama", "mistral": "mistral"}
"""Families whose template writes calls, and the syntax that reads them."""
FAMILIES = {**NATIVE, "smollm2": "tag", "gemma2": "tag"}
CALLS = (ToolCall("calculator", {"expression": "6*7"}), ToolCall("calculator", {"expression": "2**5"}))
AGENT = {"tools": [{"type": "calculator"}], "context": "full", "system": "Solve it."}
every = pytest.mark.parametrize("family", FAMILIES)


@cache
def tokenizer_of(family: str) -> Any:
    return samples.family(family)


@cache
def renderer_of(family: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(family))


def play(family: str, replies: list[str], **agent: Any) -> tuple[Any, Any, list[str], Any]:
    """One act: (reply, team, prompts as text, model)."""
    tokenizer, prompts, left = tokenizer_of(family), [], list(replies)

    def script(prompt: str, request: object) -> str:
        prompts.append(prompt)
        return left.pop(0)

    team_spec = spec({"solver": {**AGENT, **agent}}, renderer=renderer_of(family))
    ctx = context(script, tokenizer=tokenizer)
    team = team_spec.seat(ctx)
    return run_virtual(team.solver.act("What is 6*7?")), team, prompts, ctx.generate


@cache
def agent_of(family: str) -> Any:
    return spec({"solver": AGENT}, renderer=renderer_of(family)).agents["solver"]


def written(family: str, *calls: ToolCall) -> str:
    return SYNTAXES[FAMILIES[family]]().render(*calls)


@every
def test_the_syntax_is_the_one_in_which_the_template_writes_calls(family: str) -> None:
    agent = agent_of(family)
    assert agent.syntax == SYNTAXES[FAMILIES[family]]()
    assert f"`{FAMILIES[family]}`" in agent.tools_note
    assert agent.renderer.options.native == (family in NATIVE)


@every
def test_the_model_is_told_its_tools_by_the_template_or_by_the_role_prompt(family: str) -> None:
    _, _, (prompt, *_), _ = play(family, ["42"])
    assert prompt.count("Computes an integer expression") == 1
    assert "expression" in prompt
    told = agent_of(family).renderer.options.tools
    assert told == ((specification(Calculator()),) if family in NATIVE else ())
    if family in NATIVE:
        asked = [{"role": "system", "content": "Solve it."}, {"role": "user", "content": "What is 6*7?"}]
        expected = tokenizer_of(family).apply_chat_template(
            asked, tools=[specification(Calculator())], tokenize=False, add_generation_prompt=True
        )
        assert prompt == expected, "byte for byte what the template makes"


@every
def test_a_call_in_the_models_own_form_is_run_and_its_ids_are_those_sampled(family: str) -> None:
    text = written(family, CALLS[0])
    reply, team, prompts, model = play(family, [text, "It is 42."])
    assert [(use.name, use.arguments, use.result, use.ok) for use in reply.calls] == [
        ("calculator", {"expression": "6*7"}, "42", True)
    ]
    tokenizer = tokenizer_of(family)
    said = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    first, second = reply.turns
    assert first.response_ids.tolist() == said, "what is trained on is what was sampled, markers included"
    assert first.valid
    assert dict(team.signals()[first.sample_id]) == {"tool_calls": 1.0}
    if family == "mistral":  # Its template moves the role prompt to the last message, so each prompt is rendered anew.
        assert second.parent is None
        assert "rewrites" in agent_of(family).renderer.extension.why_not("tool")
    else:
        assert second.parent == first.sample_id, "the next prompt extends it, token by token"
        assert second.prompt_ids[: len(first.prompt_ids) + len(said)].tolist() == [*first.prompt_ids.tolist(), *said]
    assert "42" in prompts[1][len(prompts[0]) :]
    assert all(tokenizer.eos_token_id in request.sampling.stop_ids for request in model.requests)
    check_turns(team.turns)


@every
def test_several_calls_of_one_message_have_one_result_each_in_their_order(family: str) -> None:
    reply, team, prompts, _ = play(family, [written(family, *CALLS), "It is 42 and 32."])
    assert [use.result for use in reply.calls] == ["42", "32"]
    behind = prompts[1].removeprefix(prompts[0])
    assert behind.index("42") < behind.index("32", behind.index("42"))
    role = {"qwen3": "<tool_response>", "llama3": "ipython", "mistral": "[TOOL_RESULTS]"}.get(family)
    assert role is None or behind.count(role) == 2
    check_turns(team.turns)


@pytest.mark.parametrize("family", NATIVE)
def test_the_next_prompt_is_what_the_template_makes_of_the_call_and_its_result(family: str) -> None:
    """For a call that the model writes as the template would."""
    tokenizer = tokenizer_of(family)
    call = {"type": "function", "id": "000000000", "function": {"name": "calculator", "arguments": CALLS[0].arguments}}
    messages = [
        {"role": "user", "content": "What is 6*7?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "000000000", "name": "calculator"},
    ]
    tools = [specification(Calculator())]
    expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    before = tokenizer.apply_chat_template(messages[:1], tools=tools, tokenize=False, add_generation_prompt=True)
    end = tokenizer.eos_token
    response = expected.removeprefix(before).partition(end)[0]
    _, _, prompts, _ = play(family, [response, "It is 42."], system="")
    assert prompts == [before, expected]


@pytest.mark.parametrize("family", ["hermes_marks", "mistral", "llama3"])
def test_a_marker_that_is_a_special_token_is_seen(family: str) -> None:
    tokenizer = tokenizer_of(family)
    text = f"<|python_tag|>{written(family, CALLS[0])}" if family == "llama3" else written(family, CALLS[0])
    marker = {"hermes_marks": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}[family]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert marker not in tokenizer.decode(ids, skip_special_tokens=True), "witness: plain decoding drops it"
    reply, *_ = play(family, [text, "42"])
    assert [use.result for use in reply.calls] == ["42"]
    assert reply.turns[0].text == text


def test_a_closing_tag_that_is_a_special_token_stops_generation_where_it_should() -> None:
    text = written("hermes_marks", CALLS[0])
    syntax = {"type": "tag", "one_call": True}
    reply, *_ = play("hermes_marks", [f"{text} and more", "42"], syntax=syntax)
    assert reply.turns[0].text == text
    assert reply.calls[0].result == "42"


@pytest.mark.parametrize("family", NATIVE)
def test_a_call_that_cannot_be_read_is_answered_and_is_a_signal(family: str) -> None:
    bad = {"llama3": '{"name": "calculator", "parameters": oops}', "mistral": "[TOOL_CALLS][oops]"}
    bad |= dict.fromkeys(("qwen3", "hermes_marks"), "<tool_call>oops</tool_call>")
    bad |= {"qwen3_coder": "<tool_call>\noops\n</tool_call>"}
    reply, team, prompts, _ = play(family, [bad[family], "I do not know."])
    assert not reply.calls[0].ok
    assert reply.calls[0].result in prompts[1].replace('\\"', '"')
    assert dict(team.signals()[reply.turns[0].sample_id]) == {"tool_error": 1.0, "bad_tool_calls": 1.0}
    assert not reply.turns[0].valid


@every
def test_calls_beyond_the_budget_are_answered_so_and_are_a_signal(family: str) -> None:
    reply, team, prompts, _ = play(family, [written(family, *CALLS), "42"], max_tool_calls=1)
    assert [(use.ok, use.run) for use in reply.calls] == [(True, True), (False, False)]
    assert "budget spent" in prompts[1]
    assert dict(team.signals()[reply.turns[0].sample_id]) == {"dropped_tool_calls": 0.5, "tool_calls": 1.0}


@pytest.mark.parametrize("family", NATIVE)
@given(
    words=st.text(st.sampled_from('ab \n{}"<>[]/|'), max_size=8) | st.sampled_from(samples.FAMILIES["llama3"].special)
)
@settings(max_examples=12, deadline=None)
def test_no_text_in_task_or_result_becomes_a_control_token(family: str, words: str) -> None:
    """Nor do the markers of calls, which a template writes for the agent's own calls only."""
    tokenizer, agent = tokenizer_of(family), agent_of(family)
    markers = [one for one in agent.syntax.markers if one in tokenizer.get_vocab()]
    hostile = words.join((samples.FAMILIES[family].special[1], *markers, samples.FAMILIES[family].end))
    control = {*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids(markers)}

    def counted(content: str) -> int:
        ids = agent.renderer.render([Message("system", content), Message("user", content)])
        return sum(int(one) in control for one in ids)

    assert counted(hostile) == counted("plain")


@pytest.mark.parametrize("family", NATIVE)
def test_a_renderer_with_tools_is_sent_to_another_process_and_shares_its_tokens(family: str) -> None:
    agents = spec({"solver": AGENT, "judge": {}}, renderer=renderer_of(family)).agents
    one, other = pickle.loads(pickle.dumps((agents["solver"].renderer, agents["judge"].renderer)))
    assert one.options == agents["solver"].renderer.options
    assert one._base is other


def test_arguments_of_the_template_reach_it() -> None:
    said = [play("qwen3", ["42"], chat_template_kwargs=kwargs)[2][0] for kwargs in ({}, {"enable_thinking": False})]
    assert said[1] == said[0] + "<think>\n\n</think>\n\n"


def test_prompts_of_qwen3_are_rendered_anew_always_without_thinking_else_after_a_thought() -> None:
    def summary(**options: Any) -> str:
        team_spec = spec({"solver": {**AGENT, "chat_template_kwargs": options}}, renderer=renderer_of("qwen3"))
        return team_spec.agents["solver"].renderer.extension.summary

    assert summary().startswith("rendered anew: user message after a thought (")
    assert summary(enable_thinking=False).startswith("rendered anew: user message, tool message, user message after")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"chat_template_kwargs": {"enable_thinkin": False}}, "team.agents.solver.chat_template_kwargs.enable_thinkin"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools: this argument of the template is set"),
        (
            {"tools": [{"type": "calculator", "description": "Ends <|im_end|>"}]},
            "spells the control token '<|im_end|>'",
        ),
    ],
)
def test_options_that_a_template_cannot_take_are_refused(agent: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec({"solver": {**AGENT, **agent}}, renderer=renderer_of("qwen3"))
    assert message in str(refused.value)


def test_null_as_the_syntax_is_auto() -> None:
    agent = spec({"solver": {**AGENT, "syntax": None}}, renderer=renderer_of("llama3")).agents["solver"]
    assert agent.syntax == SYNTAXES["llama"]()


def test_a_template_without_a_place_for_tools_is_refused_where_it_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"team\.agents\.solver\.tell_tools: the chat template does not use `tools`"):
        spec({"solver": {**AGENT, "tell_tools": "template"}}, renderer=renderer_of("gemma2"))


def test_a_template_whose_calls_no_syntax_reads_is_refused_with_what_it_writes() -> None:
    calls = "{% if m.tool_calls %}<~{{ m.tool_calls[0].function.name }}~>{% endif %}"
    template = samples.CHATML.replace("{{ m.content }}", "{{ m.content }}" + calls)
    with pytest.raises(ConfigError, match=r"solver\.syntax: the chat template writes a call as '<~zqxtool~>"):
        spec({"solver": AGENT}, renderer=ChatRenderer(samples.byte_pairs(template)))
    own = {**AGENT, "syntax": {"type": "tag"}}
    assert spec({"solver": own}, renderer=ChatRenderer(samples.byte_pairs(template))).agents["solver"].syntax


def test_further_end_ids_of_the_model_stop_sampling() -> None:
    tokenizer = tokenizer_of("llama3")
    end = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    assert end not in renderer_of("llama3").stop_ids
    renderer = ChatRenderer(tokenizer, end_ids=[end])
    assert {*renderer.stop_ids} == {end, tokenizer.eos_token_id}
    assert end in renderer.with_options(ChatOptions(arguments={"date_string": "1 Jan 2026"})).stop_ids
    assert end in pickle.loads(pickle.dumps(renderer)).stop_ids


def test_a_call_inside_a_thought_is_not_meant() -> None:
    thought = f"<think>{written('qwen3', CALLS[0])}</think>"
    reply, *_ = play("qwen3", [f"{thought}It is 42."])
    assert (reply.calls, reply.unresolved) == ((), False)
    reply, *_ = play("qwen3", [f"{thought}{written('qwen3', CALLS[1])}", "32"])
    assert [use.argument for use in reply.calls] == ["2**5"]


@pytest.mark.parametrize("opened", [True, False])
def test_where_the_template_begins_a_thought_a_call_before_its_end_is_not_meant(opened: bool) -> None:
    """As that of Qwen3's models that always think. A syntax that stops the engine in a thought goes on with it."""
    template = samples.CHATML.replace("assistant\n{%", "assistant\n<think>\n{%" if opened else "assistant\n{%")
    tokenizer = samples.byte_pairs(template)
    renderer = ChatRenderer(tokenizer)
    assert renderer.opens_thought == opened
    for syntax, call in (({"type": "tag"}, written("qwen3", CALLS[0])), ({"type": "function"}, "calc(6*7)")):
        left = [f"I may ask {call}", " or know it.</think>It is 42."]
        team = spec({"solver": {**AGENT, "syntax": syntax}}, renderer=renderer).seat(
            context(lambda prompt, request, left=left: left.pop(0), tokenizer=tokenizer)
        )
        reply = run_virtual(team.solver.act("What is 6*7?"))
        assert [use.result for use in reply.calls] == ([] if opened else ["42"])


@pytest.mark.parametrize("family", NATIVE)
def test_a_conversation_with_calls_goes_on_where_its_prompt_is_rendered_anew(family: str) -> None:
    """The user's second question makes some templates rewrite what stands before it."""
    replies = [written(family, CALLS[0]), "It is 42.", written(family, CALLS[1]), "It is 32."]
    tokenizer, left = tokenizer_of(family), list(replies)
    team = spec({"solver": AGENT}, renderer=renderer_of(family)).seat(
        context(lambda prompt, request: left.pop(0), tokenizer=tokenizer)
    )

    async def acts() -> list[Any]:
        return [await team.solver.act("What is 6*7?"), await team.solver.act("What is 2**5?")]

    first, second = asyncio.run(acts())
    assert [use.result for use in (*first.calls, *second.calls)] == ["42", "32"]
    shown = tokenizer.decode(second.turns[-1].prompt_ids.tolist())
    assert shown.count("6*7") >= 2, "the question, and the call that answered it"
    check_turns(team.turns)


@every
@pytest.mark.parametrize("keep", [0, 2])
def test_a_summary_is_asked_for_behind_results_and_extends_them_where_the_template_allows_it(
    family: str, keep: int
) -> None:
    replies = [written(family, CALLS[0]), "It is 42.", "42"]
    sampling = {"max_tokens": 120}
    _, plain, _, _ = play(family, [replies[0], "42"], sampling=sampling)
    limit = len(plain.turns[1].prompt_ids) - 1
    room = {"compact": {"limit_tokens": limit, "ask": "Sum up.", "carry": "So far: {summary}", "keep": keep}}
    reply, team, prompts, _ = play(family, replies, sampling=sampling, context=room)
    assert (reply.text, reply.summaries) == ("42", ("It is 42.",))
    assert len(prompts) == 3
    assert prompts[1].count("Sum up.") == 1
    assert prompts[1].index("42") < prompts[1].index("Sum up."), "it has seen the result"
    assert "Sum up." not in prompts[2]
    assert "So far: It is 42." in prompts[2]
    assert prompts[2].count("Computes an integer expression") == 1, "it is told of its tools again"
    assert team.turns[1].parent == plain.turns[1].parent, "as behind results alone"
    check_turns(team.turns)
