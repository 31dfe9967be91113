"""Decides which settings of a valid config have a price. `check` prints these cautions, and `train` when it begins."""

import json
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from flexmarl.agents.black_box import Command
from flexmarl.agents.settings import SamplingSettings
from flexmarl.config.run_settings import RunSettings
from flexmarl.imports import Lazy
from flexmarl.inference.settings import is_timed
from flexmarl.orchestrator.settings import Mode, PipelineSettings
from flexmarl.sandbox.settings import SandboxSettings
from flexmarl.tools import Syntax, Tool, ToolCall
from flexmarl.tools.arguments import example_of, only_argument_of
from flexmarl.tools.interface import each_tool

if TYPE_CHECKING:
    from flexmarl.cluster import torch_device
else:
    torch_device = Lazy("flexmarl.cluster.torch_device")  # It imports torch, which takes seconds.

_CONTINUOUS = (Mode.ASYNC, Mode.FIFO, Mode.GREEDY)
READ_IN: Mapping[str, tuple[Mode, ...]] = {
    "lag": _CONTINUOUS,
    "max_lag": _CONTINUOUS,
    "window": (Mode.ASYNC,),
    "head_deadline_s": (Mode.ONE_STEP_OFF, *_CONTINUOUS),
    "late": (Mode.ONE_STEP_OFF, *_CONTINUOUS),
}
"""The modes that read a key of `pipeline`. `ahead` and `updates` are refused elsewhere: `config/fits.py`."""

OPENCODE_CONFIG = "OPENCODE_CONFIG_CONTENT"
OPENCODE_OFFLINE = tuple(
    f"OPENCODE_DISABLE_{what}" for what in ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
)
"""Variables of the opencode CLI: its config as JSON; those with the value 1 keep it from asking the network."""
OPENCODE_MIB = 1024
"""Memory with room for opencode 1.18: it took 530 to 660 MiB, and a box with 512 ended it."""


class Caution(NamedTuple):
    """A setting that works, but not as well as it could."""

    key: str
    """The setting's key, e.g. `team.agents.solver.sampling`."""
    price: str
    """The setting's value, and what it costs."""
    instead: str
    """The setting to use instead, without this cost."""

    def __str__(self) -> str:
        return f"{self.key}: {self.price}; {self.instead}"


def cautions(settings: RunSettings) -> list[Caution]:
    """Returns all cautions of a valid config, from those of engines to that of the agent that is run."""
    return [
        *_of_timed_engines(settings),
        *_of_types(settings),
        *_of_rates(settings),
        *_of_older_versions(settings),
        *_of_pipeline(settings),
        *_of_sampling(settings),
        *_of_tools(settings),
        *_of_depth(settings),
        *_of_opencode(settings),
    ]


def _of_timed_engines(settings: RunSettings) -> Iterator[Caution]:
    """Finds policies that are trained on replies which their weights did not give."""
    timed = [name for name in sorted(settings.trained) if is_timed(settings.policies[name].engine)]
    if timed and settings.cluster.backend != "simulated":
        yield Caution(
            f"policies.{timed[0]}.engine.type" if len(timed) == 1 else "policies",
            f"engine.type of {', '.join(timed)} is 'timed': trained on the replies of `simulation.replies`, which are "
            f"no samples of the weights, so that updates and publications take real time and mean nothing",
            "use it to try out times, sizes and settings, and type: embedded to learn",
        )


def _of_types(settings: RunSettings) -> Iterator[Caution]:
    """Finds bfloat16 on a CPU that has no instructions for it."""
    keys = [
        f"policies.{name}.{key}.dtype"
        for name, policy in settings.policies.items()
        for key, of in (("engine", policy.engine), ("training", policy.training))
        if getattr(of, "dtype", None) == "bfloat16"
    ]
    if not keys or settings.cluster.device != "cpu" or settings.cluster.backend == "simulated":
        return
    if not torch_device.cpu_multiplies_bfloat16():
        yield Caution(
            keys[0],
            "bfloat16, for which this CPU has no instructions: large products take at least four times as long as in "
            "float32",
            f"use {' '.join(f'{key}=float32' for key in keys)}",
        )


def _of_rates(settings: RunSettings) -> Iterator[Caution]:
    """Finds learning rates that are 0 before the run ends, as in a run with a decay made longer, or never reached."""
    for policy in sorted(settings.trained):
        schedule = settings.policies[policy].training.schedule
        if schedule.warmup_steps > settings.steps:
            yield Caution(
                f"policies.{policy}.training.schedule.warmup_steps",
                f"{schedule.warmup_steps} updates, and the run has steps={settings.steps}: it ends before the learning "
                "rate is reached",
                f"use at most warmup_steps={settings.steps}, or more steps",
            )
        if schedule.decay_steps is not None and schedule.decay_steps < settings.steps and not schedule.min_ratio:
            yield Caution(
                f"policies.{policy}.training.schedule.decay_steps",
                f"the rate is 0 from update {schedule.decay_steps} on, and the run has steps={settings.steps}: later "
                f"updates change no weight. A resumed run keeps the rates that it began with",
                f"use a new run with decay_steps={settings.steps} or min_ratio above 0, or at most "
                f"steps={schedule.decay_steps}",
            )


def _uncorrected(settings: RunSettings) -> list[str]:
    policies = settings.policies
    return [name for name in sorted(settings.trained) if policies[name].training.correction.type == "none"]


def _of_older_versions(settings: RunSettings) -> Iterator[Caution]:
    """Finds off-policy modes without a correction (docs/math.md section 10)."""
    for policy in _uncorrected(settings) if not settings.mode.synchronous else ():
        yield Caution(
            f"policies.{policy}.training.correction",
            f"type none in mode '{settings.mode.value}': the loss treats tokens of older versions as samples of "
            f"the current weights; only its clipping limits how far they move them",
            "use type: tis",
        )


def _of_pipeline(settings: RunSettings) -> Iterator[Caution]:
    """Finds keys that the mode does not read, with another value than the default."""
    pipeline, defaults = settings.pipeline, PipelineSettings()
    for key, modes in READ_IN.items():
        if (value := getattr(pipeline, key)) != getattr(defaults, key) and settings.mode not in modes:
            yield Caution(
                f"pipeline.{key}",
                f"{value} has no effect in mode '{settings.mode.value}'",
                f"leave it out, or use mode={' or '.join(mode.value for mode in modes)}",
            )


def _of_sampling(settings: RunSettings) -> Iterator[Caution]:
    """Finds sampling that the loss does not account for (docs/math.md section 4)."""
    uncorrected = _uncorrected(settings)
    for agent, seat in settings.team.agents.items():
        if seat.policy in uncorrected and (changed := _changed(seat.sampling)):
            yield Caution(
                f"team.agents.{agent}.sampling",
                f"{changed}, but the loss takes log-probabilities at temperature 1 without filters: rewarded "
                f"tokens come from one distribution, and another one is trained",
                f"use temperature=1 without filters, or policies.{seat.policy}.training.correction={{type: tis}}",
            )


def _changed(sampling: SamplingSettings) -> str:
    plain = SamplingSettings()
    shown = ("temperature", "top_p", "top_k", "min_p")
    return ", ".join(
        f"{name} {getattr(sampling, name):g}" for name in shown if getattr(sampling, name) != getattr(plain, name)
    )


def _of_tools(settings: RunSettings) -> Iterator[Caution]:
    """Finds tools with several arguments under a syntax whose calls hold one text, unless the role prompt shows how."""
    for name, agent in settings.team.agents.items():
        if (syntax := agent.syntax) == "auto":  # All families of models have a place for several arguments.
            continue
        for tool in each_tool(agent.tools):
            call = _call_of_one_text(tool, syntax)
            if call and call.partition("{")[0] + "{" not in agent.system:
                several = ", ".join(tool.parameters["properties"])
                yield Caution(
                    f"team.agents.{name}.syntax",
                    f"a call in syntax '{syntax.type}' holds one text, and the tool {tool.name!r} has several "
                    f"arguments: {several}. Only a JSON object is read as them, any other text is answered with an "
                    f"error",
                    f"show in team.agents.{name}.system how to write them, {call!r}, or use syntax: auto",
                )


def _call_of_one_text(tool: Tool, syntax: Syntax) -> str:
    """A call of a tool with several arguments in a syntax whose calls hold one text; "" for others."""
    properties = tool.parameters.get("properties", {})
    if len(properties) < 2 or only_argument_of(tool.parameters) is not None:
        return ""
    values = {name: example_of(one) for name, one in properties.items()}
    try:
        syntax.render(ToolCall(tool.name, values))
        return ""
    except KeyError:  # It has no word for the tool.
        return ""
    except ValueError:
        return syntax.render(ToolCall(tool.name, json.dumps(values)))


def _of_depth(settings: RunSettings) -> Iterator[Caution]:
    candidates = getattr(settings.team.workflow, "candidates", 1)
    for where, term in settings.credit.terms.items() if candidates > 1 else ():
        if (first := term.first_by_last) is not None:
            yield Caution(
                f"credit.{where}",
                f"{term.name} weighs rewards by depth, but each turn of a tree is rewarded for itself: the first one "
                f"counts {first:.3g} times the last, and turns of different depths are compared on different scales",
                "leave it out, or compare within a turn: credit.estimator.type=atgrpo",
            )


def _of_opencode(settings: RunSettings) -> Iterator[Caution]:
    """Finds what the opencode CLI lacks in a box, if it is the command that plays the seats."""
    command = settings.team.workflow
    if not isinstance(command, Command) or "opencode" not in {PurePath(word).stem for word in command.argv}:
        return
    given = command.env.get(OPENCODE_CONFIG, "")
    if lacking := [text for text in ("@ai-sdk/openai-compatible", "{openai_url}", "{key}") if text not in given]:
        yield Caution(
            f"team.workflow.env.{OPENCODE_CONFIG}",
            f"it does not name {lacking[0]}, so that opencode asks a provider that its box cannot reach",
            'set a provider with "npm": "@ai-sdk/openai-compatible" and "options": {"baseURL": "{openai_url}", '
            '"apiKey": "{key}"}, whose models are the seats (docs/howto/black_box.md)',
        )
    if online := [name for name in OPENCODE_OFFLINE if command.env.get(name) != "1"]:
        yield Caution(
            "team.workflow.env",
            f"without {', '.join(online)} opencode asks the network at each start, which its box does not have",
            'set them to "1"',
        )
    if isinstance(settings.sandbox, SandboxSettings) and settings.sandbox.memory_mib < OPENCODE_MIB:
        yield Caution(
            "sandbox.memory_mib",
            f"{settings.sandbox.memory_mib} is less than opencode takes, and a box that takes more is ended",
            f"use {OPENCODE_MIB}",
        )
