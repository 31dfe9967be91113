"""Decides which turns of a group take part in credit."""

from collections.abc import Collection

from flexmarl.credit.interface import CreditRow
from flexmarl.records import FinishReason, GroupRecord, PolicyName, split_sample_id

UNTRAINABLE = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""The system ended these calls, not the policy."""


def credit_rows(group: GroupRecord, trained: Collection[PolicyName]) -> tuple[CreditRow, ...]:
    """One row per turn that a trained policy sampled to its end in a finished episode; failed episodes give none.

    A turn that the workflow gave no reward keeps None: the estimator refuses it.
    """
    return tuple(
        CreditRow(
            sample_id=turn.sample_id,
            task=group.task.input_id,
            episode=episode.episode,
            agent=turn.agent,
            policy=turn.policy,
            hop=split_sample_id(turn.sample_id)[1],
            reward=episode.rewards.get(turn.sample_id),
            num_tokens=len(turn.response_ids),
            tags={"policy_version": turn.version, **turn.tags},
        )
        for episode in group.finished
        for turn in episode.turns
        if turn.policy in trained and turn.finish not in UNTRAINABLE
    )
