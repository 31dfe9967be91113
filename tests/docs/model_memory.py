"""Makes the tables of docs/howto/own_model.md: memory by model, and the settings of examples/real_team by model.

    python tests/docs/model_memory.py

Memory is what `flexmarl check` says of one policy with the settings of examples/math_team/gpu.yaml and the embedded
engine. No weights are loaded: the models are built without memory, from the shapes in their `config.json` on the hub.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from benchmarks.common import config_of_135m
from flexmarl.assemble.needed_memory import parts, size_of
from flexmarl.config import RunSettings, load_run
from flexmarl.events.machine import GIB
from tests.docs.pages import ROOT

CONFIG = ROOT / "examples" / "math_team" / "gpu.yaml"
SMALL, LARGE = (ROOT / "examples" / "real_team" / name for name in ("cpu.yaml", "gpu.yaml"))
EMBEDDED = {"policies.solver.engine.type": "embedded", "policies.solver.engine.kv_gib": None}
TRAINER = ("trainers' weights", "optimiser", "gradients")
"""Parts that a trainer holds."""
HEAD = (
    "| model | parameters | in all, full | in all, LoRA | trainer, full | trainer, LoRA | engine | keys and values "
    "| a pass, full | a pass, LoRA |"
)
CHANGES = (
    "cluster.device",
    "policies.solver.model",
    "policies.solver.engine.max_len",
    "policies.solver.engine.dtype",
    "policies.solver.training.lora.rank",
    "policies.solver.training.optimizer.learning_rate",
    "policies.solver.training.max_tokens_per_forward",
    "policies.solver.training.activation_checkpointing",
    "team.agents.solver.tell_tools",
    "team.agents.solver.chat_template_kwargs",
    "team.agents.solver.sampling.max_tokens",
    "batch.groups",
    "batch.episodes",
    "steps",
)
"""Keys of the two configs of the real team that the page compares."""


def models() -> Mapping[str, PreTrainedConfig]:
    """Shapes of some small instruct models by name on the hub."""
    return {
        "HuggingFaceTB/SmolLM2-135M-Instruct": config_of_135m(),
        "Qwen/Qwen2.5-0.5B-Instruct": Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        "Qwen/Qwen2.5-1.5B-Instruct": Qwen2Config(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        "Qwen/Qwen3-4B": Qwen3Config(
            vocab_size=151936,
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        "Qwen/Qwen2.5-7B-Instruct": Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
        ),
    }


def memory(settings: RunSettings, model: PreTrainedConfig) -> Mapping[str, float]:
    """GiB by part, as `flexmarl check` says it, if all policies of the run have this model and its longest requests."""
    sizes = {name: size_of(built(model), policy) for name, policy in settings.policies.items()}
    return {part.name: part.num_bytes / GIB for part in parts(settings, sizes)}


def alone(settings: RunSettings) -> RunSettings:
    """The run with the policy of its solver only."""
    return settings.model_copy(update={"policies": {"solver": settings.policies["solver"]}})


def built(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a shape, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def table() -> str:
    """The table of memory, in GiB for one policy with one engine."""
    lines = [HEAD, "|---|" + "---:|" * (HEAD.count("|") - 2)]
    for name, config in models().items():
        lines.append("| " + " | ".join([f"`{name}`", *_cells(config)]) + " |")
    return "\n".join(lines)


def _cells(model: PreTrainedConfig) -> Iterator[str]:
    full = memory(alone(load_run(CONFIG, EMBEDDED)), model)
    lora = memory(alone(load_run(CONFIG, EMBEDDED | {"policies.solver.training.lora": {}})), model)
    yield f"{built(model).num_parameters() / 1e6:,.0f}M"
    for size in (
        sum(full.values()),
        sum(lora.values()),
        sum(full[part] for part in TRAINER),
        sum(lora[part] for part in TRAINER),
        full["engines' weights"],
        full["keys and values"],
        full["a pass"],
        lora["a pass"],
    ):
        yield f"{size:.1f}"


def changes() -> str:
    """The table of settings: the real team with a model of 0.1B parameters and with one of 4B."""
    runs = load_run(SMALL), load_run(LARGE)
    small, large = (run.model_dump() for run in runs)
    lines = ["| key | `cpu.yaml` | `gpu.yaml` |", "|---|---|---|"]
    for key in CHANGES:
        name = key.removeprefix("policies.solver.").removeprefix("team.agents.solver.")
        lines.append(f"| `{name}` | {_shown(small, key)} | {_shown(large, key)} |")
    found = [memory(run, model) for run, model in zip(runs, (config_of_135m(), models()["Qwen/Qwen3-4B"]), strict=True)]
    keys_and_values = " | ".join(f"{one['keys and values']:.1f}" for one in found)
    others = ("keys and values", "libraries")
    rest = " | ".join(f"{sum(gib for part, gib in one.items() if part not in others):.1f}" for one in found)
    lines += [
        f"| memory without keys and values, GiB | {rest} |",
        f"| keys and values at most, GiB | {keys_and_values} |",
    ]
    return "\n".join(lines)


def _shown(config: Mapping[str, Any], key: str) -> str:
    value = reduce(lambda inner, name: inner[name], key.split("."), config)
    return "" if value is None or value == {} else f"`{value}`".lower() if isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    print(table(), changes(), sep="\n\n")
