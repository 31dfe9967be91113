"""A controller that a test kills: a run of two workers, one of which works, with a folder in shared memory."""

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from flexmarl.cluster.backends.ray import RayCluster
from flexmarl.cluster.interface import WorkerRole, WorkerSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings


class Busy:
    """Does nothing else than to keep its process and its event loop busy, as a long torch operation does."""

    def work(self) -> None:
        """Never returns."""
        while True:
            time.sleep(0.01)


async def main(address: str, root: Path) -> None:
    """Says what there is on stdout, as JSON, when everything is up."""
    settings = ClusterSettings(backend="ray", address=address)
    with RunLeases("doomed", root=root) as leases:
        shared = leases.shared_memory()
        shared.mkdir()
        (shared / "weights").write_bytes(bytes(4096))
        async with RayCluster(settings, leases=leases, workers=2) as cluster:
            make = partial(Busy)
            specs = [WorkerSpec(name=f"engine/{i}", role=WorkerRole.ENGINE, make=make) for i in range(2)]
            workers = await cluster.spawn(specs)
            processes = [process.pid for process in psutil.Process().children(recursive=True)]
            pids = {*processes, *(worker.place.pid for worker in workers)}
            print(json.dumps({"pids": sorted(pids), "paths": [str(shared), str(leases.folder)]}), flush=True)
            await workers[0].call("work")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
