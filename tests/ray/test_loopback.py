"""A run on one machine is reached from that machine alone."""

import asyncio
from contextlib import suppress
from http.client import HTTPConnection
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil
import pytest

from flexmarl.cluster.backends.ray import ray_cluster
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.events.run_events import StepEnded
from flexmarl.testing.cluster import probe
from tests.ray.child_run import Child, Left, listening, name_of

pytestmark = pytest.mark.ray

BRIEF = ("cluster.backend=ray", "steps=2", "evaluate.tasks=0", "checkpoint.every=0")


def test_no_process_of_a_run_listens_beyond_loopback(small_run: Path, tmp_path: Path, short_root: Path) -> None:
    child = Child("train", small_run, *BRIEF, f"out={tmp_path}", cwd=tmp_path, temp=short_root)
    try:
        while child.wait_for(lambda: trained(tmp_path), observing=True) and child.process.poll() is None:
            child.footprint.observe()
        assert child.wait() == 0, child.stderr
    finally:
        child.close()
    sockets = child.footprint.sockets
    listeners = {name.partition(".")[0] for name, _ in sockets}
    assert {"gcs_server", "raylet", "ray::RuntimeEnvAgent", "ray::TrainerActor"} <= listeners, (
        "witness: Ray and workers listen"
    )
    assert {(name, address) for name, address in sockets if not is_loopback(address)} == set()


def test_who_knows_no_token_is_sent_away(short_root: Path) -> None:
    seen: list[int] = []

    async def ask() -> None:
        with RunLeases("test", root=short_root) as leases:
            settings = ClusterSettings(backend="ray")
            async with ray_cluster(settings, leases=leases, residents=1) as cluster:
                await cluster.spawn([probe("worker")])
                while not seen:  # On a busy machine its agent answers later than its workers.
                    ours = {one.pid for one in psutil.Process().children(recursive=True)}
                    ports = [port for pid, _, port in listening() if pid in ours and is_agent(psutil.Process(pid))]
                    for port in ports:
                        with suppress(ConnectionRefusedError):
                            seen.append(await asyncio.to_thread(status_of, port))

    asyncio.run(ask())
    assert set(seen) == {401}


def is_agent(process: psutil.Process) -> bool:
    """Ray's process that installs packages and runs commands for whoever asks it over HTTP."""
    return name_of(process) == "ray::RuntimeEnvAgent"


def status_of(port: int) -> int:
    """Of an HTTP request without a token."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/get_or_create_runtime_env", b"x")
    return connection.getresponse().status


def trained(out: Path) -> bool:
    """A step has ended: every process of the run is there, and works."""
    return any(Left(folder).events(StepEnded) for folder in out.glob("sums-*"))


def is_loopback(address: str) -> bool:
    """`::ffff:127.0.0.1` is: an IPv4 address on a socket that speaks both."""
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback
