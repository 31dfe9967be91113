"""Ray as this process reaches it: a private one, started here and ended here, or one that runs on this machine."""

import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._private import worker as driver

from flexmarl.cluster.leases import RunLeases
from flexmarl.errors import ConfigError

CONNECT_S = 5.0
# Least that Ray takes is 75 MiB; next to nothing goes through its store, weights least of all.
STORE_BYTES = 80 * 2**20
VITAL = ("gcs_server", "raylet")
# Ray reads a token once per process, so a second Ray of ours must ask for the same one.
TOKEN = secrets.token_hex(32)
PRIVATE = {
    # Ray listens on the network and runs what it is sent, so it wants a token; without ours it keeps one in ~/.ray.
    "RAY_AUTH_TOKEN": TOKEN,
    # Ray nices its workers to 15: on a busy machine the run's own work would come last.
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Its processes listen on loopback alone, as Ray's own do where clusters are not supported; see `on_loopback`.
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    # Else a worker without an accelerator gets CUDA_VISIBLE_DEVICES changed.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class PrivateRay:
    """A Ray for this run alone, with as many CPUs as it has workers: that many fit, however few cores there are."""

    def __init__(self, leases: RunLeases, *, workers: int, accelerators: bool) -> None:
        self._leases = leases
        self._workers = workers
        self._accelerators = accelerators
        self._vital: dict[psutil.Process, str] = {}

    def open(self) -> None:
        """Starts it; about three seconds, most of them Ray's own helpers on few cores."""
        before = set(psutil.Process().children(recursive=True))
        silence()
        with environment(PRIVATE), on_loopback():
            ray.init(
                "local",
                namespace=self._leases.folder.name,
                num_cpus=self._workers,
                num_gpus=None if self._accelerators else 0,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(self._folder),
            )
        started = [process for process in psutil.Process().children(recursive=True) if process not in before]
        self._leases.add_processes(process.pid for process in started)
        for process in started:
            with suppress(psutil.NoSuchProcess):  # Some of Ray's helpers end at once.
                if (name := process.name()) in VITAL:
                    self._vital[process] = name

    def trouble(self) -> str | None:
        """Why it is no more, if so. Ray itself notices after 15 to 60 seconds, and then ends this process."""
        for process, name in self._vital.items():
            if has_ended(process):
                return f"Ray's {name} (pid {process.pid}) ended"
        return None

    def close(self) -> None:
        """Ends it and removes its files."""
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self._leases.folder / "ray"


class JoinedRay:
    """A Ray that somebody else started: it stays as it is, with nothing of ours after `close`.

    Not after a private one in the same process: that still asks its callers for a token, which these workers lack.
    """

    def __init__(self, leases: RunLeases, *, address: str) -> None:
        self._leases = leases
        self._address = address

    def open(self) -> None:
        """Connects. Raises ConfigError if nobody listens there, or no Ray with a node on this machine."""
        if trouble := self.trouble():
            raise ConfigError(f"cluster.address={self._address}: {trouble}; {self._advice}")
        silence()
        try:
            ray.init(self._address, namespace=self._leases.folder.name, log_to_driver=False, configure_logging=False)
        except Exception as error:
            raise ConfigError(f"cluster.address={self._address}: cannot join: {error}; {self._advice}") from error

    def trouble(self) -> str | None:
        """Why it cannot be reached, if so."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except (OSError, OverflowError) as error:  # A port above 65535 is none.
            return f"Ray at {self._address} does not answer: {error}"
        return None

    def close(self) -> None:
        """Leaves it; Ray ends what belongs to us."""
        ray.shutdown()

    @property
    def _advice(self) -> str:
        return (
            "start it with `ray start --head` on this machine, or use cluster.address=local for a Ray of the run's own"
        )


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or has only not been waited for yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def silence() -> None:
    """Keeps Ray from telling of dead workers on our stdout, between the lines of tables and JSON; the run does it."""
    driver._worker_logs_enabled = False  # as Ray itself does at a breakpoint; there is no setting for it


@contextmanager
def on_loopback() -> Iterator[None]:
    """In the block, Ray takes 127.0.0.1 for this machine's address, and so listens there and nowhere else.

    `ray.init(_node_ip_address="127.0.0.1")` does not do it: Ray replaces loopback by the address that others reach. It
    leaves it where clusters are not supported, which it decides by a variable that it reads when it is imported.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for processes that are started inside the block; takes back what else the block changes."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
