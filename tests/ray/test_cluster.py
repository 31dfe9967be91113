"""Residents on a real Ray: the laws of a cluster, errors that say what would work, a Ray that others started."""

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from flexmarl.cluster.backends.ray import RayCluster, ray_cluster
from flexmarl.cluster.interface import Resident
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.errors import ConfigError, WorkerError
from flexmarl.testing.cluster import Losses, check_cluster, probe, raised

pytestmark = pytest.mark.ray

PRIVATE = ClusterSettings(backend="ray")


def kill(resident: Resident[Any]) -> None:
    os.kill(resident.place.pid, signal.SIGKILL)


def play(
    settings: ClusterSettings, root: Path, act: Callable[[RayCluster], Awaitable[None]], *, residents: int
) -> None:
    """Opens a cluster, acts and closes it; then nothing is left that there was not before."""
    before = set(psutil.Process().children(recursive=True))

    async def run() -> None:
        with RunLeases("test", root=root) as leases:
            async with ray_cluster(settings, leases=leases, residents=residents) as cluster:
                await act(cluster)

    asyncio.run(run())
    if settings.address == "local":  # another's Ray keeps idle processes of its own
        assert set(psutil.Process().children(recursive=True)) <= before
    assert list(root.iterdir()) == []


# These come first: a process that had a private Ray cannot join another.
def test_a_run_joins_a_ray_and_leaves_it_as_it_was(somebodys_ray: str, short_root: Path) -> None:
    seen: list[int] = []

    async def act(cluster: RayCluster) -> None:
        (resident,) = await cluster.spawn([probe("guest")])
        seen.append(resident.place.pid)
        assert await resident.remote.echo(1) == 1

    for _ in range(2):
        play(ClusterSettings(backend="ray", address=somebodys_ray), short_root, act, residents=1)
    assert len(set(seen)) == 2
    assert not any(psutil.pid_exists(pid) for pid in seen)


def test_without_room_the_error_says_what_was_asked_and_what_is_there(somebodys_ray: str, short_root: Path) -> None:
    async def act(cluster: RayCluster) -> None:
        text = str(await raised(cluster.spawn([probe(str(i)) for i in range(3)]), ConfigError))
        assert "3 CPU" in text
        assert "2 CPU" in text
        assert "cluster.address=local" in text
        residents = await cluster.spawn([probe("first"), probe("second")])
        assert "2 CPU and 0 GPU are taken" in str(await raised(cluster.spawn([probe("third")]), ConfigError))
        await residents[0].stop()
        await cluster.spawn([probe("third")])

    play(ClusterSettings(backend="ray", address=somebodys_ray), short_root, act, residents=2)


def test_an_address_where_nobody_listens_is_named() -> None:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"

        async def join(leases: RunLeases) -> None:
            async with ray_cluster(ClusterSettings(backend="ray", address=address), leases=leases, residents=1):
                pass

        with RunLeases("unreachable") as leases, pytest.raises(ConfigError, match=f"cluster.address={address}"):
            asyncio.run(join(leases))


def test_ray_workers_keep_the_laws_of_a_cluster(short_root: Path) -> None:
    play(PRIVATE, short_root, lambda cluster: check_cluster(cluster, kill), residents=3)


def test_ray_is_shut_down_when_nobody_waits_for_a_result(short_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A result whose last reference goes while Ray shuts down makes Ray end the process at once.
    shutdown, held = ray.shutdown, list[Any]()

    def shut_down() -> None:
        held.append([one for one in gc.get_objects() if type(one) is Future and refers_to_a_result(one)])
        shutdown()

    def refers_to_a_result(future: Future[Any]) -> bool:
        return isinstance(getattr(future, "object_ref", None), ray.ObjectRef)

    async def act(cluster: RayCluster) -> None:
        assert refers_to_a_result(ray.put("anything").future())
        loop, main = asyncio.get_running_loop(), threading.get_ident()
        call = loop.call_soon_threadsafe

        def call_and_linger(*args: Any, **kwargs: Any) -> Any:
            handle = call(*args, **kwargs)
            if threading.get_ident() != main:
                time.sleep(0.5)  # Ray's thread has told the loop, and has not let go of the result's future yet.
            return handle

        residents = await cluster.spawn([probe("first"), probe("second")])
        waits = [asyncio.ensure_future(resident.remote.wait()) for resident in residents]
        await asyncio.sleep(0.2)
        monkeypatch.setattr(ray, "shutdown", shut_down)
        monkeypatch.setattr(loop, "call_soon_threadsafe", call_and_linger)
        await cluster.close()
        for wait in waits:
            await raised(wait, WorkerError)

    play(PRIVATE, short_root, act, residents=2)
    assert held == [[]]


@pytest.mark.parametrize("vital", ["gcs_server", "raylet"])
def test_the_end_of_ray_itself_loses_every_worker_and_hangs_nobody(vital: str, short_root: Path) -> None:
    async def act(cluster: RayCluster) -> None:
        losses = Losses(cluster)
        residents = await cluster.spawn([probe("first"), probe("second")])
        waits = [asyncio.ensure_future(resident.remote.wait()) for resident in residents]
        ours = [one for one in psutil.Process().children() if str(short_root) in " ".join(one.cmdline())]
        (process,) = [one for one in ours if one.name() == vital]
        process.kill()
        for wait in waits:
            await raised(wait, WorkerError)
        await losses.first()
        assert vital in str(await raised(cluster.spawn([probe("third")]), WorkerError))
        assert {str(lost.process) for lost in losses.seen} == {"first", "second"}

    play(PRIVATE, short_root, act, residents=2)
