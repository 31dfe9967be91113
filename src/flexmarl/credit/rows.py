"""Decides which turns take part in credit, which calls form an act, which rows form a group, and which are samples.

`credit_rows`     makes a row of every turn of a group that takes part
`led`             gives the later calls of an act the context of its first call
`means_of_acts`   averages over the calls of each act
`group_rows`      groups rows with equal values of the columns and tags in a key
`samples_of`      makes a sample of every turn to which credit gave a weight

An act is one `seat.act`: a call, and those that continue it after a tool or a stop string. The prompts of the later
calls are unique, so their own contexts would compare them with no other row:

    act 0   call 0   branch 0   context of the turn          act 3   call 3   branch 0   context of the turn
            call 1   branch 0:1 with the tool's output               call 4   branch 0:2 with the tool's output
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit.interface import Credit, CreditRow, GraphCall, GroupKey, Tokens
from flexmarl.errors import CreditError
from flexmarl.records import (
    AgentName,
    AnyTurn,
    CreditedTurn,
    Episode,
    EpisodeId,
    FinishReason,
    GroupRecord,
    PolicyName,
    Purpose,
    SampleId,
    Scalar,
    Task,
)

FAILED = frozenset({FinishReason.ABORT, FinishReason.ERROR})
"""Finish reasons of calls that the system ended, not the policy."""
NO_WEIGHT = "weight 0: nothing was sampled, or there is nothing to compare with"
"""Why a row that was credited is not trained on."""


def credit_rows(
    group: GroupRecord, trained: Collection[PolicyName], untrained_finish: Collection[FinishReason] = ()
) -> tuple[CreditRow, ...]:
    """One row per turn that a trained policy sampled to its end in a finished episode. Failed episodes give no rows.

    A turn without a reward keeps None, which the estimator refuses. A turn that ended for a reason in
    `untrained_finish` becomes a row that does not train.
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


def _row(task: Task, episode: Episode, turn: AnyTurn, calls: tuple[GraphCall, ...], *, trains: bool) -> CreditRow:
    reward, parts = episode.rewards.get(turn.sample_id), episode.parts.get(turn.sample_id, {})
    own = episode.call_rewards.get(turn.sample_id, {})
    act_reward, several = sum(own.values(), 0.0), len(parts) > 1 and "outcome" in parts
    return CreditRow(
        sample_id=turn.sample_id,
        task=task.input_id,
        episode=episode.episode,
        agent=turn.agent,
        policy=turn.policy,
        hop=turn.hop,
        reward=reward,
        num_tokens=turn.num_tokens,
        outcome=parts["outcome"] if several else None,
        act_reward=act_reward,
        act_outcome=own.get("outcome") if several or not own else act_reward,
        parts=parts,
        objectives=parts,
        signals=episode.signals.get(turn.sample_id, {}),
        valid=turn.valid,
        trains=trains,
        greedy=turn.purpose is Purpose.GREEDY,
        calls=calls,
        group=episode.group,
        call=turn.call,
        act_hop=turn.act_hop,
        turn=turn.turn,
        branch=turn.branch,
        path=turn.path,
        context_hash=turn.context_hash,
        policy_version=turn.version,
        tags=turn.tags,
    )


def _call(turn: AnyTurn, turns: Mapping[SampleId, AnyTurn]) -> GraphCall:
    parent = turns.get(turn.parent) if turn.parent else None
    held = parent.num_prompt_tokens + parent.num_tokens if parent else 0
    return GraphCall(
        hop=turn.hop,
        after=turn.after,
        new_prompt_tokens=turn.num_prompt_tokens - held,
        num_tokens=turn.num_tokens,
        tool_s=turn.tool_s,
    )


def led(rows: Sequence[CreditRow]) -> list[CreditRow]:
    """The rows, where later calls of an act have branch and context of its first call, if that is among the rows."""
    first = {_act_of(row): row for row in rows if row.act == row.hop}
    found: list[CreditRow] = []
    for row in rows:
        lead = first.get(_act_of(row), row)
        found.append(row if lead is row else replace(row, branch=lead.branch, context_hash=lead.context_hash))
    return found


def places_of_acts(rows: Sequence[CreditRow]) -> list[list[int]]:
    """For each act, the indices of its calls in `rows`. Acts are in the order of their first calls."""
    places: dict[tuple[EpisodeId, Scalar], list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(_act_of(row), []).append(place)
    return list(places.values())


def means_of_acts(rows: Sequence[CreditRow], x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """([K] the mean of x [N] over the calls of each act, [N] the index of each row's act)."""
    acts = places_of_acts(rows)
    means = np.array([x[places[0]] if x[places].min() == x[places].max() else x[places].mean() for places in acts])
    numbers = np.zeros(len(rows), np.intp)
    for number, places in enumerate(acts):
        numbers[places] = number
    return means, numbers


def _act_of(row: CreditRow) -> tuple[EpisodeId, Scalar]:
    return row.episode, row.act


Requirement = Literal["one_task", "one_policy", "one_context"]
REQUIRED: Mapping[Requirement, str] = {"one_task": "task", "one_policy": "policy", "one_context": "context_hash"}
"""The column that must have one value in every group, for each requirement."""

Group = tuple[tuple[str, Scalar], ...]
"""The columns and tags of a group and their values, e.g. (("task", "u0"), ("agent", "solver"))."""


def group_name(group: Group) -> str:
    """The group as text, e.g. `task=u0, agent=solver`."""
    return ", ".join(f"{tag}={value}" for tag, value in group)


def group_rows(
    rows: Sequence[CreditRow], key: GroupKey, require: Sequence[Requirement] = ("one_task",)
) -> dict[Group, list[CreditRow]]:
    """The groups, in the order of their first rows; rows keep their order.

    Raises CreditError for a group that breaks a requirement.
    """
    groups: dict[Group, list[CreditRow]] = {}
    for row in rows:
        groups.setdefault(tuple((tag, row.tag(tag)) for tag in tags_for(row.agent, key)), []).append(row)
    for group, members in groups.items():
        for requirement in require:
            values = {row.tag(REQUIRED[requirement]) for row in members}
            if len(values) > 1:
                shown = ", ".join(sorted(map(str, values))[:4])
                raise CreditError(
                    f"group ({group_name(group)}) breaks {requirement}: its rows have {len(values)} values of "
                    f"'{REQUIRED[requirement]}' ({shown}); add '{REQUIRED[requirement]}' to the key"
                )
    return groups


def also(key: GroupKey, tag: str) -> GroupKey:
    """The key with one more tag, for every agent that it names."""
    if isinstance(key, Mapping):
        return {agent: (*tags, tag) for agent, tags in key.items()}
    return (*key, tag)


def tags_for(agent: AgentName, key: GroupKey) -> tuple[str, ...]:
    """Tags that the agent's rows are grouped by. Raises CreditError if the key has none for the agent."""
    if not isinstance(key, Mapping):
        return key
    tags = key.get(agent, key.get("*"))
    if tags is None:
        raise CreditError(f"no key for agent {agent}: there are keys for {', '.join(sorted(key))}; add it, or '*'")
    return tags


def samples_of(
    group: GroupRecord,
    credit: Credit,
    values: Mapping[SampleId, Tokens] = {},
    parts: Mapping[SampleId, Mapping[str, float]] = {},
    resting: Mapping[PolicyName, str] = {},
) -> tuple[Mapping[PolicyName, Sequence[CreditedTurn]], Mapping[str, Sequence[SampleId]]]:
    """The group's samples by policy, and the ids of its other turns by the reason why they are no samples.

    `values` are the critic's, if there is one. `parts` are those of the reward after all terms. `resting` has the
    reason for each policy that is not trained now, although it is at other times.
    """
    samples: dict[PolicyName, list[CreditedTurn]] = defaultdict(list)
    left_out: dict[str, list[SampleId]] = defaultdict(list)
    for episode in group.finished:
        weights = {turn.sample_id: credit.weights.get(turn.sample_id) for turn in episode.turns}
        tokens: dict[PolicyName, float] = defaultdict(float)
        for turn in episode.turns:
            tokens[turn.policy] += (weights[turn.sample_id] or 0.0) * turn.num_tokens
        for turn in episode.turns:
            weight, reward = weights[turn.sample_id], episode.rewards[turn.sample_id]
            if weight is None:
                left_out[resting.get(turn.policy, "not a trained policy's turn")].append(turn.sample_id)
            elif not weight or reward is None:
                left_out[NO_WEIGHT].append(turn.sample_id)
            else:
                sample = CreditedTurn(
                    turn=turn,
                    advantage=credit.advantages[turn.sample_id],
                    advantages=_per_token(credit.token_advantages, turn.sample_id),
                    returns=_per_token(credit.returns, turn.sample_id),
                    values=_per_token(values, turn.sample_id),
                    weight=weight,
                    reward=reward,
                    shaped=_changed(episode.parts.get(turn.sample_id, {}), parts.get(turn.sample_id, {})),
                    episode_tokens=tokens[turn.policy],
                )
                samples[turn.policy].append(sample)
    return samples, left_out


def _changed(given: Mapping[str, float], parts: Mapping[str, float]) -> Mapping[str, float]:
    """The parts after all terms, if any differs from the given ones; otherwise empty."""
    differ = parts and any(parts.get(name, 0.0) != given.get(name, 0.0) for name in {*parts, *given})
    return parts if differ else {}


def _per_token(found: Mapping[SampleId, Tokens], sample_id: SampleId) -> NDArray[np.float64] | None:
    return np.array(found[sample_id], np.float64) if sample_id in found else None
