"""The fake cluster keeps the laws that a real one keeps."""

import asyncio

from flexmarl.cluster.interface import Worker
from flexmarl.testing.cluster import InProcessCluster, InProcessWorker, check_cluster


def kill(worker: Worker) -> None:
    assert isinstance(worker, InProcessWorker)
    worker.die()


def test_workers_of_this_process_keep_the_laws_of_a_cluster() -> None:
    asyncio.run(check_cluster(InProcessCluster(), kill))
