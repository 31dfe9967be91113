"""Decides advantages for teams in which some agents play several times an episode, and others once."""

from typing import Any, Literal

from pydantic import model_validator

from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.records import AgentName


class Hierarchical(GroupRelative):
    """A proposer's turns are compared across the task, those of its solvers inside the episode of their proposal."""

    type: Literal["hierarchical"] = "hierarchical"
    episode_roles: tuple[AgentName, ...] = ()
    """Agents compared inside their episode; `key` follows from it, unless it is given."""

    @model_validator(mode="before")
    @classmethod
    def _key_follows_from_roles(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "key" in given:
            return given
        inside = dict.fromkeys(given.get("episode_roles", ()), ("episode", "agent"))
        return {**given, "key": {**inside, "*": ("task", "agent")}}
