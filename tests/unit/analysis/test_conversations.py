"""The conversations that are shown are those that were played: by ids, never by texts that were encoded again."""

import asyncio
import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from flexmarl.agents.chat import ChatRenderer
from flexmarl.analysis.conversations import NOT_ENDED, STOPPED, EpisodeLine, Reading, ShownEpisode, open_conversations
from flexmarl.analysis.selection import EpisodeChoice
from flexmarl.cli.show import episode_json, show_list
from flexmarl.errors import ConfigError
from flexmarl.events.event import Event, Events
from flexmarl.events.group_events import GroupAdmitted, episode_failed, episode_finished
from flexmarl.events.journal import FORMAT, Journal
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.turn_rows import TURN_COLUMNS, prompt_row, response_row
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    GroupId,
    PolicyName,
    SampleId,
    Turn,
    Version,
    VersionRun,
    make_sample_id,
)
from flexmarl.rollout.player import Player
from flexmarl.testing.agents import ScriptedModel
from flexmarl.tools import FunctionSyntax, TagSyntax, ToolCall
from tests.unit.agents.tables import RENDERER, TOKENIZER, says, spec, text
from tests.unit.agents.tokenizers_for_tests import CHATML, byte_pairs
from tests.unit.rollout.plays import GROUP, player

AGENTS = [AgentName("solver"), AgentName("verifier")]
IDS = st.lists(st.integers(0, 99), max_size=6)
CALL = st.tuples(st.sampled_from(AGENTS), st.integers(-1, 8), IDS, IDS)
"""Agent, the earlier call of the agent that the prompt extends (none if there is none), new tokens, reply."""


def decode(policy: str, ids: Any) -> str:
    return " ".join(map(str, ids))


READING = Reading(decode=decode, syntaxes={})


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def turn_of(agent: AgentName, hop: int, prompt: Any, reply: Any, parent: SampleId | None) -> Turn:
    logprobs = -np.arange(len(reply), dtype=np.float32) / 4
    return Turn(
        sample_id=make_sample_id("sum_1", hop, "g0e0a0"),
        episode=EpisodeId("g0e0a0"),
        agent=agent,
        policy=PolicyName(agent),
        prompt_ids=prompt,
        response_ids=reply,
        logprobs=logprobs,
        raw_logprobs=logprobs - np.float32(0.5),
        versions=(VersionRun(0, Version(3)),),
        finish=FinishReason.STOP,
        parent=parent,
    )


def unfolded(turns: dict[int, Any], hop: int) -> list[int]:
    """A turn's prompt from the JSON that `show --json` prints."""
    found: list[int] = []
    for piece in turns[hop]["prompt"]:
        if "ids" in piece:
            found += piece["ids"]
        else:
            reply = turns[piece["as_in"]]["reply"]
            before = unfolded(turns, piece["as_in"]) + (reply["ids"] if reply else [])
            assert piece["tokens"] == len(before)
            found += before
    return found


def check(shown: ShownEpisode, played: dict[int, tuple[list[int], list[int]]]) -> None:
    """Ids of prompts and replies, from the record and from its JSON, are those that were played."""
    turns = {turn["hop"]: turn for turn in episode_json(shown)["turns"]}
    assert [turn.hop for turn in shown.turns] == sorted(played)
    for turn in shown.turns:
        prompt, reply = played[turn.hop]
        assert shown.prompt_ids(turn.hop).tolist() == prompt == unfolded(turns, turn.hop)
        assert (turn.reply.ids.tolist() if turn.reply else []) == reply
        for piece in (*turn.prompt, *([turn.reply] if turn.reply else [])):
            assert piece.text == ("" if piece.as_in is not None else decode("", piece.ids))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CALL, min_size=1, max_size=9), st.booleans())
def test_unfolded_ids_are_those_that_the_engine_was_given_and_sampled(
    tmp_path_factory: pytest.TempPathFactory, calls: list[Any], full: bool
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    turns: list[Turn] = []
    for hop, (agent, extends, new, reply) in enumerate(calls):
        own = [turn for turn in turns if turn.agent == agent]
        parent = own[extends % len(own)] if own and extends >= 0 else None
        before = [*parent.prompt_ids, *parent.response_ids] if parent else []
        turns.append(turn_of(agent, hop, ids(*before, *new), ids(*reply), parent and parent.sample_id))

    async def write() -> None:
        store = DurableStore.create(folder.store, agents=AGENTS, columns=TURN_COLUMNS)
        for turn in turns:
            await store.put(turn.agent, [response_row(turn)])
        await store.close()

    asyncio.run(write())
    with open_conversations(folder) as conversations:
        (line,) = conversations.lines()
        shown = conversations.read(line, Reading(decode=decode, syntaxes={}, full=full))
    check(shown, {hop: (turn.prompt_ids.tolist(), turn.response_ids.tolist()) for hop, turn in enumerate(turns)})
    assert line.status == NOT_ENDED
    if full:
        assert all(piece.as_in is None for turn in shown.turns for piece in turn.prompt)
    for turn in shown.turns:
        if turn.logprobs:
            assert turn.logprobs.largest_gap == 0.5
            assert turn.logprobs.mean - turn.logprobs.raw_mean == pytest.approx(0.5)


async def talks(task: Any, team: Any) -> None:
    """Two acts of the solver, each with one of the verifier; rewards of two parts."""
    for _ in range(2):
        reply = await team.solver.act(task.prompt)
        verdict = await team.verifier.act(reply.text)
        reply.reward(1.0)
        reply.reward(-0.25, "length")
        verdict.reward(0.5)
    team.report(success=1.0)


async def breaks(task: Any, team: Any) -> None:
    await team.solver.act(task.prompt)
    raise ValueError("three is too many")


def play(folder: RunFolder, workflow: Any) -> list[Any]:
    """Plays one episode into the folder, as a run does; returns the requests that the model got."""

    async def run() -> list[Any]:
        store: Any = DurableStore.create(folder.store, agents=AGENTS, columns=TURN_COLUMNS)
        journal, events = Journal(folder.journal), Events(lambda: 1.0)
        events.listen(Event, journal.write)
        one, model = player(workflow, delay_s=lambda _: 0.0, store=store)
        events.emit(GroupAdmitted(group=GroupId(0), step=4, task=GROUP.task.input_id))
        episode = await one.play(GROUP, 0)
        events.emit(episode_finished(episode) if episode.finished else episode_failed(episode, GROUP.purpose))
        journal.close()
        await store.close()
        return model.requests

    return asyncio.run(run())


def test_an_episode_is_shown_as_the_model_was_asked_with_the_parts_of_its_rewards(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    requests = play(folder, talks)
    with open_conversations(folder) as conversations:
        (line,) = conversations.lines()
        shown = conversations.read(line, READING)
    assert (line.episode, line.step, line.task, line.status, line.score) == ("g0e0a0", 5, "sum-1", "finished", 1.0)
    assert dict(line.turns) == {"solver": 2, "verifier": 2}
    assert dict(line.rewards) == {"solver": 0.75, "verifier": 0.5}
    asked = {hop: request.prompt_ids.tolist() for hop, request in enumerate(requests)}
    assert len(asked) == 4
    check(shown, {turn.hop: (asked[turn.hop], turn.reply.ids.tolist()) for turn in shown.turns if turn.reply})
    assert [dict(turn.parts) for turn in shown.turns[:2]] == [{"outcome": 1.0, "length": -0.25}, {"outcome": 0.5}]


def test_a_failed_episode_has_its_reason_and_a_call_without_answer_its_prompt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    play(folder, breaks)
    with open_conversations(folder) as conversations:
        (line,) = conversations.lines()
        assert line.failed
        assert line.reason == "workflow on task sum-1: ValueError: three is too many"
        (turn,) = conversations.read(line, READING).turns
    assert (turn.state, turn.reward) == ("failed", None)

    other = RunFolder(tmp_path / "other")
    other.path.mkdir()

    async def write() -> None:
        store = DurableStore.create(other.store, agents=AGENTS, columns=TURN_COLUMNS)
        unanswered = SampleId(make_sample_id("sum-1", 0, "g0e0a0"))
        await store.put(AGENTS[0], [prompt_row(unanswered, PolicyName("solver"), ids(1, 2))])
        await store.close()

    asyncio.run(write())
    with open_conversations(other) as conversations:
        (shown,) = (conversations.read(line, READING) for line in conversations.lines())
    check(shown, {0: ([1, 2], [])})
    assert shown.turns[0].reply is None


def test_a_run_that_still_writes_is_read_and_its_last_episode_has_not_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    async def write() -> ShownEpisode:
        store = DurableStore.create(folder.store, agents=AGENTS, columns=TURN_COLUMNS)
        await store.put(AGENTS[0], [response_row(turn_of(AGENTS[0], 0, ids(1, 2), ids(3), None))])
        folder.journal.write_text(
            '{"t":0.0,"event":"journal","format":' + str(FORMAT) + '}\n{"t":1.0,"event":"group_adm'
        )  # Torn.
        with open_conversations(folder) as conversations:  # Nobody has merged the -wal file, as after kill -9.
            (line,) = conversations.lines()
            shown = conversations.read(line, READING)
        await store.close()
        return shown

    shown = asyncio.run(write())
    assert shown.line.status == NOT_ENDED
    check(shown, {0: ([1, 2], [3])})


@pytest.mark.parametrize("with_renderer", [True, False])
def test_each_call_of_a_turn_has_a_line_of_its_own_with_its_result(tmp_path: Path, with_renderer: bool) -> None:
    folder, solver = RunFolder(tmp_path), AgentName("solver")
    agent = {"tools": [{"type": "calculator"}], "syntax": {"type": "tag"}, "tell_tools": "none"}
    team = spec({"solver": {**agent, "sampling": {"max_tokens": 1000}}})
    calls = [ToolCall("calculator", {"expression": sum_}) for sum_ in ("1+1", "2*(3", "7*8")]

    async def act(task: Any, team: Any) -> None:
        (await team.solver.act(task.prompt)).reward(1.0)

    async def write() -> None:
        store = DurableStore.create(folder.store, agents=[solver], columns=TURN_COLUMNS)
        model = ScriptedModel(TOKENIZER, says(TagSyntax().render(*calls), "so"))
        played = Player(team=replace(team, run=act), generate=model, run_seed=0, timeout_s=9.0, store=store)
        assert (await played.play(GROUP, 0)).finished
        await store.close()

    asyncio.run(write())
    renderers = {solver: RENDERER} if with_renderer else {}
    reading = Reading(decode=lambda _, ids: text(ids), syntaxes={solver: TagSyntax()}, renderers=renderers)
    with open_conversations(folder) as conversations:
        (line,) = conversations.lines()
        first, second = conversations.read(line, reading).turns
    assert second.tools == ()
    results = ["2", "error: the expression ends too early", "56"]
    assert [call.argument for call in first.tools] == ["1+1", "2*(3", "7*8"]
    assert [call.name for call in first.tools] == ["calculator"] * 3
    if with_renderer:
        assert [call.result for call in first.tools] == results
    else:
        assert all(call.prompt and set(results) <= {*re.split("<.*?>", call.result or "")} for call in first.tools)


def test_a_call_that_a_stop_string_cut_is_read_whole_at_its_last_piece(tmp_path: Path) -> None:
    """As in `q(select max(price) from goods)`, whose first `)` ends a piece, but not the call."""
    folder, solver = RunFolder(tmp_path), AgentName("solver")
    syntax = FunctionSyntax(names={"calc": "calculator"})
    agent = {"tools": [{"type": "calculator"}], "syntax": syntax.model_dump(), "tell_tools": "none"}
    team = spec({"solver": {**agent, "sampling": {"max_tokens": 1000}}})

    async def act(task: Any, team: Any) -> None:
        (await team.solver.act(task.prompt)).reward(1.0)

    async def write() -> None:
        store = DurableStore.create(folder.store, agents=[solver], columns=TURN_COLUMNS)
        model = ScriptedModel(TOKENIZER, says("calc((1+2)", "*(3+4)", ")", "so"))
        played = Player(team=replace(team, run=act), generate=model, run_seed=0, timeout_s=9.0, store=store)
        assert (await played.play(GROUP, 0)).finished
        await store.close()

    asyncio.run(write())
    reading = Reading(decode=lambda _, ids: text(ids), syntaxes={solver: syntax}, renderers={solver: RENDERER})
    with open_conversations(folder) as conversations:
        (line,) = conversations.lines()
        turns = conversations.read(line, reading).turns
    assert [len(turn.tools) for turn in turns] == [0, 0, 1, 0]
    (call,) = turns[2].tools
    assert (call.name, call.argument, call.result) == ("calculator", "(1+2)*(3+4)", "21")


@pytest.mark.parametrize("opened", [True, False])
def test_a_call_in_a_thought_that_the_template_began_is_shown_as_little_as_it_was_run(
    tmp_path: Path, opened: bool
) -> None:
    folder, solver = RunFolder(tmp_path), AgentName("solver")
    generated = "<|im_start|>assistant\n"
    tokenizer = byte_pairs(CHATML.replace(generated, f"{generated}<think>\n") if opened else CHATML)
    renderer = ChatRenderer(tokenizer)
    agent = {"tools": [{"type": "calculator"}], "syntax": {"type": "tag"}, "tell_tools": "none"}
    team = spec({"solver": {**agent, "sampling": {"max_tokens": 1000}}}, renderer=renderer)
    used = []

    async def act(task: Any, team: Any) -> None:
        reply = await team.solver.act(task.prompt)
        used.extend(call.result for call in reply.calls)
        reply.reward(1.0)

    async def write() -> None:
        store = DurableStore.create(folder.store, agents=[solver], columns=TURN_COLUMNS)
        model = ScriptedModel(tokenizer, says(TagSyntax().render(ToolCall("calculator", {"expression": "6*7"})), "so"))
        played = Player(team=replace(team, run=act), generate=model, run_seed=0, timeout_s=9.0, store=store)
        assert (await played.play(GROUP, 0)).finished
        await store.close()

    asyncio.run(write())
    assert used == ([] if opened else ["42"])
    syntaxes, renderers = {solver: TagSyntax()}, {solver: renderer}
    reading = Reading(decode=lambda _, ids: tokenizer.decode(ids.tolist()), syntaxes=syntaxes, renderers=renderers)
    with open_conversations(folder) as conversations:
        (line,) = conversations.lines()
        turns = conversations.read(line, reading).turns
    assert [call.result for turn in turns for call in turn.tools] == used


def test_texts_that_were_pruned_are_said_to_be_gone_and_numbers_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    play(folder, breaks)

    async def prune() -> None:
        store = DurableStore.open(folder.store)
        assert await store.prune(GroupId(1), 0) == 1
        await store.close()

    asyncio.run(prune())
    with open_conversations(folder) as conversations:
        (line,) = conversations.lines()
        (turn,) = conversations.read(line, READING).turns
    assert line.pruned == 1
    assert (turn.pruned, turn.prompt, turn.reply) == (True, (), None)


def test_a_choice_that_fits_nothing_names_what_is_near(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    play(folder, talks)
    with open_conversations(folder) as conversations:
        lines, agents = conversations.lines(), conversations.agents
    for choice, said in {
        EpisodeChoice(episode="g0e1a0"): "there is no episode 'g0e1a0'; near are: g0e0a0",
        EpisodeChoice(task="sum-2"): "there is no task 'sum-2'; near are: sum-1",
        EpisodeChoice(agent="solve"): "there is no agent 'solve'; near are: solver",
        EpisodeChoice(step=1): "there is no episode of step 1; the episodes are of steps 5 to 5",
        EpisodeChoice(failed=True): "no episode is left of 1, 0 of them failed; leave out a filter",
        EpisodeChoice(best=1, worst=1): "--best and --worst exclude each other",
    }.items():
        with pytest.raises(ConfigError, match=said):
            choice.of(lines, agents)
    assert EpisodeChoice(step=5, agent="solver", best=2).of(lines, agents) == lines


def test_of_equal_episodes_those_of_the_newest_step_are_shown_first() -> None:
    scores = {"g0e0a0": (1, 1.0), "g1e0a0": (2, 0.0), "g2e0a0": (3, 1.0), "g2e1a0": (3, 1.0), "g3e0a0": (4, 0.0)}
    lines = [
        EpisodeLine(
            episode=EpisodeId(episode), task="sum-1", step=step, status="finished", metrics={"success": success}
        )
        for episode, (step, success) in scores.items()
    ]
    best, worst = EpisodeChoice(best=3).of(lines, AGENTS), EpisodeChoice(worst=3).of(lines, AGENTS)
    assert [line.episode for line in best] == ["g2e0a0", "g2e1a0", "g0e0a0"]
    assert [line.episode for line in worst] == ["g3e0a0", "g1e0a0", "g2e0a0"]


def test_the_list_shows_those_that_ended_last_and_cuts_no_id_on_80_columns(tmp_path, monkeypatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys.modules["flexmarl.cli.show"], "CONSOLE", Console(file=screen, width=80))
    ended = [
        EpisodeLine(episode=EpisodeId(f"g100000003{n}e0a0"), task="a-task-of-a-long-name", status="finished")
        for n in range(3)
    ]
    left = [replace(ended[0], episode=EpisodeId(f"g9{n}e0a0"), status=STOPPED, reason="x" * 90) for n in range(2)]
    show_list(RunFolder(tmp_path), [*ended, *left], 4)
    shown = re.findall(r"^ +(g\d+e0a0) ", screen.getvalue(), re.M)
    assert shown == ["g91e0a0", *(line.episode for line in ended)]
    assert "5 episodes: 3 finished, 2 stopped" in " ".join(screen.getvalue().split())
