"""Makes the memory table of docs/howto/own_model.md from the settings of examples/math_team/gpu.yaml.

    python tests/docs/model_memory.py

No weights are loaded: the models are built without memory, from the shapes in their `config.json` on the hub.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config

from benchmarks.common import config_of_135m
from flexmarl.assemble.needed_memory import BYTES, TRAINER_BYTES, pass_of, size_of
from flexmarl.config import load_run
from flexmarl.config.run_settings import PolicySettings
from flexmarl.events.machine import GIB
from flexmarl.inference.backends.embedded.kv_cache import cached_numbers
from flexmarl.training.settings import LoraSettings
from tests.docs.pages import ROOT

CONFIG = ROOT / "examples" / "math_team" / "gpu.yaml"
HEAD = "| model | parameters | trainer, full | trainer, LoRA | engine | keys and values | a pass, full | a pass, LoRA |"


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


def table() -> str:
    """The whole table, in GiB for one policy with one engine."""
    policy = load_run(CONFIG).policies["solver"]
    lines = [HEAD, "|---|" + "---:|" * (HEAD.count("|") - 2)]
    for name, config in models().items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        lines.append("| " + " | ".join([f"`{name}`", *_cells(model, policy)]) + " |")
    return "\n".join(lines)


def _cells(model: PreTrainedModel, policy: PolicySettings) -> Iterator[str]:
    training, engine = policy.training, policy.engine
    parameters = model.num_parameters()
    adapter = adapter_parameters(model, LoraSettings())
    trained, held = TRAINER_BYTES[training.dtype], BYTES[training.dtype]
    passes = [
        pass_of(chosen, size_of(deepcopy(model), policy.model_copy(update={"training": chosen}))).num_bytes
        for chosen in (training, training.model_copy(update={"lora": LoraSettings()}))
    ]
    yield f"{parameters / 1e6:,.0f}M"
    for size in (
        parameters * trained,
        parameters * held + adapter * trained,
        parameters * BYTES[engine.dtype],
        engine.kv_blocks(deterministic=False) * engine.kv_bytes(cached_numbers(model)).block,
        *passes,
    ):
        yield f"{size / GIB:.1f}"


def adapter_parameters(model: PreTrainedModel, lora: LoraSettings) -> int:
    """Numbers in A and B of every linear layer but the head, for `target_modules: all-linear`."""
    head = model.get_output_embeddings()
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)


if __name__ == "__main__":
    print(table())
