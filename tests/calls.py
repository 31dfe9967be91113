"""Events for tests that need one and care for few of its fields."""

from typing import Any

from flexmarl.events.serving_events import Called
from flexmarl.records import FinishReason, InstanceId, Version, WorkerId


def a_call(
    instance: str = "solver/0", *, began: float, ended: float, trajectory: str = "g0e0a0", **fields: Any
) -> Called:
    """An answered call of the first turn of a trajectory.

    >>> a_call("solver/0", began=1.0, ended=3.0, sampled_tokens=7).computed_tokens
    5
    """
    served = InstanceId.parse(instance)
    of_a_call: dict[str, Any] = {
        "version": Version(0),
        "prompt_tokens": 5,
        "reused_tokens": 0,
        "sampled_tokens": 9,
        "finish": FinishReason.STOP,
    }
    return Called(
        t=ended,
        process=WorkerId.engine(served),
        began=began,
        ended=ended,
        policy=served.policy,
        request=f"task_0_{trajectory}",
        **of_a_call | fields,
    )
