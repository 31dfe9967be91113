"""Only what a trained policy sampled to its end, in a finished episode, is credited."""

import numpy as np

from flexmarl.credit import credit_rows
from flexmarl.records import (
    AgentName,
    Episode,
    EpisodeId,
    EpisodeStatus,
    FinishReason,
    GroupId,
    GroupRecord,
    PolicyName,
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
        tags={"turn": hop // 2},
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
    assert rows[1].tags == {"turn": 1, "policy_version": 4}
