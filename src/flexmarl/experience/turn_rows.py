"""Decides how a turn becomes a row and a row a turn: training reads, bit for bit, what rollout wrote.

response_row    after the call       opens the row with the whole turn
prompt_row      after the episode    opens the row of a call without an answer: it can be read, but is never trained
closing_row     after the episode    sets the reward; a missing reward is a missing column, never 0.0
open_row        after the episode    sets score and credit group, where rows are trained before their group is complete
credit_row      with the group       sets advantage and weight; the row is then settled READY, if it is not so already
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from flexmarl.errors import StoreError
from flexmarl.experience.interface import Column, ColumnKind, Extended, PartialRow, Row
from flexmarl.records import (
    CreditedTurn,
    EpisodeId,
    FinishReason,
    IntArray,
    PolicyName,
    Purpose,
    Sample,
    SampleId,
    Turn,
    Version,
    VersionRun,
    split_sample_id,
)

TURN_COLUMNS = (
    Column("prompt_ids", ColumnKind.TENSOR),
    Column("call", ColumnKind.INT),  # from here on to `tags`: fields of records.SentCall
    Column("act_hop", ColumnKind.INT),
    Column("turn", ColumnKind.INT),
    Column("branch", ColumnKind.WORD),
    Column("path", ColumnKind.JSON),  # only in a tree of turns
    Column("context_hash", ColumnKind.WORD),
    Column("after", ColumnKind.JSON),  # only after other calls
    Column("tool_s", ColumnKind.FLOAT),
    Column("purpose", ColumnKind.WORD),
    Column("tags", ColumnKind.JSON),  # the workflow's own
    Column("valid", ColumnKind.BOOL),
    Column("parent", ColumnKind.TEXT),  # "" for a turn that extends no other
    Column("response_ids", ColumnKind.TENSOR),
    Column("logprobs", ColumnKind.TENSOR),
    Column("raw_logprobs", ColumnKind.TENSOR),
    Column("version_runs", ColumnKind.JSON),  # [[start, version], ...]
    Column("finish", ColumnKind.TEXT),
    Column("text", ColumnKind.TEXT),
    Column("reward", ColumnKind.FLOAT),
    Column("parts", ColumnKind.JSON),  # of the reward, if the workflow gave other parts than `outcome`
    Column("signals", ColumnKind.JSON),  # only if one was found
    Column("shaped", ColumnKind.JSON),  # parts of the reward that credit used, if terms changed them
    Column("advantage", ColumnKind.FLOAT),
    Column("weight", ColumnKind.FLOAT),
    Column("episode_tokens", ColumnKind.FLOAT),
    Column("advantages", ColumnKind.TENSOR),  # these three are per token, and set only if an estimator gives them
    Column("returns", ColumnKind.TENSOR),
    Column("values", ColumnKind.TENSOR),
    Column("score", ColumnKind.FLOAT),  # these two are set only where rows are trained before their group is complete
    Column("open_group", ColumnKind.TEXT),
)
"""The data columns of every agent's table; a run may add its own."""

BY_VALUE = ("call", "act_hop", "turn", "branch", "context_hash", "tool_s", "purpose", "valid")
LISTS = ("path", "after")
"""Fields of a Turn that are tuples. The column of an empty one is missing."""
PER_TOKEN = ("advantages", "returns", "values")
"""Fields of a Sample with one value per token; few estimators give them."""


def prompt_row(
    sample_id: SampleId, policy: PolicyName, prompt_ids: IntArray, *, parent: SampleId | None = None
) -> PartialRow:
    """Opens the row of a call without an answer. A turn that is put later must have the same prompt and parent."""
    return PartialRow(sample_id=sample_id, policy=policy, values={"prompt_ids": _prompt(prompt_ids, parent)})


def response_row(turn: Turn) -> PartialRow:
    """Opens the row of a turn as the engine sampled it. The row's version is the one that began the turn."""
    if turn.episode != split_sample_id(turn.sample_id)[2]:
        raise StoreError(f"turn {turn.sample_id!r} says it is of episode {turn.episode!r}; its id names another")
    values = {
        "prompt_ids": _prompt(turn.prompt_ids, turn.parent),
        **{name: getattr(turn, name) for name in BY_VALUE if getattr(turn, name) is not None},
        **{name: list(getattr(turn, name)) for name in LISTS if getattr(turn, name)},
        "tags": dict(turn.tags),
        "parent": turn.parent or "",
        "response_ids": turn.response_ids,
        "logprobs": turn.logprobs,
        "raw_logprobs": turn.raw_logprobs,
        "version_runs": [[run.start, run.version] for run in turn.versions],
        "finish": turn.finish,
        "text": turn.text,
    }
    return PartialRow(sample_id=turn.sample_id, policy=turn.policy, values=values, version=turn.version)


def closing_row(
    sample_id: SampleId,
    policy: PolicyName,
    *,
    reward: float | None,
    parts: Mapping[str, float] = MappingProxyType({}),
    signals: Mapping[str, float] = MappingProxyType({}),
    next_agent_id: int | None = None,
) -> PartialRow:
    """Sets what is known at the end of the episode: the reward, if the workflow gave one, and the next agent.

    `next_agent_id` is the index of that agent in the team's order; None after the last turn. `parts` add up to the
    reward. Those of a reward that is all `outcome`, and signals of 0, are not stored.
    """
    values: dict[str, Any] = {} if reward is None else {"reward": reward}
    if parts.keys() - {"outcome"}:
        values["parts"] = dict(parts)
    if found := {name: value for name, value in signals.items() if value}:
        values["signals"] = found
    return PartialRow(sample_id=sample_id, policy=policy, values=values, next_agent_id=next_agent_id)


def credit_row(sample: CreditedTurn) -> PartialRow:
    """Sets what credit computed for a turn. `episode_tokens` must be given: a row does not know its episode later."""
    values = {"advantage": sample.advantage, "weight": sample.weight, "episode_tokens": sample.episode_tokens}
    values |= {name: getattr(sample, name) for name in PER_TOKEN if getattr(sample, name) is not None}
    if sample.shaped:
        values["shaped"] = dict(sample.shaped)
    return PartialRow(sample_id=sample.turn.sample_id, policy=sample.turn.policy, values=values)


def open_row(sample: CreditedTurn) -> PartialRow:
    """Sets the score and the credit group of a turn whose credit group is not complete."""
    values = {"score": sample.advantage, "open_group": sample.open_group}
    return PartialRow(sample_id=sample.turn.sample_id, policy=sample.turn.policy, values=values)


def turn_from_row(row: Row) -> Turn:
    """Reads the turn that `response_row` wrote. Raises StoreError if the response is missing."""
    values = row.values
    try:
        return Turn(
            sample_id=row.sample_id,
            episode=EpisodeId(split_sample_id(row.sample_id)[2]),
            agent=row.agent,
            policy=row.policy,
            prompt_ids=values["prompt_ids"],
            response_ids=values["response_ids"],
            logprobs=values["logprobs"],
            raw_logprobs=values["raw_logprobs"],
            versions=tuple(VersionRun(start, Version(version)) for start, version in values["version_runs"]),
            finish=FinishReason(values["finish"]),
            text=values["text"],
            parent=values["parent"] or None,
            call=values["call"],
            act_hop=values.get("act_hop"),
            turn=values["turn"],
            branch=values["branch"],
            path=tuple(values.get("path", ())),
            context_hash=values["context_hash"],
            after=tuple(values.get("after", ())),
            tool_s=values["tool_s"],
            purpose=Purpose(values["purpose"]),
            tags=values["tags"],
            valid=values["valid"],
        )
    except KeyError as missing:
        raise _lacks(row, missing.args[0]) from None


def sample_from_row(row: Row) -> Sample:
    """Reads a row as training sees it. Raises StoreError if a column that it needs is missing.

    It needs the turn, `reward`, `advantage`, `weight` and `episode_tokens`. A row whose credit group is not complete
    has `score` and `open_group` in place of the last three: the sample's `advantage` is then the score.
    """
    if "open_group" in row.values and "advantage" not in row.values:
        score, group = _value(row, "score"), _value(row, "open_group")
        return Sample(turn=turn_from_row(row), advantage=score, open_group=group, reward=_value(row, "reward"))
    return Sample(
        turn=turn_from_row(row),
        advantage=_value(row, "advantage"),
        weight=_value(row, "weight"),
        reward=_value(row, "reward"),
        episode_tokens=_value(row, "episode_tokens"),
        **{name: row.values[name] for name in PER_TOKEN if name in row.values},
    )


def _prompt(prompt_ids: IntArray, parent: SampleId | None) -> IntArray | Extended:
    """The prompt, as an extension of its parent if it has one.

    The prompts of a conversation's n calls are then stored once, not n times.
    """
    return prompt_ids if parent is None else Extended(parent, ("prompt_ids", "response_ids"), prompt_ids)


def _value(row: Row, column: str) -> Any:
    if column not in row.values:
        raise _lacks(row, column)
    return row.values[column]


def _lacks(row: Row, column: str) -> StoreError:
    return StoreError(
        f"table {row.agent!r}, row {row.sample_id!r} ({row.state}) has no {column}; there are: "
        f"{', '.join(row.values) or 'none'}"
    )
