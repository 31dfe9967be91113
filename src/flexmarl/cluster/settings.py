"""Where a run's workers live."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class InlineCluster(BaseModel):
    """Everything in this process, on one device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["inline"] = "inline"
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N.")
    threads: int | None = Field(default=None, ge=1, description="Threads of one torch operation; default: all cores.")


class RayCluster(BaseModel):
    """Workers as Ray actors, on one machine or many; rollout and training hold separate device pools."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["ray"] = "ray"
    address: str = Field(
        default="local",
        pattern=r"^(local|.+:\d+)$",
        description="local starts a private Ray; else host:port of a cluster.",
    )
    nodes: int = Field(default=1, ge=1, description="Machines.")
    device: Literal["cpu", "cuda"] = Field(default="cuda", description="What a worker computes on.")
    rollout_devices: int = Field(default=1, ge=1, description="Devices of the rollout pool, over all nodes.")
    training_devices: int = Field(default=1, ge=1, description="Devices of the training pool, over all nodes.")


ClusterSettings = Annotated[InlineCluster | RayCluster, Field(discriminator="type")]
