"""Compares what a run needs with this machine: models, libraries, devices, memory, ports.

Facts about a policy's model are read without loading its weights: from its folder, the hub's cache, or the hub.
"""

import math
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flexmarl.agents import ChatRenderer
from flexmarl.assemble import cached_numbers, check_model, load_tokenizer, model_source
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.config import RunSettings
from flexmarl.config.run_settings import PolicySettings
from flexmarl.errors import ConfigError
from flexmarl.events.machine import GIB, Machine
from flexmarl.inference.settings import KV_SHARE, EmbeddedSettings


class Finding(NamedTuple):
    """One line of `flexmarl check`: a subject, and what was found about it."""

    subject: str
    found: str
    todo: str = ""
    """The user's to-do; empty if there is none."""


HUB_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about one policy's model."""

    finding: Finding
    readable: bool = False
    """True if its config and tokenizer are on this machine."""
    parameters: int = 0
    """Number of parameters; 0 if not known here."""
    cached_numbers: int = 0
    """Numbers in the keys and values of one token; 0 if not known here, or if the engine has its own cache."""


def examine_models(settings: RunSettings, problems: list[str]) -> Mapping[str, ModelFacts]:
    """Returns the facts about every model that can be examined. Adds a line to `problems` for each that cannot."""
    found: dict[str, ModelFacts] = {}
    for policy in settings.policies:
        try:
            source = model_source(settings, policy)
            config = _config(source)
            found[policy] = _on_the_hub(policy, source) if config is None else _local(settings, policy, source, config)
        except ConfigError as problem:
            problems.append(str(problem))
    return found


def _config(source: str) -> PretrainedConfig | None:
    """Returns the model's config from its folder or the hub's cache; None if it is only on the hub."""
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True)
    except Exception as error:  # A broken file may raise anything.
        if not Path(source).is_dir():
            return None
        raise ConfigError(f"'{source}' is no model that transformers can read: {_first_line(error)}") from error


def _local(settings: RunSettings, policy: str, source: str, config: PretrainedConfig) -> ModelFacts:
    key, engine = f"policies.{policy}.model", settings.policies[policy].engine
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ConfigError(f"{key}: '{source}' is no causal language model: {_first_line(error)}") from error
    if Path(source).is_dir() and not any([*Path(source).glob("*.safetensors"), *Path(source).glob("*.bin")]):
        raise ConfigError(f"{key}: '{source}' holds no weights; save the model there with `save_pretrained`")
    check_model(settings, policy)
    tokenizer = load_tokenizer(settings, policy)
    cached, todo = 0, ""
    if isinstance(engine, EmbeddedSettings):
        cached = cached_numbers(model)
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and engine.max_len > positions:
            todo = f"engine.max_len is {engine.max_len}, but the model knows only {positions} positions: lower it"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    chat = ChatRenderer(tokenizer).extension.summary
    found = f"{type(model).__name__}, {parameters / 1e6:,.2f}M parameters; chat: {chat}"
    return ModelFacts(finding=Finding(key, found, todo), readable=True, parameters=parameters, cached_numbers=cached)


def _on_the_hub(policy: str, name: str) -> ModelFacts:
    key = f"policies.{policy}.model"
    try:
        info = HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        todo = "accept its licence on the hub, then `hf auth login`"
        return ModelFacts(finding=Finding(key, f"{name} is gated", todo))
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{key}: '{name}' is not on the Hugging Face hub, or private; check the name, or `hf auth login`"
        ) from None
    except Exception as error:  # No network, a proxy, an error of the hub: no change of the config would help.
        return ModelFacts(
            finding=Finding(
                key,
                f"{name}: not on this machine, and the hub does not answer ({_first_line(error)})",
                "run where there is network, or give a local folder",
            )
        )
    weights = info.safetensors.total if info.safetensors else 0
    size = f", {weights / 1e6:,.0f}M parameters" if weights else ""
    return ModelFacts(finding=Finding(key, f"{name}, on the hub{size}: the first run downloads it"), parameters=weights)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TRAINER_BYTES = {"float64": 5 * 8, "float32": 5 * 4, "bfloat16": 2 + 5 * 4}
"""Bytes per parameter: weight, gradient, gradient cache and AdamW's two moments. In bfloat16 all but the weight are
float32, and there is a float32 master weight."""


def examine_machine(settings: RunSettings, models: Mapping[str, ModelFacts], machine: Machine) -> Iterator[Finding]:
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
    found_here = ", ".join(machine.devices) or f"{machine.cores} cores, no accelerator"
    number = int(cluster.device.partition(":")[2] or 0)
    lacks = cluster.device != "cpu" and number >= len(machine.devices)
    todo = f"run on a machine that has {cluster.device}, or set cluster.device=cpu"
    return Finding("devices", f"asked: {cluster.device}; here: {found_here}", todo if lacks else "")


def _ray(settings: RunSettings, machine: Machine) -> Iterator[Finding]:
    if find_spec("ray") is None:
        yield Finding("libraries", "cluster.backend=ray, but Ray is not installed", "pip install ray")
    cluster = settings.cluster
    engines, trainers = sum(policy.instances for policy in settings.policies.values()), len(settings.trained)
    found_here = ", ".join(machine.devices) or f"{machine.cores} cores, no accelerator"
    short = cluster.device == "cuda" and len(machine.devices) < engines + trainers
    yield Finding(
        "processes",
        f"{engines} engines and {trainers} trainers, on {cluster.device}; here: {found_here}",
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
        return Finding("memory", f"unknown until the model of {', '.join(unknown)} is on this machine")
    cluster, free = settings.cluster, math.inf
    if cluster.device == "cpu":
        free = machine.free_memory_gib
    elif cluster.backend != "ray" and torch.cuda.is_available():
        free = torch.cuda.mem_get_info(torch.device(cluster.device))[0] / GIB
    needs = [
        _need(policy, models[name], settings.deterministic, free * GIB) for name, policy in settings.policies.items()
    ]
    training, serving, cache = (sum(part) / GIB for part in zip(*needs, strict=True))
    needed = training + serving + cache
    parts = f"{needed:.2f} GiB: training {training:.2f}, engines {serving:.2f}, their caches at most {cache:.2f}"
    if free == math.inf:
        where = "over all devices" if cluster.backend == "ray" else f"on {cluster.device}"
        return Finding("memory", f"needs {parts}, {where}")
    short = "free some; or use a smaller model, fewer instances, or a smaller engine.kv_gib"
    return Finding("memory", f"needs {parts}; {free:.1f} GiB are free", short if needed > free else "")


def _need(policy: PolicySettings, facts: ModelFacts, deterministic: bool, free: float) -> tuple[float, float, float]:
    """Returns the bytes for training, for the engines' weights, and at most for their caches. `free` bytes are free."""
    training = facts.parameters * TRAINER_BYTES[policy.training.dtype] * policy.trainable
    engine = policy.engine
    if not isinstance(engine, EmbeddedSettings):
        return training, 0, 0
    serving = facts.parameters * BYTES[engine.dtype]
    budget = engine.kv_gib * GIB if engine.kv_gib is not None else KV_SHARE * free
    cache = min(engine.kv_blocks(deterministic=deterministic) * engine.kv_bytes(facts.cached_numbers).block, budget)
    return training, serving * policy.instances, cache * policy.instances
