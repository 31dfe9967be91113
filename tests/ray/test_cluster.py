"""Workers on a real Ray: the laws of a cluster, and that nothing outlives a run."""

import asyncio
import os
import signal

import pytest

from flexmarl.cluster.backends.ray import RayCluster
from flexmarl.cluster.interface import Worker
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.testing.cluster import check_cluster

pytestmark = pytest.mark.ray


def kill(worker: Worker) -> None:
    os.kill(worker.place.pid, signal.SIGKILL)


def test_ray_workers_keep_the_laws_of_a_cluster() -> None:
    async def play() -> None:
        with RunLeases("conformance") as leases:
            async with RayCluster(ClusterSettings(backend="ray"), leases=leases, workers=3) as cluster:
                await check_cluster(cluster, kill)

    asyncio.run(play())
