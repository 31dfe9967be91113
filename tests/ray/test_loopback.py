"""A run on one machine is reached from that machine alone."""

from ipaddress import IPv6Address, ip_address
from pathlib import Path

import pytest

from tests.ray.child_run import Child, Left

pytestmark = pytest.mark.ray


def test_no_process_of_a_run_listens_beyond_loopback(small_run: Path, tmp_path: Path, short_root: Path) -> None:
    child = Child(
        "train", small_run, "cluster.backend=ray", "steps=4", f"out={tmp_path}", cwd=tmp_path, temp=short_root
    )
    try:
        while child.wait_for(lambda: trained(tmp_path), observing=True) and child.process.poll() is None:
            child.footprint.observe()
        assert child.wait() == 0, child.stderr
    finally:
        child.close()
    sockets = child.footprint.sockets
    listeners = {name.partition(".")[0] for name, _ in sockets}
    assert {"gcs_server", "raylet", "ray::RuntimeEnvAgent", "ray::Host"} <= listeners, "witness: Ray and workers listen"
    assert {(name, address) for name, address in sockets if not is_loopback(address)} == set()


def trained(out: Path) -> bool:
    """A step has ended: every process of the run is there, and works."""
    return any(Left(folder).events("step_ended") for folder in out.glob("sums-*"))


def is_loopback(address: str) -> bool:
    """`::ffff:127.0.0.1` is: an IPv4 address on a socket that speaks both."""
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback
