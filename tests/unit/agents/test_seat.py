import asyncio
from contextlib import nullcontext
from typing import ClassVar

import numpy as np
import pytest

from flexmarl.agents import ChatRenderer, NoRecorder
from flexmarl.agents.context import context_hash
from flexmarl.errors import EngineError, EpisodeError
from flexmarl.records import FinishReason, Generation, Purpose, Version, VersionRun, make_trajectory_id
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.agents import ScriptedModel, check_turns
from tests.unit.agents import tokenizers_for_tests as samples
from tests.unit.agents.tables import CALCULATOR, context, says, spec, text


def acts(seat, *observations):
    async def run():
        return [await seat.act(observation) for observation in observations]

    return run_virtual(run())


def test_a_reply_has_the_text_and_the_exact_turn():
    team = spec({"solver": {"system": "solve"}}).seat(context(says("7")))
    (reply,) = acts(team.solver, "3+4")
    (turn,) = reply.turns
    assert (reply.text, reply.parsed, reply.answer, reply.finish) == ("7", "7", "7", FinishReason.STOP)
    assert text(turn.prompt_ids) == "<|system|>solve<|im_end|><|user|>3+4<|im_end|><|assistant|>"
    assert text(turn.response_ids) == "7<|im_end|>"
    assert turn.sample_id == "sum-1_0_g0e0a0"
    assert turn.parent is None
    assert turn.shared() == {
        "sample_id": "sum-1_0_g0e0a0",
        "episode": "g0e0a0",
        "agent": "solver",
        "policy": "p",
        "parent": None,
        "call": 0,
        "act_hop": 0,
        "turn": 0,
        "branch": "0",
        "path": (),
        "context_hash": context_hash("p", turn.prompt_ids),
        "after": (),
        "tool_s": 0.0,
        "purpose": Purpose.TRAINING,
        "tags": {},
    }
    assert (turn.hop, turn.valid) == (0, True)
    assert team.turns == (turn,)
    check_turns(team.turns)


@pytest.mark.parametrize(
    ("parser", "said", "parsed", "answer"),
    [
        ("integer", "it is 1,188.", 1188, "1188"),
        ("integer", "I do not know", None, "I do not know"),
        ({"type": "choice", "options": ["yes", "no"]}, "No!", "no", "no"),
        ({"type": "choice", "options": ["yes", "no"]}, "perhaps", None, "perhaps"),
        ("last_line", " \n", None, " \n"),
    ],
)
def test_the_answer_is_the_parsed_value_or_the_whole_text_where_the_parser_finds_nothing(parser, said, parsed, answer):
    team = spec({"solver": {"parser": parser}}).seat(context(says(said)))
    (reply,) = acts(team.solver, "12*99")
    assert (reply.parsed, reply.answer) == (parsed, answer)
    (signals,) = team.signals().values()
    assert signals.get("format_error", 0.0) == float(parsed is None)


def test_the_recorded_ids_and_logprobs_are_those_of_the_engine():
    seen: list[tuple] = []

    async def generate(request, **how):
        generation = await ScriptedModel(samples.characters(samples.TERSE), says("calc(1+1)" if not seen else "2"))(
            request
        )
        seen.append((request, generation))
        return generation

    team = spec({"solver": CALCULATOR}).seat(context(says(), generate=generate))
    acts(team.solver, "1+1")
    assert len(seen) == len(team.turns) == 2
    for turn, (request, generation) in zip(team.turns, seen, strict=True):
        assert turn.prompt_ids is request.prompt_ids
        assert turn.response_ids is generation.response_ids
        assert turn.logprobs is generation.logprobs


def test_generation_stops_at_the_call_and_its_result_is_prompt_of_the_next():
    team = spec({"solver": CALCULATOR}).seat(context(says("calc(3*4) never said", "it is 12")))
    (reply,) = acts(team.solver, "3*4")
    first, second = reply.turns
    assert text(first.response_ids) == "calc(3*4)"
    assert text(second.prompt_ids) == (
        "<|user|>3*4<|im_end|><|assistant|>calc(3*4)<|im_end|><|tool|>12<|im_end|><|assistant|>"
    )
    assert second.parent == first.sample_id
    assert (reply.text, reply.transcript) == ("it is 12", "calc(3*4)\n12\nit is 12")


def test_a_stop_inside_a_call_costs_a_call_more_and_the_message_goes_on():
    team = spec({"solver": CALCULATOR}).seat(context(says("calc(3*(4+1) never said", ")", "15")))
    (reply,) = acts(team.solver, "3*(4+1)")
    first, second, third = reply.turns
    assert [turn.text for turn in reply.turns] == ["calc(3*(4+1)", ")", "15"]
    assert text(second.prompt_ids) == "<|user|>3*(4+1)<|im_end|><|assistant|>calc(3*(4+1)"
    assert text(third.prompt_ids) == (
        "<|user|>3*(4+1)<|im_end|><|assistant|>calc(3*(4+1))<|im_end|><|tool|>15<|im_end|><|assistant|>"
    )
    assert [(turn.parent, turn.call, turn.branch) for turn in reply.turns] == [
        (None, 0, "0"),
        (first.sample_id, 1, "0"),
        (second.sample_id, 2, "0"),
    ]
    assert reply.transcript == "calc(3*(4+1))\n15\n15"
    assert (reply.text, reply.calls[0].argument, reply.unresolved) == ("15", "3*(4+1)", False)
    check_turns(team.turns)


def test_a_parenthesis_that_is_no_call_does_not_end_the_message():
    team = spec({"solver": CALCULATOR}).seat(context(says("it is (so) never said", " 7")))
    (reply,) = acts(team.solver, "3+4")
    assert reply.text == "it is (so) 7"
    assert len(reply.turns) == 2
    assert not reply.calls


def test_a_message_has_at_most_max_tokens_however_many_calls_it_takes():
    agent = {**CALCULATOR, "sampling": {"max_tokens": 7}}
    ctx = context(lambda prompt, request: "())")
    team = spec({"solver": agent}).seat(ctx)
    (reply,) = acts(team.solver, "3+4")
    assert [len(turn.response_ids) for turn in reply.turns] == [2, 2, 2, 1]
    assert [request.sampling.max_tokens for request in ctx.generate.requests] == [7, 5, 3, 1]
    assert len(reply.text) == 7


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_of_calls_ends_the_loop_and_the_call_stands_as_the_reply(budget):
    team = spec({"solver": {**CALCULATOR, "max_tool_calls": budget}}).seat(context(lambda *_: "calc(1+1)"))
    (reply,) = acts(team.solver, "1+1")
    assert len(reply.calls) == budget
    assert len(reply.turns) == budget + 1
    assert (reply.text, reply.unresolved) == ("calc(1+1)", True)
    assert [turn.valid for turn in reply.turns] == [True] * budget + [False]


@pytest.mark.parametrize(
    ("agent", "said", "result"),
    [
        (CALCULATOR, "calc(1+)", "error: the expression ends too early"),
        (CALCULATOR, "calc((1+1)", "error: 1 of the parentheses of calc( not closed"),
        (
            {"tools": [{"type": "calculator"}], "syntax": {"type": "tag"}},
            '<tool_call>{"name": "calc", "arguments": "1"}</tool_call>',
            "error: there is no tool 'calc'; there are: calculator",
        ),
        (
            {"tools": [{"type": "calculator"}], "syntax": {"type": "tag"}},
            "<tool_call>1</tool_call>",
            "error: write a tool call as",
        ),
    ],
)
def test_a_bad_call_is_told_to_the_agent_and_counts_against_the_budget(agent, said, result):
    script = says(said, "", "7") if said == "calc((1+1)" else says(said, "7")
    team = spec({"solver": agent}).seat(context(script))
    (reply,) = acts(team.solver, "1+1")
    assert reply.calls[0].result.startswith(result)
    assert reply.text == "7"


def test_a_call_cut_by_the_token_limit_stands_as_the_reply():
    team = spec({"solver": {**CALCULATOR, "sampling": {"max_tokens": 6}}}).seat(context(says("calc(1+1)")))
    (reply,) = acts(team.solver, "1+1")
    assert (reply.text, reply.finish, reply.unresolved) == ("calc(1", FinishReason.LENGTH, True)
    assert reply.turns[0].valid is False


def test_a_broken_tool_fails_the_episode_with_its_reason():
    class Broken:
        name = "calculator"
        description = ""
        parameters: ClassVar = {"type": "object", "properties": {"expression": {"type": "string"}}}

        def open(self, context):
            return nullcontext(self)

        async def call(self, arguments):
            raise OSError("server gone")

    team_spec = spec({"solver": CALCULATOR})
    team_spec.agents["solver"].tools["calculator"] = Broken()
    with pytest.raises(EpisodeError, match="tool 'calculator' of agent 'solver': OSError: server gone"):
        acts(team_spec.seat(context(says("calc(1)"))).solver, "1")


@pytest.mark.parametrize(
    ("remembers", "seen_third", "parents", "branches"),
    [
        ("none", "<|user|>c", [False, False, False], [0, 1, 2]),
        ("full", "<|user|>a<|assistant|>1<|user|>b<|assistant|>2<|user|>c", [False, True, True], [0, 0, 0]),
        ({"last": 1}, "<|user|>b<|assistant|>2<|user|>c", [False, True, False], [0, 0, 1]),
        ({"last": 2}, "<|user|>a<|assistant|>1<|user|>b<|assistant|>2<|user|>c", [False, True, True], [0, 0, 0]),
    ],
)
def test_an_agent_remembers_what_its_context_says(remembers, seen_third, parents, branches):
    ctx = context(says("1", "2", "3"))
    team = spec({"solver": {"context": remembers, "system": "s"}}).seat(ctx)
    acts(team.solver, "a", "b", "c")
    third = team.turns[2]
    assert text(third.prompt_ids).replace("<|im_end|>", "") == f"<|system|>s{seen_third}<|assistant|>"
    assert [turn.parent is not None for turn in team.turns] == parents
    assert [turn.branch for turn in team.turns] == [str(branch) for branch in branches]
    assert [request.conversation for request in ctx.generate.requests] == [f"g0e0a0/solver/{b}" for b in branches]
    check_turns(team.turns)


def test_each_prompt_of_a_conversation_is_the_last_one_its_response_and_a_suffix():
    agent = {**CALCULATOR, "context": "full", "sampling": {"max_tokens": 12}}
    script = says("calc(2*3)", "6", "a text longer than twelve", "7")
    team = spec({"solver": agent}).seat(context(script))
    acts(team.solver, "2*3", "and?", "well?")
    suffixes = []
    for previous, turn in zip(team.turns, team.turns[1:], strict=False):
        history = np.concatenate((previous.prompt_ids, previous.response_ids))
        assert turn.parent == previous.sample_id
        assert np.array_equal(turn.prompt_ids[: len(history)], history)
        suffixes.append(text(turn.prompt_ids[len(history) :]))
    assert suffixes == [
        "<|im_end|><|tool|>6<|im_end|><|assistant|>",  # stopped by the syntax: the end token is supplied
        "<|user|>and?<|im_end|><|assistant|>",  # ended its turn by itself
        "<|im_end|><|user|>well?<|im_end|><|assistant|>",  # cut by the limit: supplied again
    ]


def test_a_template_that_strips_thoughts_starts_a_new_branch_after_one():
    tokenizer = samples.characters(samples.FORGETS_THOUGHTS)
    agents = spec({"solver": {"context": "full"}}, renderer=ChatRenderer(tokenizer))
    team = agents.seat(context(says("1", "<think>\nhm\n</think>\n\n2", "3", "4"), tokenizer=tokenizer))
    acts(team.solver, "a", "b", "c", "d")
    assert [turn.branch for turn in team.turns] == ["0", "0", "1", "2"]
    assert [turn.parent is not None for turn in team.turns] == [False, True, False, False]
    assert "hm" not in tokenizer.decode(team.turns[2].prompt_ids.tolist())
    check_turns(team.turns)


def test_what_a_failed_act_said_is_not_remembered():
    team = spec({"solver": {"context": "full"}}).seat(context(says("1", "!out of memory", "3")))

    async def run():
        await team.solver.act("a")
        with pytest.raises(EngineError, match=r"call sum-1_1_g0e0a0 of agent 'solver' failed: out of memory"):
            await team.solver.act("b")
        await team.solver.act("c")

    run_virtual(run())
    assert [turn.hop for turn in team.turns] == [0, 2], "a failed call is never a turn"
    assert text(team.turns[1].prompt_ids).count("<|user|>") == 2
    assert team.turns[1].parent is None
    check_turns(team.turns)


def test_an_aborted_call_fails_the_episode():
    async def aborted(request, **how):
        return Generation(
            request_id=request.request_id,
            response_ids=np.zeros(1, np.int32),
            logprobs=np.zeros(1, np.float32),
            raw_logprobs=np.zeros(1, np.float32),
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.ABORT,
        )

    team = spec({"solver": {}}).seat(context(says(), generate=aborted))
    with pytest.raises(EpisodeError, match="was aborted"):
        acts(team.solver, "a")
    assert team.turns == ()
    assert team.rewards() == {}


def test_acts_of_an_agent_that_remembers_them_cannot_overlap():
    team = spec({"solver": {"context": "full"}}).seat(context(says("1", "2")))

    async def run():
        await asyncio.gather(team.solver.act("a"), team.solver.act("b"))

    with pytest.raises(EpisodeError, match="await the first act"):
        run_virtual(run())


def parallel(delays):
    """Three parallel calls of one agent whose answers come in the order of the delays."""
    ctx = context(lambda prompt, request: "ok", delay_s=lambda request: delays[len(ctx.generate.requests) - 1])
    team = spec({"solver": {}}).seat(ctx)

    async def run():
        await asyncio.gather(*(team.solver.act(observation) for observation in ("a", "b", "b")))

    run_virtual(run())
    check_turns(team.turns)
    return {request.request_id: request.seed for request in ctx.generate.requests}, team.turns


def test_seeds_and_hops_depend_on_the_order_of_sending_alone():
    (seeds, turns), (other_seeds, other_turns) = parallel([1.0, 2.0, 3.0]), parallel([3.0, 2.0, 1.0])
    assert seeds == other_seeds
    assert len(set(seeds.values())) == 3, "the second call with the same prompt has its own seed"
    assert [one.shared() for one in turns] == [one.shared() for one in other_turns]
    assert [turn.hop for turn in turns] == [0, 1, 2]
    assert turns[1].context_hash == turns[2].context_hash != turns[0].context_hash


def test_another_run_episode_attempt_or_agent_has_other_seeds():
    def seed(agent="solver", run_seed=1, trajectory="g0e0a0"):
        ctx = context(says("ok"), run_seed=run_seed, trajectory_id=trajectory)
        acts(spec({agent: {}}).seat(ctx)[agent], "a")
        return ctx.generate.requests[0].seed

    seeds = [
        seed(),
        seed(agent="other"),
        seed(run_seed=2),
        seed(trajectory=make_trajectory_id(0, 1, 0)),
        seed(trajectory=make_trajectory_id(0, 0, 1)),
    ]
    assert len(set(seeds)) == len(seeds)
    assert seed() == seeds[0]
    assert all(0 <= value < 2**63 for value in seeds)


def test_tags_of_the_workflow_go_onto_the_turns_whatever_their_names():
    team = spec({"solver": {}}).seat(context(says("ok")))

    async def run():
        return await team.solver.act("a", env_step=3, hop=4, valid="maybe", turn=9)

    (turn,) = run_virtual(run()).turns
    assert turn.tags == {"env_step": 3, "hop": 4, "valid": "maybe"}
    assert (turn.hop, turn.valid, turn.turn) == (0, True, 9)
    for tags, why in (({"turn": "x"}, "turn must be a whole number, got 'x'"), ({"anchor": ["x"]}, "must be a string")):
        with pytest.raises(EpisodeError, match=why):
            run_virtual(team.solver.act("a", **tags))


def test_an_evaluation_overrides_the_sampling():
    ctx = context(says("ok"), sampling={"temperature": 0.0})
    acts(spec({"solver": {"sampling": {"temperature": 0.7, "stop": ["\n"]}}}).seat(ctx).solver, "a")
    (request,) = ctx.generate.requests
    assert (request.sampling.temperature, request.sampling.stop) == (0.0, ("\n",))


def test_the_recorder_hears_of_the_prompt_before_the_call_and_of_the_turn_after_it():
    heard: list[tuple[str, str, int]] = []

    class Listener(NoRecorder):
        async def prompt(self, call, prompt_ids):
            assert call.context_hash == context_hash(call.policy, prompt_ids)
            heard.append(("prompt", call.sample_id, len(ctx.generate.requests)))

        async def turn(self, turn):
            heard.append(("turn", turn.sample_id, len(ctx.generate.requests)))

    ctx = context(says("calc(1)", "!gone"), recorder=Listener())
    with pytest.raises(EngineError):
        acts(spec({"solver": CALCULATOR}).seat(ctx).solver, "1")
    assert heard == [
        ("prompt", "sum-1_0_g0e0a0", 0),
        ("turn", "sum-1_0_g0e0a0", 1),
        ("prompt", "sum-1_1_g0e0a0", 1),
    ]
