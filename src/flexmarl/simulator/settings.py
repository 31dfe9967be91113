"""What `cluster.backend=simulated` models: costs, replies, tools. Other worlds ignore it."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from flexmarl.simulator.costs import CostSettings, SharedHost


class SimulationSettings(BaseModel):
    """The simulated devices of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    costs: Mapping[str, CostSettings] = Field(
        default={}, description="What devices take, by policy; `default` for those that are not named."
    )
    shared_host: SharedHost = SharedHost()
    recorded: Path | None = Field(
        default=None, description="Run folder whose replies are replayed, e.g. one that `--fit` was given."
    )
