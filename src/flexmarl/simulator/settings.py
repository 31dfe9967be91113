"""Settings of `cluster.backend=simulated`: costs, replies, tools.

In other worlds, engines of type `timed` answer by its costs of engines and its replies; nothing else is read there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field

from flexmarl.agents import ChatRenderer
from flexmarl.analysis.costs import (
    PROFILES,
    CostSettings,
    EngineCosts,
    SharedHost,
    TransferCosts,
    costs_of,
    with_profile,
)
from flexmarl.records import AgentName, PolicyName
from flexmarl.settings import Settings
from flexmarl.simulator.plan import Distribution
from flexmarl.simulator.replies import AnyReplies, DrawnRewards, Responder, responder_by_agent
from flexmarl.simulator.tool_twins import ToolTwin


class EngineModel(NamedTuple):
    """The model of one policy's engines: their times, and their answers."""

    costs: EngineCosts
    respond: Responder


class SimulationSettings(Settings):
    """The simulated devices of a run."""

    costs: Mapping[str, Annotated[CostSettings, BeforeValidator(with_profile)]] = Field(
        default={},
        description="What devices take, by policy; `default` for those that are not named. A profile's name "
        f"({', '.join(PROFILES)}), or a mapping that may name one: `{{profile: paper_14b, engine: {{slots: 8}}}}`.",
    )
    shared_host: SharedHost = SharedHost()
    replies: Mapping[str, AnyReplies] = Field(
        default={}, description="What agents answer, by agent; `default` for those that are not named."
    )
    rewards: DrawnRewards | None = Field(
        default=None,
        description="Rewards drawn by lot, for replies without meaning; null: the rewards that the workflow gives.",
    )
    tools: Mapping[str, ToolTwin] = Field(
        default={}, description="Models of tools, by the name that agents call; one that only computes needs none."
    )
    score_s: Distribution | None = Field(
        default=None,
        description="What a score takes that needs a box: a number, or a distribution. It is computed for real, while "
        "virtual time stands still. null: tasks with such a scorer are refused.",
    )
    nodes: int = Field(
        default=1, ge=1, description="Nodes that engines and trainers are spread over; a plan of faults may lose one."
    )
    room: int = Field(
        default=0, ge=0, description="Modelled engines that have room beyond the configured ones, for `balance.grow`."
    )
    transfers: TransferCosts = TransferCosts()
    restart_s: float = Field(
        default=0.0, ge=0, description="Starting the run again after a loss that ends it, before it goes on."
    )
    recorded: Path | None = Field(
        default=None, description="Run folder whose replies are replayed, by agents without replies of their own."
    )

    def engine_model(self, policy: PolicyName, renderers: Mapping[AgentName, ChatRenderer], base: Path) -> EngineModel:
        """Returns the model of a policy's engines. `renderers` are those of its agents.

        `base` is the folder that `recorded` starts from. Raises ConfigError that names an agent without replies.
        """
        recorded = None if self.recorded is None else base / self.recorded.expanduser()
        respond = responder_by_agent(renderers, self.replies, recorded=recorded)
        return EngineModel(costs_of(self.costs, policy).engine, respond)
