"""Factory of vLLM engines: sets what vLLM reads from the environment, then imports it."""

import os
from importlib import import_module
from importlib.util import find_spec

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
