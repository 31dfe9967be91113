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
        roles = given.get("episode_roles", ()) if isinstance(given, dict) else None
        # Roles that are no names are refused by their own field.
        if not isinstance(roles, list | tuple) or not all(isinstance(role, str) for role in roles) or "key" in given:
            return given
        return {**given, "key": {**dict.fromkeys(roles, ("episode", "agent")), "*": ("task", "agent")}}
