"""Decides which turns of a group take part in credit, and what credit sees of them."""

from collections.abc import Collection, Mapping

from flexmarl.credit.interface import Call, CreditRow
from flexmarl.records import AnyTurn, Episode, FinishReason, GroupRecord, PolicyName, SampleId, Task, split_sample_id

FAILED = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""The system ended these calls, not the policy."""


def credit_rows(
    group: GroupRecord, trained: Collection[PolicyName], untrained_finish: Collection[FinishReason] = ()
) -> tuple[CreditRow, ...]:
    """One row per turn that a trained policy sampled to its end in a finished episode; failed episodes give none.

    A turn that the workflow gave no reward keeps None: the estimator refuses it. One that ended for a reason in
    `untrained_finish` is a row that does not train.
    """
    rows: list[CreditRow] = []
    for episode in filter(lambda play: play.finished, group.plays):
        turns = {turn.sample_id: turn for turn in episode.turns}
        calls = tuple(_call(turn, turns) for turn in episode.turns)
        for turn in episode.turns:
            if turn.policy in trained and turn.finish not in FAILED:
                trains = turn.finish not in untrained_finish
                rows.append(_row(group.task, episode, turn, calls, trains=trains))
    return tuple(rows)


def _row(task: Task, episode: Episode, turn: AnyTurn, calls: tuple[Call, ...], *, trains: bool) -> CreditRow:
    reward, parts, tags = episode.rewards.get(turn.sample_id), episode.parts.get(turn.sample_id, {}), turn.tags
    own = episode.call_rewards.get(turn.sample_id, {})
    act_reward, several = sum(own.values(), 0.0), len(parts) > 1 and "outcome" in parts
    return CreditRow(
        sample_id=turn.sample_id,
        task=task.input_id,
        episode=episode.episode,
        agent=turn.agent,
        policy=turn.policy,
        hop=split_sample_id(turn.sample_id)[1],
        reward=reward,
        num_tokens=turn.num_tokens,
        outcome=parts["outcome"] if several else None,
        act_reward=act_reward,
        act_outcome=own.get("outcome") if several or not own else act_reward,
        parts=parts,
        objectives=parts,
        signals=episode.signals.get(turn.sample_id, {}),
        valid=bool(tags.get("valid", True)),
        trains=trains,
        greedy=bool(tags.get("greedy", False)),
        calls=calls,
        tags={"policy_version": turn.version, **tags},
    )


def _call(turn: AnyTurn, turns: Mapping[SampleId, AnyTurn]) -> Call:
    parent = turns.get(turn.parent) if turn.parent else None
    held = parent.num_prompt_tokens + parent.num_tokens if parent else 0
    return Call(
        hop=split_sample_id(turn.sample_id)[1],
        after=tuple(int(hop) for hop in str(turn.tags.get("after", "")).split(",") if hop),
        new_prompt_tokens=turn.num_prompt_tokens - held,
        num_tokens=turn.num_tokens,
        tool_s=float(turn.tags.get("tool_s", 0.0)),
    )
