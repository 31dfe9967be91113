"""`flexmarl check`: is this config right, and can this machine run it?"""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from flexmarl.agents import ChatRenderer
from flexmarl.assemble import load_tokenizer, model_source, open_tasks, seat_team
from flexmarl.cli.options import Config, Overrides
from flexmarl.cluster.settings import InlineCluster, RayCluster
from flexmarl.config import RunSettings, load_run
from flexmarl.errors import ConfigError, boundary
from flexmarl.observability.machine import GIB, Machine, this_machine


class Finding(NamedTuple):
    """One thing that was looked at."""

    subject: str
    found: str
    todo: str = ""
    """What to do; empty when it is fine as it is."""


def check(config: Config, overrides: Overrides = None) -> None:
    """Validate CONFIG and look at this machine. Exit code 2 if the config is wrong; a to-do is no error."""
    settings = load_run(config, overrides or ())
    findings = list(examine(settings))
    table = Table(box=box.SIMPLE_HEAD, title=str(config))
    for column in ("", "subject", "found", "to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row("!" if finding.todo else "ok", *finding, style="yellow" if finding.todo else None)
    Console().print(table)


def examine(settings: RunSettings) -> Iterator[Finding]:
    """Looks at everything that can be looked at without weights on a device. Raises ConfigError for a wrong config."""
    source = open_tasks(settings)
    held_out = len(source.held_out(settings.evaluate.tasks))
    length = "endless" if source.num_train is None else f"{source.num_train} tasks"
    yield Finding("tasks", f"training: {length}; held out: {held_out}; disjoint")
    settings.team.workflow.resolve()
    sizes = {}
    for policy in settings.policies:
        sizes[policy], finding = _model(settings, policy)
        yield finding
    if all(Path(model_source(settings, policy)).is_dir() for policy in settings.policies):
        level = seat_team(settings).level
        yield Finding("team", f"level {level.name}: {level.because}")
    machine = this_machine()
    yield from _cluster(settings, machine)
    if all(sizes.values()):
        yield _memory(settings, sizes, machine)


def _model(settings: RunSettings, policy: str) -> tuple[int, Finding]:
    """A policy's model and its number of parameters (0: not known here)."""
    source = model_source(settings, policy)
    if not Path(source).is_dir():
        return 0, Finding(
            f"policies.{policy}.model",
            f"{source}, on the Hugging Face hub",
            "it is downloaded at the first run; without network, give a local folder",
        )
    with boundary(ConfigError, f"policies.{policy}.model: reading '{source}'"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    size = sum(parameter.numel() for parameter in model.parameters())
    renderer = ChatRenderer(load_tokenizer(settings, policy))
    return size, Finding(
        f"policies.{policy}.model", f"{size / 1e6:.2f}M parameters; chat template: {renderer.extension}"
    )


def _cluster(settings: RunSettings, machine: Machine) -> Iterator[Finding]:
    cluster = settings.cluster
    yield Finding("libraries", f"Python {machine.python}, torch {machine.torch or machine.torch_error}")
    if isinstance(cluster, InlineCluster):
        lacks_cuda = cluster.device.startswith("cuda") and not machine.devices
        todo = "this machine has no CUDA device: run there where it has one, or set cluster.device=cpu"
        yield Finding("devices", ", ".join(machine.devices) or f"{machine.cores} cores", todo if lacks_cuda else "")
        yield Finding("ports", "none needed: everything runs in one process")
        return
    wanted = cluster.rollout_devices + cluster.training_devices
    yield Finding(
        "devices",
        f"asked: {cluster.rollout_devices} for rollout + {cluster.training_devices} for training "
        f"on {cluster.nodes} node(s); here: {', '.join(machine.devices) or 'no accelerator'}",
        "" if len(machine.devices) >= wanted else "run on the cluster, or set cluster.type=inline",
    )
    yield Finding("world", "ray", "this version trains in one process; set cluster.type=inline to run it now")
    if cluster.address != "local":
        yield _reachable(cluster)


def _reachable(cluster: RayCluster) -> Finding:
    host, _, port = cluster.address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError as error:
        return Finding(
            "ports", f"{cluster.address}: {error}", "start Ray's head there, or run on a machine that sees it"
        )
    return Finding("ports", f"{cluster.address} answers")


def _memory(settings: RunSettings, sizes: Mapping[str, int], machine: Machine) -> Finding:
    """Weights, gradients, cache and AdamW of trainers (20 bytes a parameter), and every instance's weights (4)."""
    needed = sum(
        size * (20 * settings.policies[policy].trainable + 4 * settings.policies[policy].instances)
        for policy, size in sizes.items()
    )
    short = needed / GIB > machine.free_memory_gib
    return Finding(
        "memory",
        f"weights and optimisers need {needed / GIB:.2f} GiB; {machine.free_memory_gib} GiB are free",
        "free some, use a smaller model or fewer instances" if short else "",
    )
