"""Ray in this process: a private Ray that it starts and ends, or one that already runs on this machine."""

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
# Ray takes at least 75 MiB. Almost nothing goes through its store, and weights never do.
STORE_BYTES = 80 * 2**20
VITAL = ("gcs_server", "raylet")
# Ray reads a token once per process, so a second private Ray of this process must use the same token.
TOKEN = secrets.token_hex(32)
PRIVATE = {
    # Ray listens on the network and runs what it receives, so it asks for a token. Without ours it makes one in ~/.ray.
    "RAY_AUTH_TOKEN": TOKEN,
    # By default Ray runs its workers at niceness 15: on a busy machine the run's own work would come last.
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # With this, Ray's processes listen on loopback alone, as where Ray supports no clusters; see `on_loopback`.
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    # Otherwise Ray changes CUDA_VISIBLE_DEVICES for a worker without an accelerator.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class PrivateRay:
    """A Ray for this run alone. It declares a CPU for each worker, so all workers fit on however few cores."""

    def __init__(self, leases: RunLeases, *, workers: int, accelerators: bool) -> None:
        self._leases = leases
        self._workers = workers
        self._accelerators = accelerators
        self._vital: dict[psutil.Process, str] = {}

    def open(self) -> None:
        """Starts Ray. This takes about three seconds, most of them for Ray's own helper processes on few cores."""
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

    def failure(self) -> str | None:
        """The reason if Ray has ended, else None. Ray itself notices after 15 to 60 s, and then ends this process."""
        for process, name in self._vital.items():
            if has_ended(process):
                return f"Ray's {name} (pid {process.pid}) ended"
        return None

    def close(self) -> None:
        """Ends Ray and removes its files."""
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        return self._leases.folder / "ray"


class JoinedRay:
    """A Ray that somebody else started. It keeps running after `close`, with nothing left of this run.

    A process that has had a private Ray must not join another: it still asks callers for a token, which these workers
    lack. Nothing here checks for it.
    """

    def __init__(self, leases: RunLeases, *, address: str) -> None:
        self._leases = leases
        self._address = address

    def open(self) -> None:
        """Connects. Raises ConfigError if nobody listens at the address, or no Ray with a node on this machine."""
        if failure := self.failure():
            raise ConfigError(f"cluster.address={self._address}: {failure}; {self._advice}")
        silence()
        try:
            ray.init(self._address, namespace=self._leases.folder.name, log_to_driver=False, configure_logging=False)
        except Exception as error:
            raise ConfigError(f"cluster.address={self._address}: cannot join: {error}; {self._advice}") from error

    def failure(self) -> str | None:
        """The reason if the address cannot be reached, else None."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except (OSError, OverflowError) as error:  # OverflowError for a port above 65535.
            return f"Ray at {self._address} does not answer: {error}"
        return None

    def close(self) -> None:
        """Disconnects. Ray then ends what belongs to this run."""
        ray.shutdown()

    @property
    def _advice(self) -> str:
        return (
            "start it with `ray start --head`, set RAY_AUTH_MODE=token here if that Ray asks for a token, or use "
            "cluster.address=local for a Ray of the run's own"
        )


def has_ended(process: psutil.Process) -> bool:
    """True if the process is gone, or is a zombie that nobody has waited for yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def silence() -> None:
    """Keeps Ray from reporting dead workers on stdout, between lines of tables and JSON; the run reports them."""
    driver._worker_logs_enabled = False  # Ray itself does this at a breakpoint; there is no setting for it


@contextmanager
def on_loopback() -> Iterator[None]:
    """Inside the block, Ray takes 127.0.0.1 for this machine's address, and so listens there and nowhere else.

    `ray.init(_node_ip_address="127.0.0.1")` is not enough: Ray replaces loopback by the address that other machines
    reach. It keeps loopback where clusters are not supported, which it decides by a variable that it reads at import.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables inside the block, for processes started there. At its end all are as before it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
