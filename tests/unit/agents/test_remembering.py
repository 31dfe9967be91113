"""What an agent goes on with after a summary, which results it still sees, and the laws of the calls in between."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.agents.chat import ChatRenderer, Conversation, Message
from flexmarl.agents.context import Node
from flexmarl.agents.remembering import HIDDEN, LEFT_OUT, CompactSettings, HideSettings
from flexmarl.agents.settings import AgentSettings
from flexmarl.errors import ConfigError, EngineError, EpisodeError
from flexmarl.records import Spoken, Task
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.agents import check_turns
from tests.unit.agents import tokenizers_for_tests as samples
from tests.unit.agents.tables import CALCULATOR, RENDERER, context, says, spec, text

ROUNDS = st.lists(
    st.lists(st.integers(1, 3), max_size=3), max_size=5
)  # Per act: results of each message of the agent that makes calls.


def conversation(rounds):
    """Acts: a question, messages with calls and their results, an answer."""
    said = []
    for number, results in enumerate(rounds):
        said.append(Message("user", f"q{number}"))
        for message, calls in enumerate(results):
            said.append(Message("assistant", f"c{number}{message}"))
            said += [Message("tool", f"r{number}{message}{call}") for call in range(calls)]
        said.append(Message("assistant", f"a{number}"))
    return said


@given(rounds=ROUNDS, keep=st.integers(0, 12), pending=st.sampled_from([(), (Message("user", "next"),)]))
def test_an_agent_goes_on_from_its_summary_the_last_messages_and_what_it_hears(rounds, keep, pending):
    said = conversation(rounds)
    rules = CompactSettings(limit_tokens=1, keep=keep, carry="<{summary}>")
    found = list(rules.continuations(said, "{s}", pending))
    shown = ["".join(message.content for message in seen) for seen in found]
    whole = "".join(message.content for message in said)
    end = "".join(message.content for message in pending)
    for seen, joined in zip(found, shown, strict=True):
        assert seen[0].role == "user", "behind the role prompt, the user speaks first"
        assert joined.startswith("<{s}>"), "braces of a summary are text"
        assert joined.endswith(end)
        assert whole.endswith(joined.removeprefix("<{s}>").removesuffix(end)), "the last messages, in order"
        roles = [message.role for message in seen]
        assert all(before != after or after == "tool" for before, after in pairwise(roles))
        assert all(before in ("assistant", "tool") for before, after in pairwise(roles) if after == "tool")
    assert [len(one) for one in shown] == sorted({len(one) for one in shown}, reverse=True), "the longest first"
    assert shown[-1] == "<{s}>" + end, "at last, nothing is kept"
    tail = said[len(said) - keep :] if 0 < keep < len(said) else said if keep else []
    expected = len(tail) + (0 if not tail or tail[0].role != "tool" else extra(said, keep))
    merged = bool(found[0][1:] or pending) and found[0][0].content != "<{s}>"
    assert len(found[0]) + merged - 1 - len(pending) == expected


def extra(said, keep):
    """Messages before the last `keep` ones that belong to the results at their beginning."""
    start = len(said) - keep
    return next(number for number in range(1, start + 1) if said[start - number].role != "tool")


@given(rounds=ROUNDS, older_than=st.integers(1, 4))
def test_the_results_of_the_last_messages_with_calls_are_shown_and_no_others(rounds, older_than):
    said = conversation(rounds)
    shown = HideSettings(older_than=older_than).shown(said)
    assert [one.role for one in shown] == [one.role for one in said]
    calls = sum(map(len, rounds))
    number = 0
    for before, after, previous in zip(said, shown, [None, *said], strict=False):
        number += before.role == "tool" and previous is not None and previous.role != "tool"
        hidden = before.role == "tool" and number <= calls - older_than
        assert after.content == (HIDDEN if hidden else before.content)


COMPACT = {"limit_tokens": 24, "ask": "sum", "carry": "{summary}|"}


def reader(script, *, system="s", max_tokens=8, changes=None, **compact):
    agent = {"system": system, "sampling": {"max_tokens": max_tokens}, "context": {"compact": {**COMPACT, **compact}}}
    return spec({"solver": {**agent, **(changes or {})}}).seat(context(script))


def prompts(team):
    return [text(turn.prompt_ids).replace("<|im_end|>", "") for turn in team.turns]


def play(team, *observations):
    async def run():
        return [await team.solver.act(observation) for observation in observations]

    return run_virtual(run())


def test_at_the_limit_the_agent_is_asked_for_a_summary_and_goes_on_from_it():
    team = reader(says("ok", "ab", "ok", "cd", "B"))
    replies = play(team, "page one", "page two", "who?")
    assert prompts(team) == [
        "<|system|>s<|user|>page one<|assistant|>",
        "<|system|>s<|user|>page one<|assistant|>ok<|user|>sum<|assistant|>",
        "<|system|>s<|user|>ab|page two<|assistant|>",
        "<|system|>s<|user|>ab|page two<|assistant|>ok<|user|>sum<|assistant|>",
        "<|system|>s<|user|>cd|who?<|assistant|>",
    ]
    assert [turn.tags for turn in team.turns] == [{}, {"action": "compact"}, {}, {"action": "compact"}, {}]
    assert [turn.parent is not None for turn in team.turns] == [False, True, False, True, False]
    assert [turn.after for turn in team.turns] == [(), (0,), (1,), (2,), (3,)], "each call follows from the one before"
    assert [turn.act_hop for turn in team.turns] == [0, 1, 1, 3, 3], "a summary is the first call of the act it is for"
    assert [turn.turn for turn in team.turns] == [0, 1, 1, 2, 2]
    assert [len(reply.turns) for reply in replies] == [1, 2, 2]
    assert [(reply.text, reply.summaries) for reply in replies] == [("ok", ()), ("ok", ("ab",)), ("B", ("cd",))]
    check_turns(team.turns)


def test_every_sampled_token_of_a_summary_is_in_a_turn_and_is_paid():
    team = reader(says("ok", "ab", "ok"))
    _, second = play(team, "page one", "page two")
    second.reward(0.5)
    assert [text(turn.response_ids) for turn in second.turns] == ["ab<|im_end|>", "ok<|im_end|>"]
    assert list(team.rewards().values()) == [None, 0.5, 0.5]
    team.solver.reward(1.0)
    assert list(team.rewards().values()) == [1.0, 1.5, 1.5]
    assert team.total_reward() == 1.5, "an act is paid once, its summary included"


def test_summaries_that_are_not_trained_are_left_out_with_the_reason_and_need_no_reward():
    team = reader(says("ok", "ab", "ok"), train_actions=False)
    _, second = play(team, "page one", "page two")
    second.reward(1.0)
    assert [turn.hop for turn in team.turns] == [0, 2]
    assert team.untrained() == {"sum-1_1_g0e0a0": LEFT_OUT}
    assert second.summaries == ("ab",)
    assert prompts(team)[1] == "<|system|>s<|user|>ab|page two<|assistant|>", "it goes on from the summary all the same"
    assert team.turns[1].after == (0,), "what is no turn is on no path through the turns"
    assert team.turns[1].act_hop == 2
    assert list(team.rewards()) == [turn.sample_id for turn in team.turns]
    check_turns(team.turns)


@pytest.mark.parametrize(("limit", "calls"), [(28, 2), (27, 3)])
def test_a_prompt_of_exactly_the_limit_is_sent_as_it_is(limit, calls):
    team = reader(says("ok", "ok", "ok"), limit_tokens=limit)
    play(team, "page one", "page two")
    assert len(team.turns) == calls
    last = team.turns[-1]
    assert (len(last.prompt_ids) == 28) == (calls == 2)


@given(
    limit=st.integers(40, 80),
    keep=st.integers(0, 6),
    observations=st.lists(st.text("abc", min_size=1, max_size=20), min_size=1, max_size=8),
    length=st.integers(0, 9),
    tools=st.booleans(),
)
def test_no_prompt_is_longer_than_the_limit_but_those_that_ask_for_a_summary(limit, keep, observations, length, tools):
    def script(prompt, request):
        if prompt.endswith("<|user|>sum<|im_end|><|assistant|>"):
            return "x" * length
        return "calc(1+1)" if tools and not prompt.endswith("<|tool|>2<|im_end|><|assistant|>") and length % 2 else "ok"

    changes = {**CALCULATOR, "max_tool_calls": 2} if tools else {}
    team = reader(script, limit_tokens=limit, keep=keep, max_tokens=9, changes=changes)
    play(team, *observations)
    for turn in team.turns:
        asks = text(turn.prompt_ids).endswith("<|user|>sum<|im_end|><|assistant|>")
        assert asks == (turn.tags == {"action": "compact"})
        assert asks or len(turn.prompt_ids) <= limit
    check_turns(team.turns)


def test_the_last_messages_are_kept_behind_the_summary_and_fewer_where_they_do_not_fit():
    team = reader(says("ok", "ab", "ok"), keep=1, limit_tokens=26)
    play(team, "page one", "page two")
    assert prompts(team)[2] == "<|system|>s<|user|>ab|<|assistant|>ok<|user|>page two<|assistant|>"
    team = reader(says("ok", "ab", "ok"), keep=2, limit_tokens=26)
    play(team, "page one", "page two")
    assert prompts(team)[2] == "<|system|>s<|user|>ab|<|assistant|>ok<|user|>page two<|assistant|>"


def test_a_summary_between_tool_calls_covers_their_results_and_is_one_turn_whatever_it_spells():
    script = says("calc(1+1)", "calc(2+2) is due", "calc(9+9)", "2, 18", "20")
    team = reader(script, limit_tokens=23, max_tokens=20, changes=CALCULATOR)
    (reply,) = play(team, "1+1?")
    assert prompts(team) == [
        "<|system|>s<|user|>1+1?<|assistant|>",
        "<|system|>s<|user|>1+1?<|assistant|>calc(1+1)<|tool|>2<|user|>sum<|assistant|>",
        "<|system|>s<|user|>calc(2+2) is due|<|assistant|>",
        "<|system|>s<|user|>calc(2+2) is due|<|assistant|>calc(9+9)<|tool|>18<|user|>sum<|assistant|>",
        "<|system|>s<|user|>2, 18|<|assistant|>",
    ]
    assert [turn.parent is not None for turn in team.turns] == [False, True, False, True, False]
    assert reply.summaries == ("calc(2+2) is due", "2, 18"), "in a summary, a call is text"
    assert [use.argument for use in reply.calls] == ["1+1", "9+9"]
    assert {turn.act_hop for turn in team.turns} == {0}
    check_turns(team.turns)


def test_an_agent_that_fails_behind_a_summary_remembers_what_it_did_before_the_act():
    team = reader(says("ok", "ab", "!gone", "cd", "ok"))

    async def run():
        await team.solver.act("page one")
        with pytest.raises(EngineError, match="gone"):
            await team.solver.act("page two")
        await team.solver.act("page 3")

    run_virtual(run())
    assert [turn.hop for turn in team.turns] == [0, 1, 3, 4]
    assert prompts(team)[2] == "<|system|>s<|user|>page one<|assistant|>ok<|user|>sum<|assistant|>", "asked again"
    assert prompts(team)[3] == "<|system|>s<|user|>cd|page 3<|assistant|>"
    check_turns(team.turns)


def test_an_agent_goes_on_from_its_summary_after_an_act_that_failed():
    team = reader(says("ok", "ab", "ok", "!gone", "B"), limit_tokens=27)

    async def run():
        await team.solver.act("page one")
        await team.solver.act("page two")
        with pytest.raises(EngineError, match="gone"):
            await team.solver.act("x")
        await team.solver.act("y")

    run_virtual(run())
    assert prompts(team)[2] == "<|system|>s<|user|>ab|page two<|assistant|>"
    assert prompts(team)[3] == "<|system|>s<|user|>ab|page two<|assistant|>ok<|user|>y<|assistant|>"
    assert team.turns[3].parent is None, "rendered anew, from the summary"


def test_what_a_task_says_before_its_prompt_is_summed_up_too_and_not_said_again():
    task = Task(input_id="x", prompt="3+4", opening=(Spoken("user", "hello"), Spoken("assistant", "hi there")))
    agent = {"system": "s", "sampling": {"max_tokens": 8}, "context": {"compact": {**COMPACT, "limit_tokens": 30}}}
    team = spec({"solver": agent}).seat(context(says("ab", "ok", "!gone", "7"), task=task))

    async def run():
        await team.solver.act("page number1")
        with pytest.raises(EngineError, match="gone"):
            await team.solver.act("x")
        await team.solver.act("y")

    run_virtual(run())
    assert prompts(team) == [
        "<|system|>s<|user|>hello<|assistant|>hi there<|user|>sum<|assistant|>",
        "<|system|>s<|user|>ab|page number1<|assistant|>",
        "<|system|>s<|user|>ab|page number1<|assistant|>ok<|user|>y<|assistant|>",
    ]


@pytest.mark.parametrize(
    ("observations", "message"),
    [
        (
            ["a page that is longer"],
            "has 27 tokens at the beginning of its conversation, and its context",
        ),
        (
            ["page one", "a page that is longer"],
            "has 30 tokens after a summary, and its context.compact.limit",
        ),
    ],
)
def test_a_text_that_never_fits_fails_the_episode_and_says_why(observations, message):
    team = reader(says("ok", "ab", "ok"))
    with pytest.raises(EpisodeError, match=f"the prompt of agent 'solver' {message}"):
        play(team, *observations)


def test_a_thought_is_not_carried_over_and_an_empty_summary_is_a_fault():
    script = says("ok", "<think>\nhm\n</think>\n\n ab ", "ok", "  ", "B")
    team = reader(script, limit_tokens=36, max_tokens=35)
    play(team, "page number one", "page number two", "and who is it?")
    shown = prompts(team)
    assert shown[2] == "<|system|>s<|user|>ab|page number two<|assistant|>"
    assert shown[4] == "<|system|>s<|user|>|and who is it?<|assistant|>"
    assert [turn.valid for turn in team.turns] == [True, True, True, False, True]
    assert [one.get("format_error", 0.0) for one in team.signals().values()] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_the_branches_of_a_tree_go_on_from_the_summary_at_their_root_each_for_itself():
    team = reader(says("ok", "ab", "ok", "1", "!gone", "2"), limit_tokens=30)
    play(team, "page one...", "page two")
    forks = [team.fork(Node((number,))) for number in range(2)]

    async def run():
        await forks[0].solver.act("x")
        with pytest.raises(EngineError, match="gone"):
            await forks[1].solver.act("y")
        await forks[1].solver.act("x")

    run_virtual(run())
    same = "<|system|>s<|user|>ab|page two<|assistant|>ok<|user|>x<|assistant|>"
    assert prompts(team)[-2:] == [same, same]
    assert [turn.text for turn in team.turns[-2:]] == ["1", "2"]


def test_an_old_result_is_hidden_and_its_call_stays():
    script = says("calc(1+1)", "calc(2+2)", "calc(4+4)", "8", "ok")
    team = spec({"solver": {**CALCULATOR, "context": {"hide_results": {"older_than": 1}}}}).seat(context(script))
    play(team, "1+1?", "and?")
    assert prompts(team) == [
        "<|user|>1+1?<|assistant|>",
        "<|user|>1+1?<|assistant|>calc(1+1)<|tool|>2<|assistant|>",
        f"<|user|>1+1?<|assistant|>calc(1+1)<|tool|>{HIDDEN}<|assistant|>calc(2+2)<|tool|>4<|assistant|>",
        f"<|user|>1+1?<|assistant|>calc(1+1)<|tool|>{HIDDEN}<|assistant|>calc(2+2)<|tool|>{HIDDEN}<|assistant|>calc(4+4)"
        "<|tool|>8<|assistant|>",
        f"<|user|>1+1?<|assistant|>calc(1+1)<|tool|>{HIDDEN}<|assistant|>calc(2+2)<|tool|>{HIDDEN}<|assistant|>calc(4+4)"
        "<|tool|>8<|assistant|>8<|user|>and?<|assistant|>",
    ]
    assert [turn.parent is not None for turn in team.turns] == [False, True, False, False, True]
    check_turns(team.turns)


def test_results_that_a_conversation_no_longer_holds_are_counted_so_that_no_id_of_a_call_is_given_twice():
    said = [Message("user", "q"), Message("assistant", "c"), Message("tool", "1"), Message("tool", "2")]
    talk = Conversation(RENDERER, said, lambda: 0, forgotten_results=1)
    assert talk.num_results == 3
    talk.rewrite(said[:3])
    talk.receive(Message("tool", "3"))
    assert talk.num_results == 4
    talk.rewrite([])
    assert talk.num_results == 4


@pytest.mark.parametrize(
    ("compact", "message"),
    [
        ({"keep": 12}, "solver.context.compact.keep is 12, but so many messages never fit beside role prompt"),
        ({"keep": 2**40}, "solver.context.compact.keep is 1099511627776, but so many messages never fit"),
        ({"carry": f"{'x' * 34}{{summary}}"}, "a carried summary take at least 42 tokens; raise it"),
    ],
)
def test_a_context_in_which_nothing_ever_fits_is_refused(compact, message):
    with pytest.raises(ConfigError, match=message):
        reader(says(), limit_tokens=40, **compact)


def test_the_most_that_can_ever_fit_is_taken():
    assert reader(says(), limit_tokens=42, carry=f"{'x' * 34}{{summary}}")
    assert reader(says(), limit_tokens=40, keep=10)
    with pytest.raises(ConfigError, match="keep is 11"):
        reader(says(), limit_tokens=40, keep=11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compact": {"limit_tokens": 8}}, "context.compact.limit_tokens must be above sampling.max_tokens, 8, got 8"),
        ({"compact": {"limit_tokens": 9, "carry": "so far"}}, "carry: 'so far' does not name {summary}"),
        ({"compact": {"limit_tokens": 9}, "last": 2}, "last is 2, and compact is set"),
        ({}, "says nothing; use full, none, or one of last, compact, hide_results"),
        ({"hide_results": {"older_than": 0}}, "older_than"),
    ],
)
def test_a_context_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        AgentSettings.model_validate({"policy": "p", "sampling": {"max_tokens": 8}, "context": changes})


def test_a_question_behind_results_extends_them_as_the_template_writes_it_in_this_conversation():
    tokenizer = samples.characters(samples.NUMBERS_ROUNDS)
    renderer = ChatRenderer(tokenizer)

    def seated(room, *replies):
        agent = {**CALCULATOR, "sampling": {"max_tokens": 20}, "context": room}
        return spec({"solver": agent}, renderer=renderer).seat(context(says(*replies), tokenizer=tokenizer))

    plain = seated("full", "calc(1+1)", "2")
    play(plain, "1+1?")
    limit = len(plain.turns[1].prompt_ids) - 1
    team = seated({"compact": {**COMPACT, "limit_tokens": limit}}, "calc(1+1)", "ab", "2")
    play(team, "1+1?")
    said = [("user", "1+1?"), ("assistant", "calc(1+1)"), ("tool", "2"), ("user", "sum")]
    asked = renderer.render([Message(role, content) for role, content in said])
    assert team.turns[1].prompt_ids.tolist() == asked.tolist()
    assert team.turns[1].parent == team.turns[0].sample_id
    check_turns(team.turns)
