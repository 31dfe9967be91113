"""Settings of the cluster: where a run's residents live."""

from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings


class ClusterSettings(Settings):
    """The world that a run is played in; the same config runs in each of them."""

    backend: Literal["inline", "ray", "simulated"] = Field(
        default="inline",
        description="inline: everything in this process; ray: every engine and trainer is a process of its own; "
        "simulated: modelled devices in virtual time, for `flexmarl simulate`.",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="cpu, cuda or cuda:N; ray: cpu or cuda, a device for each process.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of one torch operation; null: all cores inline, one in each process of ray.",
    )
    address: str = Field(
        default="local",
        pattern=r"^(local|.+:\d+)$",
        description="ray: local starts a private Ray for this run; host:port joins one that runs on this machine.",
    )
