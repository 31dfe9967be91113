"""Settings of the cluster: where a run's residents live."""

from typing import Literal

from pydantic import Field

from flexmarl.settings import Settings


class NodePool(Settings):
    """The part of a cluster's nodes that some residents may use."""

    nodes: list[str] | None = Field(
        default=None, min_length=1, description="ray: names of the nodes, as `ray status -v` has them; null: all."
    )
    devices: int | None = Field(
        default=None, ge=0, description="ray: accelerators of each node that the pool takes at most; null: all."
    )


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
        description="CPU threads of one torch operation; null: all cores inline, one in each process of ray. In a "
        "process of ray they sleep while they wait for each other, inline they spin for a moment first; the variable "
        "OMP_WAIT_POLICY says otherwise: PASSIVE is best where other programs compute on the same cores all the time.",
    )
    address: str = Field(
        default="local",
        pattern=r"^(local|.+:\d+)$",
        description="ray: local starts a private Ray for this run; host:port joins one that runs, with all its nodes.",
    )
    pools: dict[Literal["rollout", "training"], NodePool] = Field(
        default={},
        description="ray: nodes of the engines (rollout) and of the trainers (training); without: all of the Ray.",
    )
    transport: Literal["ray", "mooncake"] = Field(
        default="ray",
        description="How weights cross between nodes. ray: through Ray, nothing to install; mooncake: read from the "
        "other node's memory by Mooncake's transfer engine, quicker, and each node opens a port for it without a "
        "password (extra `mooncake`).",
    )
    node_timeout_s: float = Field(
        default=15.0,
        gt=0,
        description="ray: silence in seconds after which a node counts as lost, with all that ran on it.",
    )
