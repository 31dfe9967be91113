"""Settings of rollout: how many episodes play at once, and how long one may take."""

from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings


class RolloutSettings(Settings):
    """Parallel sampling of FlexMARL section 5.1; its defaults are the paper's."""

    inter_query: int = Field(default=4, ge=1, description="Groups (tasks) that play at the same time.")
    intra_query: int = Field(default=16, ge=1, description="Episodes of one group that play at the same time.")
    workers: int = Field(
        default=0,
        ge=0,
        description="Processes that play episodes: workflows, tools and tokenisers run there. 0: in the controller. It "
        "counts with `cluster.backend: ray`; the other backends play in the controller.",
    )
    order: Literal["free", "lockstep"] = Field(
        default="free",
        description="free: a call is sent when its inputs exist; lockstep: the episodes of a group take their turns "
        "together, one agent after another, as frameworks without asynchronous rollout do (a baseline).",
    )
    episode_timeout_s: float = Field(default=600.0, gt=0, description="An episode that takes longer ends as timed out.")
    cancel_grace_s: float = Field(
        default=3.0,
        gt=0,
        description="How long a workflow may take to end after its episode's time limit; one that continues is "
        "abandoned: nothing of it runs any more.",
    )
    call_timeout_s: float = Field(default=300.0, gt=0, description="One LLM call that takes longer is aborted.")
    tool_calls_at_once: int | None = Field(
        default=None,
        ge=1,
        description="Tool calls that run at the same time, of all episodes together, those of evaluations included; "
        "others wait, and their episodes' time goes on. null: no bound. See also `max_parallel` of a tool.",
    )
    group_retries: int = Field(
        default=1,
        ge=0,
        description="How often a group without any finished episode is played again; with `pipeline.late: requeue` "
        "also a task whose group was late.",
    )
