"""Tools of a seat: what an agent forgets, notes and sums up by its own calls, and the work that it hands to others."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.agents.chat import Message
from flexmarl.agents.context import Node
from flexmarl.agents.seat_tools import CONTEXT_TOOLS, without_middle
from flexmarl.agents.settings import TeamSettings
from flexmarl.errors import EngineError, EpisodeError
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.agents import check_turns
from flexmarl.tools import ToolContext, tool
from tests.unit.agents.tables import context, says, spec, text
from tests.unit.agents.test_remembering import ROUNDS, conversation


@tool(pure=True)
def painted() -> str:
    """Says a word in red."""
    return "\x1b[31mred\r\nand\ttab"


@tool
async def torn() -> str:
    """Breaks, though not at once."""
    await asyncio.sleep(1)
    raise OSError("torn")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def talker(script, **more):
    agent = {"tell_tools": "none", "syntax": {"type": "tag"}, "system": "s", "sampling": {"max_tokens": 400}}
    return spec({"solver": {**agent, "context": {"tools": [*CONTEXT_TOOLS]}, **more}}).seat(context(script))


def play(team, *observations):
    async def run():
        return [await team.solver.act(observation) for observation in observations]

    return run_virtual(run())


def prompts(team):
    return [text(turn.prompt_ids).replace("<|im_end|>", "") for turn in team.turns]


def test_a_summary_by_call_replaces_the_conversation_and_is_remembered_by_later_acts():
    written = call("compact", summary=" ab {x} ")
    team = talker(says("ok", written, "A", "B"))
    first, second, _ = play(team, "one", "two", "three")
    assert prompts(team)[2] == "<|system|>s<|user|>Summary of the conversation so far:\nab {x}<|assistant|>"
    assert prompts(team)[3].endswith("ab {x}<|assistant|>A<|user|>three<|assistant|>")
    assert (first.summaries, second.summaries, second.text) == ((), ("ab {x}",), "A")
    assert [turn.parent is not None for turn in team.turns] == [False, True, False, True]
    assert [turn.branch for turn in team.turns] == ["0", "0", "1", "1"]
    check_turns(team.turns)


def test_results_that_come_with_a_summary_stay_with_their_calls():
    message = call("compact", summary="ab") + call("calculator", expression="6*7")
    team = talker(says(message, "42"), tools=[{"type": "calculator"}])
    play(team, "one")
    assert prompts(team)[1] == (
        f"<|system|>s<|user|>Summary of the conversation so far:\nab<|assistant|>{message}"
        "<|tool|>compacted<|tool|>42<|assistant|>"
    )


def test_what_any_tool_returns_has_no_control_characters():
    team = talker(says(call("painted"), "A"), tools=[{"type": "painted"}])
    play(team, "one")
    assert "<|tool|>\\x1b[31mred\\x0d\nand\ttab<|assistant|>" in prompts(team)[1]


def test_an_empty_summary_is_a_fault_and_changes_nothing():
    team = talker(says(call("compact", summary=" "), "A"))
    play(team, "one")
    assert "one" in prompts(team)[1]
    assert "error: the summary is empty" in prompts(team)[1]
    assert team.signals()[team.turns[0].sample_id]["tool_error"] == 1


def test_what_is_forgotten_is_gone_and_notes_stay():
    team = talker(says(call("note", text="tea is 12"), "ok", call("forget", keep=1), call("recall"), "12"))
    play(team, "one", "two")
    forgets = call("forget", keep=1)
    assert prompts(team)[3] == f"<|system|>s<|user|>one\n\ntwo<|assistant|>{forgets}<|tool|>forgotten<|assistant|>"
    assert prompts(team)[4].endswith("<|tool|>tea is 12<|assistant|>")
    check_turns(team.turns)


@given(rounds=ROUNDS.filter(bool), keep=st.integers(1, 12))
def test_forgetting_keeps_the_first_message_the_last_question_and_the_last_messages_with_their_calls(rounds, keep):
    said = conversation(rounds)
    seen = without_middle(said, keep)
    roles = [message.role for message in seen]
    assert roles[0] == "user"
    assert all(after != before or after == "tool" for before, after in pairwise(roles))
    assert seen[0].content.startswith(said[0].content)
    assert [message.content for message in seen[-keep:]][1:] == [m.content for m in said[-len(seen[-keep:]) :]][1:]
    shown = "\n".join(message.content for message in seen)
    asked = [message.content for message in said if message.role == "user"]
    assert asked[-1] in shown
    assert len(seen) >= min(keep, len(said) - 1)


def test_a_conversation_that_begins_with_the_agent_keeps_its_first_message():
    said = [Message("assistant", "a"), Message("tool", "1"), Message("assistant", "b")]
    assert [one.content for one in without_middle(said, 1)] == ["a", "b"]
    assert without_middle(said, 5) == said


def test_an_act_that_fails_leaves_no_note():
    team = talker(says(call("note", text="x"), "!gone", call("recall"), "none"))

    async def run():
        with pytest.raises(EngineError, match="gone"):
            await team.solver.act("one")
        await team.solver.act("two")

    run_virtual(run())
    assert prompts(team)[-1].endswith("<|tool|>there is no such note<|assistant|>")


def test_the_branches_of_a_tree_have_notes_of_their_own():
    team = talker(says(call("note", text="root"), "ok", call("note", text="left"), "ok", call("recall"), "ok"))
    play(team, "one")
    left, right = (team.fork(Node((number,))) for number in range(2))
    play(left, "two")
    play(right, "two")
    assert prompts(team)[-1].endswith("<|tool|>root<|assistant|>")


def test_what_was_forgotten_does_not_come_back_after_an_act_that_failed():
    team = talker(says("A", call("forget", keep=1), "B", "!gone", "C"))

    async def run():
        await team.solver.act("one")
        await team.solver.act("two")
        with pytest.raises(EngineError, match="gone"):
            await team.solver.act("three")
        await team.solver.act("four")

    run_virtual(run())
    forgets = call("forget", keep=1)
    kept = f"<|system|>s<|user|>one\n\ntwo<|assistant|>{forgets}<|tool|>forgotten<|assistant|>B"
    assert prompts(team)[-1] == f"{kept}<|user|>four<|assistant|>"


def test_a_conversation_that_begins_anew_in_a_branch_has_another_number_than_those_at_its_root():
    asked = []
    replies = says(call("compact", summary="ab"), "ok", call("compact", summary="cd"), "ok")

    def script(prompt, request):
        asked.append(request.conversation)
        return replies(prompt, request)

    team = talker(script)
    play(team, "one")
    play(team.fork(Node((0,))), "two")
    assert [conversation.rsplit("/", 1)[1] for conversation in asked] == ["0", "1", "1", "2"]


BOSS = {"tell_tools": "none", "syntax": {"type": "tag"}, "sampling": {"max_tokens": 400}}


def delegates(script, *, depth=1, agents=("helper",), helper=None, **boss):
    handing = {"delegates": {"agents": agents, "depth": depth}}
    team = {"solver": {**BOSS, **handing, **boss}, "helper": {"policy": "q", "system": "h", **(helper or {})}}
    return spec(team, trained=("p", "q"), policies=("p", "q")).seat(context(script))


def test_another_agent_does_the_work_in_a_conversation_of_its_own():
    handed = call("delegate", agent="helper", task="6*7?")
    team = delegates(says(handed, "42", "it is 42"))
    (reply,) = play(team, "what?")
    assert prompts(team)[1] == "<|system|>h<|user|>6*7?<|assistant|>"
    assert prompts(team)[2] == f"<|user|>what?<|assistant|>{handed}<|tool|>42<|assistant|>"
    assert [(turn.agent, turn.policy) for turn in team.turns] == [("solver", "p"), ("helper", "q"), ("solver", "p")]
    assert [turn.after for turn in team.turns] == [(), (0,), (1,)], "the work follows from the call, the reply from it"
    assert [turn.tags for turn in team.turns] == [{}, {"lane": 1, "delegated_by": 0}, {}]
    assert [len(reply.turns), reply.calls[0].data.text] == [2, "42"]
    check_turns(team.turns)


def test_delegated_work_is_paid_as_the_call_that_handed_it_over_unless_it_is_paid_itself():
    team = delegates(says(call("delegate", agent="helper", task="6*7?"), "42", "it is 42"))
    (reply,) = play(team, "what?")
    reply.reward(0.5)
    assert list(team.rewards().values()) == [0.5, 0.5, 0.5]
    team.solver.reward(1.0)
    assert list(team.rewards().values()) == [1.5, 1.5, 1.5]
    team.reward(2.0, "bonus")
    assert list(team.rewards().values()) == [3.5, 3.5, 3.5]
    assert team.total_reward() == 3.5, "each reward counts once"
    reply.calls[0].data.reward(0.25)
    assert list(team.rewards().values()) == [3.5, 2.25, 3.5]


def test_work_of_one_message_runs_at_once_and_each_piece_has_a_lane_and_a_branch():
    def script(prompt, request):
        asked = {"1": "one", "2": "two"}
        return asked.get(
            prompt.removesuffix("<|im_end|><|assistant|>")[-1], both if "<|tool|>" not in prompt else "done"
        )

    both = "".join(call("delegate", agent="helper", task=task) for task in ("1", "2"))
    team = spec(
        {"solver": {**BOSS, "delegates": {"agents": ["helper"]}}, "helper": {"policy": "p"}},
    ).seat(context(script, delay_s=lambda request: 1.0))

    async def run():
        await team.solver.act("?")

    run_virtual(run())
    assert [turn.tags.get("lane") for turn in team.turns] == [None, 1, 2, None]
    assert [turn.branch for turn in team.turns] == ["0", "0", "1", "0"]
    assert [turn.after for turn in team.turns] == [(), (0,), (0,), (1, 2)]
    assert prompts(team)[-1].endswith("<|tool|>one<|tool|>two<|assistant|>")


def test_a_task_is_handed_on_only_so_deep():
    own = call("delegate", agent="solver", task="again")
    team = delegates(says(own, own, own, "deep", "middle", "top"), depth=2, agents=("solver",))
    play(team, "?")
    assert [turn.tags.get("delegated_by") for turn in team.turns] == [None, 0, 1, 1, 0, None]
    assert prompts(team)[3].endswith("<|tool|>error: a task can be handed on 2 deep; do it yourself<|assistant|>")
    assert prompts(team)[-1].endswith("<|tool|>middle<|assistant|>")


def test_an_agent_that_is_not_named_gets_no_task():
    team = delegates(says(call("delegate", agent="boss", task="x"), "ok"))
    play(team, "?")
    assert "error: agent: 'boss' is not one of ['helper']" in prompts(team)[1]


def test_delegated_work_that_fails_fails_the_act():
    team = delegates(says(call("delegate", agent="helper", task="x"), "!gone"))
    with pytest.raises(EngineError, match="gone"):
        play(team, "?")


def test_calls_of_one_message_of_which_one_breaks_leave_a_timeout_around_the_act_as_it_was():
    team = talker(says(call("torn") + call("painted")), tools=[{"type": "torn"}, {"type": "painted"}])

    async def late():
        async with asyncio.timeout(9):
            with pytest.raises(EpisodeError, match="torn"):
                await team.solver.act("go")
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_virtual(late())


def test_a_seat_tool_cannot_be_opened():
    with pytest.raises(EpisodeError, match="'note' is answered by the seat of its agent"):
        CONTEXT_TOOLS["note"].open(ToolContext(episode="e", seed=0))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"context": {"tools": ["note", "note"]}}, "tools: 'note' stands there twice"),
        ({"context": {"tools": []}}, "says nothing; use full, none, or one of last, compact, hide_results, tools"),
        ({"delegates": {"agents": ["nobody"]}}, "there is no agent 'nobody'; there are: solver"),
        ({"delegates": {"agents": ["solver", "solver"]}}, "agents: 'solver' stands there twice"),
        (
            {"context": {"tools": ["note"]}, "tools": [{"type": "calculator", "name": "note"}]},
            "tools: two are called 'note'",
        ),
        (
            {"delegates": {"agents": ["solver"]}, "syntax": {"type": "function"}},
            "has no word for the tool 'delegate'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(agent, message):
    team = {"agents": {"solver": {"policy": "p", **agent}}, "workflow": {"type": "sequential", "agents": ["solver"]}}
    with pytest.raises(ValidationError, match=message):
        TeamSettings.model_validate(team)
