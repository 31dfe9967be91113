"""Only what a trained policy sampled to its end, in a finished episode, is credited."""

from dataclasses import replace

import numpy as np

from flexmarl.credit import credit_rows
from flexmarl.credit.interface import GraphCall
from flexmarl.records import (
    AgentName,
    Episode,
    EpisodeId,
    EpisodeStatus,
    FinishReason,
    GroupId,
    GroupRecord,
    PolicyName,
    Purpose,
    SampleId,
    Task,
    Turn,
    Version,
    VersionRun,
    make_sample_id,
)


def turn(episode: str, hop: int, agent: str, finish: FinishReason = FinishReason.STOP) -> Turn:
    return Turn(
        sample_id=make_sample_id("mul_7", hop, episode),
        episode=EpisodeId(episode),
        agent=AgentName(agent),
        policy=PolicyName(f"{agent}-policy"),
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([3, 4, 5], np.int32),
        logprobs=np.zeros(3, np.float32),
        raw_logprobs=np.zeros(3, np.float32),
        versions=(VersionRun(0, Version(4)),),
        finish=finish,
        turn=hop // 2,
        tags={"stage": "draft"},
    )


def episode(
    name: str, turns: tuple[Turn, ...], rewards: dict[SampleId, float | None], status: str = "finished"
) -> Episode:
    return Episode(
        episode=EpisodeId(name),
        group=GroupId(0),
        task="mul_7",
        status=EpisodeStatus(status),
        turns=turns,
        rewards=rewards,
    )


def test_rows_are_the_trained_turns_of_finished_episodes() -> None:
    good = (turn("g0e0a0", 0, "solver"), turn("g0e0a0", 1, "judge"), turn("g0e0a0", 2, "solver"))
    cut = (turn("g0e2a0", 0, "solver", FinishReason.ABORT), turn("g0e2a0", 1, "solver", FinishReason.LENGTH))
    group = GroupRecord(
        group=GroupId(0),
        task=Task(input_id="mul_7", prompt="7*8"),
        step=3,
        episodes=(
            episode("g0e0a0", good, {good[0].sample_id: 1.0}),
            episode("g0e1a0", (turn("g0e1a0", 0, "solver"),), {}, "failed"),
            episode("g0e2a0", cut, {cut[1].sample_id: 0.0}),
        ),
    )
    rows = credit_rows(group, {PolicyName("solver-policy")})
    assert [(row.sample_id, row.reward) for row in rows] == [
        ("mul_7_0_g0e0a0", 1.0),
        ("mul_7_2_g0e0a0", None),
        ("mul_7_1_g0e2a0", 0.0),
    ]
    assert (rows[1].task, rows[1].episode, rows[1].hop, rows[1].num_tokens) == ("mul_7", "g0e0a0", 2, 3)
    assert (rows[1].turn, rows[1].policy_version, rows[1].tags) == (1, 4, {"stage": "draft"})


def only_row(*turns: Turn, untrained: tuple[FinishReason, ...] = (), **fields):
    """The row of the last turn of an episode."""
    played = replace(episode("g0e0a0", turns, {turns[-1].sample_id: 1.5}), **fields)
    group = GroupRecord(group=GroupId(0), task=Task(input_id="mul_7", prompt="7*8"), step=3, episodes=(played,))
    return credit_rows(group, {PolicyName("solver-policy")}, untrained)[-1]


def test_a_row_has_the_parts_of_its_reward_and_what_was_found_in_the_call() -> None:
    turns = (turn("g0e0a0", 0, "solver"), turn("g0e0a0", 1, "solver"))
    last = turns[1].sample_id
    row = only_row(
        *turns,
        call_rewards={last: {"style": 0.5}},
        parts={last: {"outcome": 1.0, "style": 0.5}},
        signals={last: {"tool_error": 1.0}},
    )
    assert (row.reward, row.outcome, row.act_reward, row.act_outcome) == (1.5, 1.0, 0.5, None)
    assert (dict(row.parts), dict(row.signals)) == ({"outcome": 1.0, "style": 0.5}, {"tool_error": 1.0})
    assert only_row(*turns, parts={last: {"outcome": 1.5}}).outcome is None, "the outcome is the whole reward"
    assert only_row(*turns, parts={last: {"right": 1.0, "style": 0.5}}).outcome is None, "no part is the outcome"


def test_a_row_knows_what_of_its_outcome_it_was_given_itself() -> None:
    turns = (turn("g0e0a0", 0, "solver"), turn("g0e0a0", 1, "solver"))
    last = turns[1].sample_id
    alone = only_row(*turns, call_rewards={last: {"right": 1.5}}, parts={last: {"right": 1.5}})
    shared = only_row(*turns, call_rewards={last: {"outcome": 0.25}}, parts={last: {"outcome": 1.0, "style": 0.5}})
    assert (alone.act_outcome, shared.act_outcome) == (1.5, 0.25)
    assert only_row(*turns, parts={last: {"outcome": 1.5}}).act_outcome is None


def test_a_row_says_if_its_call_was_valid_and_if_its_play_was_greedy() -> None:
    marked = only_row(replace(turn("g0e0a0", 5, "solver"), valid=False, purpose=Purpose.GREEDY))
    bare = only_row(turn("g0e0a0", 0, "solver"))
    assert (marked.valid, marked.greedy) == (False, True)
    assert (bare.valid, bare.greedy) == (True, False)


def test_a_row_has_all_calls_of_its_episode_those_of_frozen_policies_too() -> None:
    first = turn("g0e0a0", 0, "solver")
    judged = replace(turn("g0e0a0", 1, "judge"), after=(0,))
    longer = replace(
        turn("g0e0a0", 3, "solver"),
        prompt_ids=np.arange(9, dtype=np.int32),
        parent=first.sample_id,
        after=(0, 1),
        tool_s=0.5,
    )
    assert only_row(first, judged, longer).calls == (
        GraphCall(hop=0, new_prompt_tokens=2, num_tokens=3),
        GraphCall(hop=1, after=(0,), new_prompt_tokens=2, num_tokens=3),
        GraphCall(hop=3, after=(0, 1), new_prompt_tokens=9 - (2 + 3), num_tokens=3, tool_s=0.5),
    )


def test_a_finish_that_does_not_train_is_a_row_all_the_same() -> None:
    cut = turn("g0e0a0", 0, "solver", FinishReason.LENGTH)
    assert only_row(cut).trains
    assert not only_row(cut, untrained=(FinishReason.LENGTH,)).trains
