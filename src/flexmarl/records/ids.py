"""Names and identifiers of agents, policies, groups, episodes, turns, instances and workers."""

import re
from typing import Any, NewType

AgentName = NewType("AgentName", str)
PolicyName = NewType("PolicyName", str)
EpisodeId = NewType("EpisodeId", str)
SampleId = NewType("SampleId", str)
GroupId = NewType("GroupId", int)
"""Number of a group, from 0, in the order of admission. A group that is played again keeps it."""
Version = NewType("Version", int)
"""Number of updates that a policy has had; 0 is the model that it started from."""

Scalar = str | int | float | bool
"""Type of a tag, or of a value in a data column of the store."""


def make_trajectory_id(group: int, index: int, attempt: int) -> str:
    """Id of one episode: `g{group}e{index in the group}a{attempt}`, e.g. `g12e3a0`.

    A group that is played again has a higher `attempt`, so its rows never collide with those of the earlier attempt.
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
    """Id of a turn: `{input_id}_{hop}_{trajectory_id}` (FlexMARL section 4.2). `hop` counts the episode's calls from 0.

    >>> make_sample_id("mul-7", 2, "g12e3a0")
    'mul-7_2_g12e3a0'
    """
    return SampleId(f"{input_id}_{hop}_{trajectory_id}")


def split_sample_id(sample_id: str) -> tuple[str, int, str]:
    """(input id, hop, trajectory id) of a sample id. The input id may contain underscores."""
    input_id, hop, trajectory_id = sample_id.rsplit("_", 2)
    return input_id, int(hop), trajectory_id


class InstanceId(str):
    """Id of an inference instance of a policy. Its text is `{policy}/{number}`. No number is used twice in a run.

    >>> InstanceId("solver", 0), InstanceId.parse("solver/0").number
    ('solver/0', 0)
    """

    __slots__ = ("number", "policy")
    policy: PolicyName
    """The policy that the instance serves under this id."""
    number: int

    def __new__(cls, policy: str, number: int) -> "InstanceId":
        """Makes an id that equals its text, as it is in files and on screens."""
        made = super().__new__(cls, f"{policy}/{number}")
        made.policy, made.number = PolicyName(policy), number
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the id by its parts, to copy it to another process."""
        return InstanceId, (self.policy, self.number)

    @classmethod
    def parse(cls, text: str) -> "InstanceId":
        """Returns the id with this text. Raises ValueError if the text is not `{policy}/{number}`."""
        policy, _, number = text.rpartition("/")
        if not (policy and number.isdecimal()):
            raise ValueError(f"an instance must look like 'solver/0', got {text!r}")
        return cls(policy, int(number))


class WorkerId(str):
    """Id of a worker of a run: `controller`, `trainer/solver`, `engine/solver/0`. It has a row on the timeline."""

    __slots__ = ("kind", "number", "policy")
    kind: str
    """`controller`, `trainer`, `engine`, or another kind of resident."""
    policy: PolicyName
    """The policy that the worker serves or trains; the number of the place for a rank; empty for the controller."""
    number: int | None
    """Number of the engine's instance, or of the rank; None for other workers."""

    def __new__(cls, kind: str, policy: str = "", number: int | None = None) -> "WorkerId":
        """Makes an id that equals its text, as it is in files and on screens."""
        parts = [kind, *([policy] if policy else []), *([] if number is None else [str(number)])]
        made = super().__new__(cls, "/".join(parts))
        made.kind, made.policy, made.number = str(kind), PolicyName(policy), number
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the id by its parts, to copy it to another process."""
        return WorkerId, (self.kind, self.policy, self.number)

    @classmethod
    def parse(cls, text: str) -> "WorkerId":
        """Returns the id with this text, e.g. from a file."""
        kind, _, rest = text.partition("/")
        policy, _, number = rest.rpartition("/")
        return cls(kind, policy, int(number)) if policy and number.isdecimal() else cls(kind, rest)

    @classmethod
    def engine(cls, instance: InstanceId) -> "WorkerId":
        """Id of the engine behind an instance."""
        return cls("engine", instance.policy, instance.number)

    @classmethod
    def trainer(cls, policy: str) -> "WorkerId":
        """Id of the trainer of a policy."""
        return cls("trainer", policy)

    @classmethod
    def rank(cls, place: int, number: int = 0) -> "WorkerId":
        """Id of a training process of a place, where policies are trained in turns."""
        return cls("rank", str(place), number)

    @property
    def instance(self) -> InstanceId:
        """The instance of an engine. Raises ValueError if the worker is no engine."""
        if self.kind != "engine" or self.number is None:
            raise ValueError(f"'{self}' is no engine of a policy, so it has no instance")
        return InstanceId(self.policy, self.number)


CONTROLLER = WorkerId("controller")
"""Id of the process that runs the loops."""
