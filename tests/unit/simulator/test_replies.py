import asyncio
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from flexmarl.agents import TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.errors import ConfigError, EngineError
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.turn_rows import TURN_COLUMNS, prompt_row, response_row
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    GenerationRequest,
    IntArray,
    PolicyName,
    SampleId,
    Sampling,
    Turn,
    Version,
    VersionRun,
)
from flexmarl.simulator.plan import Distribution
from flexmarl.simulator.replies import AnyReplies, Responder, fitting_replies, reply_to, responder, responder_of

RENDERER = character_renderer()
SOLVER = PolicyName("solver")
MANY = Sampling(max_tokens=10_000)


def team(*agents: str) -> TeamSpec:
    settings = TeamSettings.model_validate(
        {
            "agents": {agent: {"policy": "solver"} for agent in agents},
            "workflow": {"type": "sequential", "agents": list(agents)},
        }
    )
    return TeamSpec.build(settings, {SOLVER: RENDERER}, [SOLVER])


def replies(**kinds: Any) -> dict[str, AnyReplies]:
    return TypeAdapter(dict[str, AnyReplies]).validate_python(kinds)


def request(
    prompt: str, *, agent: str = "solver", seed: int = 0, sampling: Sampling = MANY, name: str = "t_0_g0e0a0"
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        policy=SOLVER,
        prompt_ids=np.asarray(RENDERER.encode(prompt), np.int32),
        sampling=sampling,
        seed=seed,
        agent=AgentName(agent),
    )


def said(ids: IntArray) -> str:
    return RENDERER.decode(ids)


@responder("test_echo")
def echo(prompt: str, rng: random.Random) -> str:
    if prompt == "break":
        raise ValueError("no idea")
    return f"{prompt} {rng.random() < 0.5}"


ECHO = responder_of(team("solver"), replies(solver={"type": "scripted", "name": "test_echo"}))


def test_a_script_hears_text_and_says_text_and_ends_its_turn() -> None:
    ids = ECHO(request("hello", seed=1))
    assert said(ids) == "hello True"
    assert int(ids[-1]) in RENDERER.stop_ids
    assert len(ids) == len("hello True") + 1
    assert ids.dtype == np.int32


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=20), st.integers(0, 2**63 - 1))
def test_the_same_seed_gets_the_same_answer(prompt: str, seed: int) -> None:
    assert said(ECHO(request(prompt, seed=seed))) == said(ECHO(request(prompt, seed=seed)))


def test_a_script_ends_with_its_first_stop_string() -> None:
    ids = ECHO(request("calc(2+2) is what", sampling=Sampling(stop=("what", ")"))))
    assert said(ids) == "calc(2+2)"
    assert int(ids[-1]) not in RENDERER.stop_ids


def test_a_script_that_breaks_fails_its_request() -> None:
    with pytest.raises(EngineError, match="responder 'test_echo': ValueError: no idea"):
        ECHO(request("break"))


def test_a_script_that_nobody_registered_is_an_error_that_names_those_there_are() -> None:
    misspelt = replies(solver={"type": "scripted", "name": "test_ecko"})
    (line,), fitting = fitting_replies(["solver"], misspelt, recorded=False)
    assert line.startswith("simulation.replies.solver.name: there is no responder 'test_ecko'; did you mean 'test_e")
    assert fitting_replies(["solver"], fitting, recorded=False) == ([], fitting)


@given(seed=st.integers(0, 2**63 - 1))
def test_lengths_stay_between_floor_and_cap_and_follow_the_seed(seed: int) -> None:
    settings = replies(solver={"type": "lengths", "mean": 50, "sigma": 2.0, "floor": 5, "cap": 60})
    respond = responder_of(team("solver"), settings)
    ids = respond(request("hello", seed=seed))
    assert 5 <= len(ids) <= 60
    assert len(ids) == len(respond(request("other", seed=seed)))
    assert reply_to(request("hello", seed=seed), respond)[1] is FinishReason.STOP


def test_drawn_lengths_have_the_mean_that_was_asked_for() -> None:
    rng = random.Random(0)
    for shape in ("constant", "exponential", "lognormal"):
        numbers = [Distribution(shape=shape, mean=300.0, sigma=0.8).draw(rng) for _ in range(20_000)]
        assert np.mean(numbers) == pytest.approx(300.0, rel=0.03), shape


def test_a_distribution_without_range_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"cap is 3\.0, below floor, which is 5\.0"):
        Distribution(mean=4.0, floor=5.0, cap=3.0)


def test_an_agent_writes_as_much_as_it_is_asked_for_last() -> None:
    respond = responder_of(team("solver"), replies(solver={"type": "asked"}))
    assert len(respond(request("write 40 tokens; then write 9000 tokens"))) == 9000
    assert len(respond(request("write 13 tokens"))) == 13
    with pytest.raises(EngineError, match="ask for no number of tokens"):
        respond(request("say something"))


def test_max_tokens_cut_a_reply_and_a_stop_id_ends_it() -> None:
    respond: Responder = lambda request: np.arange(10, dtype=np.int32)  # noqa: E731
    cut, finish = reply_to(request("x", sampling=Sampling(max_tokens=4)), respond)
    assert (cut.tolist(), finish) == ([0, 1, 2, 3], FinishReason.LENGTH)
    cut, finish = reply_to(request("x", sampling=Sampling(max_tokens=4, stop_ids=(7, 2, 1))), respond)
    assert (cut.tolist(), finish) == ([0, 1], FinishReason.STOP)
    cut, finish = reply_to(request("x", sampling=Sampling(max_tokens=10)), respond)
    assert (len(cut), finish) == (10, FinishReason.STOP)


def test_a_continued_request_is_answered_as_the_original_was() -> None:
    original = request("hello there", seed=5)
    whole, _ = reply_to(original, ECHO)
    begun = GenerationRequest(
        request_id="r",
        policy=SOLVER,
        prompt_ids=np.concatenate((original.prompt_ids, whole[:3])),
        sampling=Sampling(max_tokens=10_000 - 3),
        seed=5,
        agent=original.agent,
        offset=3,
    )
    assert reply_to(begun, ECHO)[0].tolist() == whole[3:].tolist()


def test_an_agent_without_replies_is_an_error_that_says_what_would_work() -> None:
    some = replies(slover={"type": "asked"}, critic={"type": "asked"})
    spec = team("solver", "verifier", "critic")
    lines, fitting = fitting_replies(spec.agents, some, recorded=False)
    assert lines[0] == "simulation.replies.slover: there is no such agent; there are: solver, verifier, critic"
    for line, agent in zip(lines[1:], ("solver", "verifier"), strict=True):
        assert re.match(rf"simulation\.replies\.{agent} is missing.*type: lengths.*recorded", line)
    assert fitting["critic"] == some["critic"]
    assert fitting_replies(spec.agents, fitting, recorded=False) == ([], fitting)
    assert len(fitting_replies(spec.agents, some, recorded=True)[0]) == 1


def test_default_replies_are_for_agents_that_are_not_named() -> None:
    settings = replies(solver={"type": "asked"}, default={"type": "lengths", "shape": "constant", "mean": 3})
    respond = responder_of(team("solver", "verifier"), settings)
    assert len(respond(request("write 5 tokens", agent="verifier"))) == 3
    assert len(respond(request("write 5 tokens", agent="solver"))) == 5


def recorded_turn(agent: str, hop: int, text: str, finish: FinishReason = FinishReason.STOP) -> Turn:
    ids = np.asarray(RENDERER.encode(text), np.int32)
    return Turn(
        sample_id=SampleId(f"t_{hop}_g0e0a0"),
        episode=EpisodeId("g0e0a0"),
        agent=AgentName(agent),
        policy=SOLVER,
        prompt_ids=np.ones(2, np.int32),
        response_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        raw_logprobs=np.zeros(len(ids), np.float32),
        versions=(VersionRun(0, Version(0)),),
        finish=finish,
    )


async def record(run: Path) -> None:
    store = DurableStore.create(
        run / "experience.sqlite", agents=[AgentName("solver"), AgentName("verifier")], columns=TURN_COLUMNS
    )
    turns = [
        recorded_turn("solver", 0, "first"),
        recorded_turn("solver", 2, "third", FinishReason.LENGTH),
        recorded_turn("verifier", 1, "second"),
    ]
    for turn in turns:
        await store.put(turn.agent, [response_row(turn)])
    await store.put(AgentName("solver"), [prompt_row(SampleId("t_9_g0e0a0"), SOLVER, np.ones(2, np.int32))])
    await store.close()


def test_a_recorded_run_says_the_same_again(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path))
    respond = responder_of(team("solver", "verifier"), {}, recorded=tmp_path)
    assert said(respond(request("anything", name="t_0_g0e0a0"))) == "first"
    assert said(respond(request("anything", agent="verifier", name="t_1_g0e0a0"))) == "second"
    cut, finish = reply_to(request("x", name="t_2_g0e0a0", sampling=Sampling(max_tokens=5)), respond)
    assert (said(cut), finish) == ("third", FinishReason.LENGTH)


def test_what_the_record_lacks_is_said_as_the_same_agent_said_something(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path))
    respond = responder_of(team("solver", "verifier"), {}, recorded=tmp_path)
    others = [said(respond(request("anything", name="t_0_g7e0a0", seed=seed))) for seed in range(4)]
    assert others == ["first", "thirdd", "first", "thirdd"]


def test_a_record_without_the_agent_is_an_error_that_names_its_agents(tmp_path: Path) -> None:
    asyncio.run(record(tmp_path))
    with pytest.raises(ConfigError, match=r"simulation\.replies\.critic: .*its agents are: solver, verifier"):
        responder_of(team("solver", "critic"), {}, recorded=tmp_path)
    with pytest.raises(ConfigError, match=r"simulation\.recorded: .* has no experience\.sqlite"):
        responder_of(team("solver"), {}, recorded=tmp_path / "nowhere")
