"""A controller that a test kills: a run of two residents, one of which works, with a folder in shared memory."""

import asyncio
import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

import psutil

from flexmarl.cluster.backends.ray import ray_cluster
from flexmarl.cluster.interface import ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.records import WorkerId


class Sleeps(Protocol):
    """What lives in its residents."""

    async def sleep(self, seconds: float) -> None:
        """Sleeps."""
        ...


async def main(address: str, root: Path) -> None:
    """Says what there is on stdout, as JSON, when everything is up."""
    settings = ClusterSettings(backend="ray", address=address)
    with RunLeases("doomed", root=root) as leases:
        shared = leases.shared_memory()
        shared.mkdir()
        (shared / "weights").write_bytes(bytes(4096))
        async with ray_cluster(settings, leases=leases, residents=2) as cluster:
            make = partial(import_module, "time")  # to sleep keeps a process and its event loop busy, as torch does
            names = [WorkerId("engine", "sleeper", number) for number in range(2)]
            specs = [ResidentSpec(name=n, kind=ResidentKind.ENGINE, contract=Sleeps, make=make) for n in names]
            residents = await cluster.spawn(specs)
            processes = [process.pid for process in psutil.Process().children(recursive=True)]
            pids = {*processes, *(resident.place.pid for resident in residents)}
            print(json.dumps({"pids": sorted(pids), "paths": [str(shared), str(leases.folder)]}), flush=True)
            await residents[0].remote.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
