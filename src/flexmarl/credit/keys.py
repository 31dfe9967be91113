"""Decides which rows form a group: rows with equal values of the tags in a key."""

from collections.abc import Mapping, Sequence
from typing import Literal

from flexmarl.credit.interface import CreditRow, GroupKey
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, Scalar

Requirement = Literal["one_task", "one_policy", "one_context"]
REQUIRED_TAG: Mapping[Requirement, str] = {"one_task": "task", "one_policy": "policy", "one_context": "context_hash"}
"""The tag that has one value in every group, for each requirement."""

Group = tuple[tuple[str, Scalar], ...]
"""The tags of a group and their values, e.g. (("task", "u0"), ("agent", "solver"))."""


def group_name(group: Group) -> str:
    """For people, e.g. `task=u0, agent=solver`."""
    return ", ".join(f"{tag}={value}" for tag, value in group)


def group_rows(
    rows: Sequence[CreditRow], key: GroupKey, require: Sequence[Requirement] = ("one_task",)
) -> dict[Group, list[CreditRow]]:
    """The groups, in the order of their first rows; rows keep their order. Raises CreditError naming a bad group."""
    groups: dict[Group, list[CreditRow]] = {}
    for row in rows:
        groups.setdefault(tuple((tag, row.tag(tag)) for tag in tags_for(row.agent, key)), []).append(row)
    for group, members in groups.items():
        for requirement in require:
            values = {row.tag(REQUIRED_TAG[requirement]) for row in members}
            if len(values) > 1:
                shown = ", ".join(sorted(map(str, values))[:4])
                raise CreditError(
                    f"group ({group_name(group)}) breaks {requirement}: its rows have {len(values)} values of "
                    f"'{REQUIRED_TAG[requirement]}' ({shown}); add '{REQUIRED_TAG[requirement]}' to the key"
                )
    return groups


def also(key: GroupKey, tag: str) -> GroupKey:
    """The key with one more tag, for every agent that it names."""
    if isinstance(key, Mapping):
        return {agent: (*tags, tag) for agent, tags in key.items()}
    return (*key, tag)


def tags_for(agent: AgentName, key: GroupKey) -> tuple[str, ...]:
    """What the rows of an agent are grouped by."""
    if not isinstance(key, Mapping):
        return key
    tags = key.get(agent, key.get("*"))
    if tags is None:
        raise CreditError(f"no key for agent {agent}: there are keys for {', '.join(sorted(key))}; add it, or '*'")
    return tags
