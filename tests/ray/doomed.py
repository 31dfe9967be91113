"""A controller that a test kills: a run of two workers, one of which works, with a folder in shared memory."""

import asyncio
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import psutil

from flexmarl.cluster.backends.ray import RayCluster
from flexmarl.cluster.interface import WorkerRole, WorkerSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings


async def main(address: str, root: Path) -> None:
    """Says what there is on stdout, as JSON, when everything is up."""
    settings = ClusterSettings(backend="ray", address=address)
    with RunLeases("doomed", root=root) as leases:
        shared = leases.shared_memory()
        shared.mkdir()
        (shared / "weights").write_bytes(bytes(4096))
        async with RayCluster(settings, leases=leases, workers=2) as cluster:
            make = partial(import_module, "time")  # to sleep keeps a worker and its event loop busy, as torch does
            specs = [WorkerSpec(name=f"engine/{i}", role=WorkerRole.ENGINE, make=make) for i in range(2)]
            workers = await cluster.spawn(specs)
            processes = [process.pid for process in psutil.Process().children(recursive=True)]
            pids = {*processes, *(worker.place.pid for worker in workers)}
            print(json.dumps({"pids": sorted(pids), "paths": [str(shared), str(leases.folder)]}), flush=True)
            await workers[0].call("sleep", 600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
