"""What is found in a call, and that nothing but the call decides it."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.agents.interpret import language_mix, scripts
from flexmarl.records import Task
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.tools import Observation
from tests.unit.agents.tables import CALCULATOR, TASK, context, says, spec

TAGGED = {"tools": [{"type": "calculator"}], "syntax": {"type": "tag"}}
FAULTY = {"tool_error": 1.0, "tool_calls": 1.0}
"""A call that was run, and refused."""


def signals(agent, *replies, task=TASK):
    team = spec({"solver": agent}).seat(context(says(*replies), task=task))
    run_virtual(team.solver.act("1+1"))
    return [dict(found) for found in team.signals().values()]


@pytest.mark.parametrize(
    ("agent", "replies", "expected"),
    [
        (CALCULATOR, ["calc(1+1)", "2"], [{"tool_calls": 1.0}, {}]),
        (CALCULATOR, ["calc(1+)", "2"], [FAULTY, {}]),
        (TAGGED, ["<tool_call>1</tool_call>", "2"], [{"tool_error": 1.0, "bad_tool_calls": 1.0}, {}]),
        (TAGGED, ['<tool_call>{"name": "x", "arguments": ""}</tool_call>', "2"], [FAULTY, {}]),
        (CALCULATOR, ["calc(3*(4+1)", ")", "2"], [{}, {"tool_calls": 1.0}, {}]),
        (CALCULATOR, ["calc((1+)", ")", "2"], [{}, FAULTY, {}]),
        (CALCULATOR, ["calc((1+)", "", "2"], [{}, {"tool_error": 1.0, "bad_tool_calls": 1.0}, {}]),
        ({**CALCULATOR, "max_tool_calls": 0}, ["calc(1+1)"], [{"dropped_tool_calls": 1.0, "format_error": 1.0}]),
        ({"parser": "last_line"}, ["\n\n"], [{"format_error": 1.0}]),
        ({"parser": "last_line"}, ["two"], [{}]),
    ],
)
def test_a_call_is_charged_with_what_went_wrong_in_it_and_no_other(agent, replies, expected):
    assert signals(agent, *replies) == expected


def test_foreign_letters_are_found_in_each_call_for_itself():
    task = replace(TASK, prompt="Сколько будет 1+1?")
    assert signals(CALCULATOR, "calc(1+1)", "2", task=task) == [{"language_mix": 1.0, "tool_calls": 1.0}, {}]
    assert signals({}, "two", task=replace(TASK, prompt="1+1")) == [{}], "a task without letters is in no language"


@pytest.mark.parametrize(
    ("text", "task", "share"),
    [
        ("the answer", "What?", 0.0),
        ("ответ", "What?", 1.0),
        ("ab вг", "What?", 0.5),
        ("答案是7", "7 是什么", 0.0),
        ("こたえは７", "答えは", 0.0),
        ("カタカナ", "ひらがな", 0.0),
        ("カタカナ", "漢字", 1.0),
        ("ＡＢ 𝐀𝐁", "What?", 0.0),
        ("12 + 3!", "What?", 0.0),
        ("Größe naïve", "What?", 0.0),
        ("", "What?", 0.0),
    ],
)
def test_letters_belong_to_scripts(text, task, share):
    assert language_mix(text, task) == share


@given(text=st.text(), task=st.text())
def test_a_share_is_a_share_and_a_text_is_never_foreign_to_itself(text, task):
    assert 0.0 <= language_mix(text, task) <= 1.0
    assert language_mix(text, text) == 0.0
    assert scripts(text) <= scripts(text + task) or not scripts(text)


class Slow:
    name = "calculator"
    description = "Takes its time."

    parameters: ClassVar = {"type": "object", "properties": {"expression": {"type": "string"}}}

    def open(self, context):
        return nullcontext(self)

    async def call(self, arguments):
        await asyncio.sleep(1.5)
        return Observation("2")


def test_the_call_that_reads_a_result_is_tagged_with_the_time_the_tool_took():
    agents = spec({"solver": CALCULATOR})
    agents.agents["solver"].tools["calculator"] = Slow()
    team = agents.seat(context(says("calc(1)", "(a)", "calc(2)", "2"), task=Task(input_id="x", prompt="1")))
    run_virtual(team.solver.act("1+1"))
    assert [turn.tool_s for turn in team.turns] == [0.0, 1.5, 0.0, 1.5]
