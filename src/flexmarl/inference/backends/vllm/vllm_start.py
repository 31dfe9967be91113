"""Factory of vLLM engines: sets what vLLM reads from the environment, then imports it."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import resource_tracker
from threading import Lock

import psutil

from flexmarl.errors import MissingExtra
from flexmarl.inference.interface import EngineParts, InferenceEngine
from flexmarl.inference.settings import VllmSettings

OWNER = "FLEXMARL_VLLM_OWNER"
"""Environment variable with the id of the engine's process, for vLLM's own processes, which end with it."""
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # Otherwise each engine on a CPU takes all cores for itself, and pins its threads to them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A worker of vLLM must be a new process: a fork of this one would have Ray's threads without the threads.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Environment variables that vLLM reads when it is imported, where the user has set nothing else."""


def has_vllm() -> bool:
    """True if this environment has vLLM; imports nothing."""
    return find_spec("vllm") is not None


def unlink_shared_memory() -> None:
    """Removes the names of the shared memory that the children of this process map, hundreds of MiB with vLLM.

    Once vLLM has started, all have opened it, and keep it. With its name, it would outlive children that are killed.
    """
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # A helper that has ended.
            with open(f"/proc/{child.pid}/maps") as maps:
                names = set(_SHARED.findall(maps.read()))
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(name)
                    # The tracker of leaks, which spawned processes share, has heard of it.
                    if "/psm_" in name and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "spawn":
                        resource_tracker.unregister(name.removeprefix("/dev/shm"), "shared_memory")


@contextmanager
def sockets_in_a_folder() -> Iterator[None]:
    """A block in which vLLM makes its sockets in a folder, which goes with the block, so that they outlive nobody.

    Once vLLM has started, both ends of each have opened it, and keep it. One block at a time: vLLM reads the name of
    the folder from the environment.
    """
    with _STARTING:
        users = os.environ.pop(_SOCKETS, None)
        try:
            with tempfile.TemporaryDirectory(prefix=f"flexmarl-vllm-{os.getpid()}-", dir=users) as folder:
                os.environ[_SOCKETS] = folder
                yield
        finally:
            os.environ.pop(_SOCKETS, None)  # Processes that begin later inherit no folder that is gone.
            if users is not None:
                os.environ[_SOCKETS] = users


_STARTING = Lock()
_SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable that names the folder; the user may have set it. Without it: the temp folder."""


_SHARED = re.compile(r"/dev/shm/(?:psm_|sem\.mp-)\S+$", re.MULTILINE)
"""Files of Python's multiprocessing, as /proc/PID/maps names those that still have a name."""


def make_engine(settings: VllmSettings, parts: EngineParts) -> InferenceEngine:
    """The factory that `VllmSettings.factory` names.

    Raises MissingExtra without vLLM, ConfigError that names the key which vLLM refuses.
    """
    if not has_vllm():
        raise MissingExtra("vllm", f"policies.{parts.policy}.engine.type vllm")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ[OWNER] = str(os.getpid())
    return import_module("flexmarl.inference.backends.vllm.vllm_engine").VllmEngine(settings, parts)
