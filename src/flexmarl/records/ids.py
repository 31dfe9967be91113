"""Names and identifiers: plain strings and integers with a meaning. WorkerLost: the record of a process that died."""

import re
from dataclasses import dataclass
from typing import NewType

AgentName = NewType("AgentName", str)
PolicyName = NewType("PolicyName", str)
EpisodeId = NewType("EpisodeId", str)
SampleId = NewType("SampleId", str)
GroupId = NewType("GroupId", int)
"""Admission number of a group, from 0, in the order of submission; a replayed group keeps it."""
Version = NewType("Version", int)
"""How many updates a policy has had: 0 is the model it started from."""

Scalar = str | int | float | bool
"""Type of a tag, or of a value in a small data column."""


def make_trajectory_id(group: int, index: int, attempt: int) -> str:
    """Id of one play of a task: `g{admission id}e{index in the group}a{attempt}`, e.g. `g12e3a0`.

    A replayed group has a higher attempt, so its rows never collide with those of the play it replaces.
    """
    return f"g{group}e{index}a{attempt}"


def split_trajectory_id(trajectory_id: str) -> tuple[int, int, int]:
    """(group, index in the group, attempt) of a trajectory id. Raises ValueError for any other text.

    >>> split_trajectory_id("g12e3a0")
    (12, 3, 0)
    """
    match = re.fullmatch(r"g(\d+)e(\d+)a(\d+)", trajectory_id, re.ASCII)
    if match is None:
        raise ValueError(f"trajectory id must look like 'g12e3a0', got {trajectory_id!r}")
    group, index, attempt = map(int, match.groups())
    return group, index, attempt


def make_sample_id(input_id: str, hop: int, trajectory_id: str) -> SampleId:
    """`{input_id}_{turn}_{trajectory_id}` (FlexMARL section 4.2); `hop` numbers the calls of the episode from 0.

    >>> make_sample_id("mul-7", 2, "g12e3a0")
    'mul-7_2_g12e3a0'
    """
    return SampleId(f"{input_id}_{hop}_{trajectory_id}")


def split_sample_id(sample_id: str) -> tuple[str, int, str]:
    """(input id, hop, trajectory id) of a sample id; the input id may itself contain underscores."""
    input_id, hop, trajectory_id = sample_id.rsplit("_", 2)
    return input_id, int(hop), trajectory_id


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker's process died without being stopped."""

    name: str
    """Name of the worker, e.g. `engine/solver/0` or `trainer/solver`."""
    node: str
    pid: int
    because: str
