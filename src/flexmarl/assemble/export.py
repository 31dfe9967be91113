"""Policies of a finished or stopped run as Hugging Face folders: for use elsewhere, for the hub, and as the start of
another run.

    checkpoint of a run ──► trainer of one policy, on the CPU ──► folder with weights, tokenizer and model card ──► hub

No engine is made, and one policy is in memory at a time.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import HfApi

from flexmarl.assemble.blueprint import check_model, model_source, refuse_simulated, settings_of_run
from flexmarl.assemble.residents import Materials
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.config import RunSettings
from flexmarl.config.run_settings import FromRun
from flexmarl.errors import ConfigError, FlexmarlError, boundary
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import plain
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.checkpoint import CheckpointFolder, RunState, Which
from flexmarl.orchestrator.saving import Checkpoints
from flexmarl.records import AgentName, PolicyName

Form = Literal["merged", "adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """One policy of a run, in a Hugging Face folder."""

    policy: PolicyName
    path: Path
    step: int
    """Steps of the run that had been done."""


def export_policies(
    settings: RunSettings, folder: RunFolder, out: Path, *, which: Which = "newest", form: Form | None = None
) -> list[Exported]:
    """Writes every trained policy of a checkpoint as a Hugging Face folder with a model card, `out/{policy}`.

    `form` None: as `training.lora.export` of the policy says. Raises ConfigError, also if a folder `out/{policy}` holds
    something; or CheckpointError.
    """
    refuse_simulated(settings)
    policies = sorted(map(PolicyName, settings.trained))
    for policy in policies:
        if (taken := out / policy).exists() and not (taken.is_dir() and not any(taken.iterdir())):
            raise ConfigError(f"OUT: '{taken}' exists already; use another folder, or remove it")
        if form == "adapter" and settings.policies[policy].training.lora is None:
            raise ConfigError(
                f"--adapter: policies.{policy}.training.lora is null, so that it has none; export it with --merged"
            )
    with CheckpointFolder(folder.checkpoints).reading(which) as checkpoint:
        return [_export(settings, folder, checkpoint, policy, out / policy, form) for policy in policies]


def _export(
    settings: RunSettings, folder: RunFolder, checkpoint: Path, policy: PolicyName, out: Path, form: Form | None
) -> Exported:
    check_model(settings, policy)
    state = asyncio.run(_write(settings, policy, checkpoint, out.absolute(), form))
    (out / "README.md").write_text(model_card(settings, folder, policy, state), encoding="utf-8")
    return Exported(policy=policy, path=out, step=state.step)


async def _write(settings: RunSettings, policy: PolicyName, checkpoint: Path, out: Path, form: Form | None) -> RunState:
    with _trainer_thread() as thread:
        materials = Materials(
            settings=settings,
            objects=InlineObjectStore(),
            device="cpu",
            open_store=lambda: SqliteStore(agents=list(map(AgentName, settings.team.agents)), columns=TURN_COLUMNS),
            thread=thread,
        )
        trainer = materials.make_trainer(policy)
        state = await Checkpoints(checkpoint.parent, keep=1).restore(checkpoint, {policy: trainer})
        await trainer.export(out, form)
        return state


@contextmanager
def _trainer_thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    try:
        yield thread
    finally:
        thread.close()


def with_starts(settings: RunSettings, into: Path) -> RunSettings:
    """Writes the policies that begin as those of another run into `into/{policy}`; their models are then these folders.

    Raises ConfigError that names the key if there is no such run, policy or checkpoint.
    """
    policies = dict(settings.policies)
    for name, policy in settings.policies.items():
        if isinstance(origin := policy.model, FromRun):
            key = f"policies.{name}.model"
            theirs, folder = settings_of_run(settings, origin, key)
            with boundary(ConfigError, f"{key}: taking '{origin.policy}' from {folder.path}"):
                path = (into / name).absolute()
                with CheckpointFolder(folder.checkpoints).reading(origin.step) as checkpoint:
                    _export(theirs, folder, checkpoint, PolicyName(origin.policy), path, "merged")
            policies[name] = policy.model_copy(update={"model": str(path)})
    return settings.model_copy(update={"policies": policies})


def push(exported: Mapping[str, Exported], *, public: bool, api: HfApi | None = None) -> Iterator[str]:
    """Uploads folders to the Hugging Face hub, by repository; yields the address of each. New ones are private.

    The token is that of `hf auth login` or HF_TOKEN. Raises FlexmarlError with what the hub answered.
    """
    hub = api or HfApi()
    for repository, one in exported.items():
        with boundary(FlexmarlError, f"--push {repository} (log in with `hf auth login`, or set HF_TOKEN)"):
            hub.create_repo(repository, private=not public, exist_ok=True)
            message = f"Policy {one.policy} after step {one.step}, trained with flexmarl"
            hub.upload_folder(repo_id=repository, folder_path=one.path, commit_message=message)
        yield f"{hub.endpoint}/{repository}"


def model_card(settings: RunSettings, folder: RunFolder, policy: PolicyName, state: RunState) -> str:
    """Writes the README.md of an exported policy: tasks, team, figures before and after, settings. Secrets are masked.

    The model's own path is shown only if it is a name on the hub, which is then also the card's `base_model`.
    """
    shown: Any = plain(settings)
    agents = {name: agent for name, agent in shown["team"]["agents"].items() if agent["policy"] == policy}
    workflow = shown["team"]["workflow"].get("name") or shown["team"]["workflow"]["type"]
    model = model_source(settings, policy)
    base = "" if Path(model).is_dir() else model
    head = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flexmarl", "reinforcement-learning", "multi-agent"],
        **({"base_model": base} if base else {}),
    }
    own = shown["policies"][policy] | {"model": base or Path(model).name}
    sections = {"tasks": shown["tasks"], "team": shown["team"], "policies": {policy: own}}
    sections |= {key: shown[key] for key in ("mode", "seed", "steps", "batch", "credit", "evaluate")}
    return "\n".join(
        [
            f"---\n{_yaml(head)}---",
            f"# {policy}, of the run {folder.path.name}\n",
            f"A policy of a team of language-model agents, trained with reinforcement learning by flexmarl: "
            f"{state.step} steps, version {state.versions[policy]}, from {base or 'a model of its own'}.",
            f"It acts as {', '.join(agents)} in the workflow `{workflow}`.\n",
            "## Figures\n",
            *_figures(folder, state.step),
            "\n## What it was trained on\n",
            f"Tasks of type {shown['tasks']['type']}, {shown['batch']['groups']} in a step with "
            f"{shown['batch']['episodes']} episodes each:\n",
            f"```yaml\n{_yaml({'tasks': shown['tasks']})}```\n",
            "Agents that it was trained as:\n",
            f"```yaml\n{_yaml(agents)}```\n",
            "## Settings\n",
            f"```yaml\n{_yaml(sections)}```",
            "",
        ]
    )


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)


def _figures(folder: RunFolder, step: int) -> Iterator[str]:
    """Table of the first evaluation and of the newest up to `step`."""
    steps = read_metrics(folder.metrics) if folder.metrics.is_file() else {}
    evaluated = {
        at: {
            name.removeprefix("eval/").removeprefix("team/"): value
            for name, value in values.items()
            if name[:5] == "eval/"
        }
        for at, values in steps.items()
        if at <= step
    }
    evaluated = {at: values for at, values in evaluated.items() if values}
    if not evaluated:
        yield "The run was not evaluated."
        return
    first, last = min(evaluated), max(evaluated)
    yield f"| on held-out tasks | step {first} | step {last} |"
    yield "|---|---|---|"
    for name in sorted(evaluated[last]):
        before = evaluated[first].get(name)
        yield f"| {name} | {'' if before is None else format(before, '.3f')} | {evaluated[last][name]:.3f} |"
