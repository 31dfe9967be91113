"""Compares what a run needs with this machine: libraries, devices, memory, ports."""

import socket
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import torch

from flexmarl.cli.models import Finding, ModelFacts
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.config import RunSettings
from flexmarl.config.run_settings import PolicySettings
from flexmarl.events.machine import GIB, Machine
from flexmarl.inference.settings import EmbeddedSettings

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TRAINER_BYTES = {"float64": 5 * 8, "float32": 5 * 4, "bfloat16": 2 + 5 * 4}
"""Bytes per parameter: weight, gradient, gradient cache and AdamW's two moments. In bfloat16 all but the weight are
float32, and there is a float32 master weight."""


def look_at_machine(settings: RunSettings, models: Mapping[str, ModelFacts], machine: Machine) -> Iterator[Finding]:
    """Yields findings on libraries, devices, memory and ports."""
    cluster = settings.cluster
    yield Finding("libraries", f"Python {machine.python}, torch {machine.torch or machine.torch_error}")
    if cluster.backend == "simulated":
        yield Finding("devices", "simulated: models, devices and memory are not needed; `flexmarl simulate` plays it")
        return
    if cluster.backend == "ray":
        yield from _ray(settings, machine)
    else:
        yield _device(cluster, machine)
    yield _memory(settings, models, machine)
    if cluster.backend == "ray":
        yield _ports(cluster)
    else:
        yield Finding("ports", "none needed: everything runs in one process")


def _device(cluster: ClusterSettings, machine: Machine) -> Finding:
    here = ", ".join(machine.devices) or f"{machine.cores} cores, no accelerator"
    number = int(cluster.device.partition(":")[2] or 0)
    lacks = cluster.device != "cpu" and number >= len(machine.devices)
    todo = f"run on a machine that has {cluster.device}, or set cluster.device=cpu"
    return Finding("devices", f"asked: {cluster.device}; here: {here}", todo if lacks else "")


def _ray(settings: RunSettings, machine: Machine) -> Iterator[Finding]:
    if find_spec("ray") is None:
        yield Finding("libraries", "cluster.backend=ray, but Ray is not installed", "pip install ray")
    cluster = settings.cluster
    engines, trainers = sum(policy.instances for policy in settings.policies.values()), len(settings.trained)
    here = ", ".join(machine.devices) or f"{machine.cores} cores, no accelerator"
    short = cluster.device == "cuda" and len(machine.devices) < engines + trainers
    yield Finding(
        "processes",
        f"{engines} engines and {trainers} trainers, on {cluster.device}; here: {here}",
        f"run on a machine with {engines + trainers} accelerators, or set cluster.device=cpu" if short else "",
    )


def _ports(cluster: ClusterSettings) -> Finding:
    if cluster.address == "local":
        return Finding("ports", "Ray is started here and chooses free ones")
    host, _, port = cluster.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, OverflowError) as error:
        return Finding("ports", f"{cluster.address}: {error}", "start Ray's head there (`ray start --head`)")
    return Finding("ports", f"{cluster.address} answers")


def _memory(settings: RunSettings, models: Mapping[str, ModelFacts], machine: Machine) -> Finding:
    """Estimates memory for weights, optimisers and caches; activations come on top. Inline, one device holds all."""
    unknown = sorted(policy for policy in settings.policies if not models.get(policy) or not models[policy].parameters)
    if unknown:
        return Finding("memory", f"not known before the model of {', '.join(unknown)} is here")
    needs = [_need(policy, models[name], settings.deterministic) for name, policy in settings.policies.items()]
    training, serving, cache = (sum(part) / GIB for part in zip(*needs, strict=True))
    needed = training + serving + cache
    parts = f"{needed:.2f} GiB: training {training:.2f}, engines {serving:.2f}, their caches {cache:.2f}"
    cluster = settings.cluster
    if cluster.backend == "ray" and cluster.device != "cpu":
        return Finding("memory", f"needs {parts}, over all devices")
    if cluster.device == "cpu":
        free = machine.free_memory_gib
    elif torch.cuda.is_available():
        free = torch.cuda.mem_get_info(torch.device(cluster.device))[0] / GIB
    else:
        return Finding("memory", f"needs {parts}, on {cluster.device}")
    short = "free some; or use a smaller model, fewer instances, or smaller engine.slots or engine.max_len"
    return Finding("memory", f"needs {parts}; {free:.1f} GiB are free", short if needed > free else "")


def _need(policy: PolicySettings, facts: ModelFacts, deterministic: bool) -> tuple[float, float, float]:
    """Returns the bytes for training, for the engines' weights, and for their caches."""
    training = facts.parameters * TRAINER_BYTES[policy.training.dtype] * policy.trainable
    engine = policy.engine
    if not isinstance(engine, EmbeddedSettings):
        return training, 0, 0
    rows = engine.slots + engine.num_kept(deterministic=deterministic)
    serving = facts.parameters * BYTES[engine.dtype]
    cache = rows * engine.max_len * facts.cached_numbers * BYTES[engine.dtype]
    return training, serving * policy.instances, cache * policy.instances
