"""Compares what a run needs with this machine: models, libraries, devices, memory, ports.

Facts about a policy's model are read without loading its weights: from its folder, the hub's cache, or the hub.
"""

import asyncio
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flexmarl.assemble.blueprint import check_library, check_model, load_renderer, model_source, training_of
from flexmarl.assemble.needed_memory import ModelSize, parts, peak_bytes, size_of
from flexmarl.cluster.placement import RoomRequest, needed
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, EngineError
from flexmarl.events.machine import GIB, Machine
from flexmarl.inference.settings import VLLM_CPU_HEAD, EmbeddedSettings, OpenAISettings, VllmSettings, computes
from flexmarl.records import InstanceId, PolicyName, WorkerId


class Finding(NamedTuple):
    """One line of `flexmarl check`: a subject, and what was found about it."""

    subject: str
    found: str
    todo: str = ""
    """The user's to-do; empty if there is none."""


HUB_TIMEOUT_S = 3.0
SERVER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about one policy's model."""

    finding: Finding
    readable: bool = False
    """True if its config and tokenizer are on this machine."""
    size: ModelSize | None = None
    """None if it is not known here."""


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


def examine_servers(settings: RunSettings) -> Iterator[Finding]:
    """Looks for the model of each policy on a server. Raises ConfigError if it lacks it, or refuses the key."""
    for name, policy in settings.policies.items():
        if isinstance(engine := policy.engine, OpenAISettings):
            check_server = import_module("flexmarl.inference.backends.completions_server").check_server  # The extra.
            once = engine.model_copy(update={"retries": 0, "timeout_s": min(engine.timeout_s, SERVER_TIMEOUT_S)})
            todo = ""
            try:
                asyncio.run(check_server(once, name))
                found = f"{engine.url} answers, and serves '{engine.model}'"
            except EngineError as error:
                found, todo = f"{engine.url} does not answer ({error.__cause__ or error})", "start it before the run"
            yield Finding(f"policies.{name}.engine.url", found, todo)


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
    weights = [*Path(source).glob("*.safetensors"), *Path(source).glob("*.bin")]
    if settings.policies[policy].needs_weights and Path(source).is_dir() and not weights:
        raise ConfigError(f"{key}: '{source}' holds no weights; save the model there with `save_pretrained`")
    check_model(settings, policy)
    todo = ""
    if isinstance(engine, EmbeddedSettings):
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and engine.max_len > positions:
            of = f"policies.{policy}.engine.max_len is {engine.max_len}"
            todo = f"{of}, but the model knows only {positions} positions: lower it"
    if isinstance(engine, VllmSettings):
        todo = _vllm_todo(settings, policy, engine, config)
    with training_of(policy):
        size = size_of(model, settings.policies[policy])
    chat = load_renderer(settings, policy).extension.summary
    found = f"{type(model).__name__}, {size.parameters / 1e6:,.2f}M parameters; chat: {chat}"
    if settings.policies[policy].trainable and not size.is_linear:
        found += "; its head is more than a linear layer, so that a pass makes all its logits at once"
    return ModelFacts(finding=Finding(key, found, todo), readable=True, size=size)


def _vllm_todo(settings: RunSettings, policy: str, engine: VllmSettings, config: PretrainedConfig) -> str:
    """The reason why vLLM cannot serve the model; empty if none is known."""
    text, at = config.get_text_config(), f"policies.{policy}"
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if settings.cluster.device == "cpu" and head % VLLM_CPU_HEAD:
        return (
            f"its attention heads have {head} numbers, and vLLM takes multiples of {VLLM_CPU_HEAD} on a CPU: use "
            f"another model, or {at}.engine.type=embedded"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and engine.max_len > positions:
        return f"{at}.engine.max_len is {engine.max_len}, but the model knows only {positions} positions: lower it"
    return ""


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
    return ModelFacts(finding=Finding(key, f"{name}, on the hub{size}: the first run downloads it"))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def examine_machine(
    settings: RunSettings, models: Mapping[str, ModelFacts], machine: Machine, longest: Mapping[str, int]
) -> Iterator[Finding]:
    """Yields findings on libraries, devices, memory and ports."""
    cluster = settings.cluster
    yield Finding("libraries", f"Python {machine.python}, torch {machine.torch or machine.torch_error}")
    if cluster.backend == "simulated":
        yield Finding("devices", "simulated: models, devices and memory are not needed; `flexmarl simulate` plays it")
        return
    for name in settings.policies:
        try:
            if settings.together(name)[0] == name:
                check_library(settings, name)
        except ConfigError as problem:
            yield Finding(f"policies.{name}.engine", "its library cannot be used here", str(problem))
    if cluster.backend == "ray":
        yield from _ray(settings, machine)
    else:
        yield _device(cluster, machine)
    yield from _memory(settings, models, machine, longest)
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
    if cluster.transport == "mooncake" and find_spec("mooncake") is None:
        todo = "pip install 'flexmarl[mooncake]', on every node"
        yield Finding("libraries", "cluster.transport=mooncake, but Mooncake is not installed", todo)
    in_controller = sum(policy.instances for policy in settings.policies.values() if not computes(policy.engine))
    engines = list(_engines(settings))
    trainers = settings.shared_places * settings.ranks or len(settings.trained)
    ranks = [WorkerId.rank(number, 0) for number in range(trainers)]
    rooms, accelerators = needed(
        [*engines, *(_room(rank, "training", takes_turns=settings.in_turns) for rank in ranks)]
    )
    trained_on = f"{trainers} trainers"
    if settings.shared_places:
        places = f"{settings.shared_places} {'place' if settings.shared_places == 1 else 'places'}"
        trained_on = f"{places} for {len(settings.trained)} trained policies"
    if settings.in_turns:
        in_turn = sum(engine.takes_turns for engine in engines)
        trained_on += f", in {rooms} rooms: {in_turn} engines and {trainers} training processes have theirs in turn"
    others = f", and {in_controller} engines in the controller's process" if in_controller else ""
    found_here = ", ".join(machine.devices) or f"{machine.cores} cores, no accelerator"
    short = cluster.device == "cuda" and len(machine.devices) < accelerators
    yield Finding(
        "processes",
        f"{len(engines)} engines and {trained_on}, on {cluster.device}{others}; here: {found_here}",
        f"run on a machine with {accelerators} accelerators, or set cluster.device=cpu" if short else "",
    )


def _engines(settings: RunSettings) -> Iterator[RoomRequest]:
    """The rooms that engines which compute ask for."""
    for name, policy in settings.policies.items():
        own = computes(policy.engine) and settings.together(name)[0] == name
        for number in range(policy.instances if own else 0):
            engine = WorkerId.engine(InstanceId(PolicyName(name), number))
            devices = getattr(policy.engine, "tensor_parallel", 1)
            yield _room(engine, "rollout", takes_turns=settings.takes_turns(name), devices=devices)


def _room(name: WorkerId, pool: str, *, takes_turns: bool, devices: int = 1) -> RoomRequest:
    return RoomRequest(name=name, devices=devices, pool=pool, takes_turns=takes_turns)


def _ports(cluster: ClusterSettings) -> Finding:
    if cluster.address == "local":
        return Finding("ports", "Ray is started here and chooses free ones")
    host, _, port = cluster.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, OverflowError) as error:
        return Finding("ports", f"{cluster.address}: {error}", "start Ray's head there (`ray start --head`)")
    return Finding("ports", f"{cluster.address} answers")


def _on_accelerator(cluster: ClusterSettings) -> tuple[float | None, int]:
    """GiB free on an accelerator, None if there is none here, and the bytes of its memory."""
    if not torch.cuda.is_available():
        return None, 0
    free, device_bytes = torch.cuda.mem_get_info(torch.device(cluster.device))
    return free / GIB, device_bytes


def _memory(
    settings: RunSettings, models: Mapping[str, ModelFacts], machine: Machine, longest: Mapping[str, int]
) -> Iterator[Finding]:
    """Yields the memory at the peak of the run, and its parts with the settings that lower them."""
    sizes = {name: facts.size for name, facts in models.items() if facts.size is not None}
    if unknown := sorted(settings.policies.keys() - sizes.keys()):
        yield Finding("memory", f"unknown until the model of {', '.join(unknown)} is on this machine")
        return
    cluster = settings.cluster
    free_gib, device_bytes = machine.free_memory_gib, 0
    if cluster.device != "cpu":
        free_gib, device_bytes = _on_accelerator(cluster)
    found = parts(settings, sizes, longest, device_bytes=device_bytes)
    peak_gib = peak_bytes(settings, found) / GIB
    largest = next((part for part in found if part.setting), found[0])
    summary = f"{peak_gib:.2f} GiB at the peak"
    vllm = [policy.engine for policy in settings.policies.values() if isinstance(policy.engine, VllmSettings)]
    if vllm and cluster.device != "cpu":
        unknown = not device_bytes and any(engine.kv_gib is None for engine in vllm)
        summary += f", without vLLM's passes and CUDA graphs{', keys and values' if unknown else ''}"
    if cluster.backend == "ray" and cluster.device != "cpu":
        yield Finding("memory", f"{summary}, over all devices")
    else:
        less = f"the largest part is '{largest.name}': lower {largest.setting}; or " if largest.setting else ""
        short = f"{less}free some"
        of_free = f", on {cluster.device}" if free_gib is None else f"; {free_gib:.1f} GiB are free"
        yield Finding("memory", summary + of_free, short if free_gib is not None and peak_gib > free_gib else "")
    for part in found:
        more = f" for requests like those of the task played, at most {part.most / GIB:.2f}" if part.most else ""
        lower = f"; lower it by {part.setting}" if part.setting else ""
        yield Finding(f"  {part.name}", f"{part.num_bytes / GIB:.2f} GiB{more}{lower}")
