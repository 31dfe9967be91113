"""peft's LoRA layers in a model: the adapter is trained, and the base never changes.

base W ── frozen ──────────────┐
adapter A, B ── trained        ├──► published: W + (alpha / rank) B A, under the base's names, or the adapter alone
  │                            │    exported:  the same choice
  └── gradients, optimiser, checkpoints
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.errors import ConfigError, boundary
from flexmarl.objects.adapter import PublishedAdapter
from flexmarl.objects.interface import Checksum, checksum
from flexmarl.training.backends.causal_lm import unique_tensors
from flexmarl.training.settings import LoraSettings

NAME = "default"
"""Name of the adapter. peft could hold several per model, and we have one."""
BASE = ".base_layer"
"""Part that peft inserts into the parameter names of a layer that it has wrapped."""


class Adapter:
    """The adapter of one model. At first it changes nothing: A is random, B is 0."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, *, seed: int) -> None:
        """Wraps the model's linear layers in place and freezes everything else. Equal seeds give equal adapters.

        Raises ConfigError if `target_modules` fits no layer, a layer that is not linear, or a head whose weight is also
        that of the embeddings.
        """
        self._model, self.settings = model, settings
        self._base: Checksum | None = None
        targets = settings.target_modules
        self._config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType] - any number is divided by the rank
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type=TaskType.CAUSAL_LM,
            base_model_name_or_path=model.name_or_path,
        )
        with torch.random.fork_rng(devices=[]), boundary(ConfigError, f"training.lora.target_modules {targets!r}"):
            torch.manual_seed(seed)
            inject_adapter_in_model(self._config, model, NAME)
        self._check_targets(targets)

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The model without its adapter, inside the block. It computes what the initial weights would (`Reference`)."""
        self._enable(False)
        try:
            yield self._model
        finally:
            self._enable(True)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the base and the adapter together, under the base's names, without tied duplicates.

        Merged tensors are new: the base is only read, so that a thousand updates leave no rounding in it.
        """
        layers = {f"{name}{BASE}.weight": layer for name, layer in self._layers()}
        for name, tensor in unique_tensors(self._model):
            if ".lora_" not in name:
                yield name.replace(BASE, ""), _merged(layers[name]) if name in layers else tensor

    def published(self) -> PublishedAdapter:
        """The adapter alone, with the checksum of the base, which is computed once."""
        if self._base is None:
            tensors = unique_tensors(self._model)
            self._base = checksum({name.replace(BASE, ""): t for name, t in tensors if ".lora_" not in name})
        return PublishedAdapter(
            {
                name: (layer.get_parameter(f"lora_A.{NAME}.weight"), layer.get_parameter(f"lora_B.{NAME}.weight"))
                for name, layer in self._layers()
            },
            self.settings.alpha / self.settings.rank,
            self._base,
        )

    def overflowing(self) -> list[str]:
        """Names of layers whose merged weights may not be finite: the norms of A and B bound every number of B A."""
        most = torch.finfo(self._model.dtype).max
        scaling = self.settings.alpha / self.settings.rank
        found: list[str] = []
        for name, (a, b) in self.published().layers.items():
            bound = scaling * a.detach().double().norm() * b.detach().double().norm()
            if not bound <= most:
                found.append(name)
        return found

    def export(self, path: Path) -> None:
        """Writes the adapter alone: `adapter_config.json` and `adapter_model.safetensors`."""
        path.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = get_peft_model_state_dict(self._model, adapter_name=NAME)
        save_file(
            {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in state.items()},
            path / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        self._config.save_pretrained(str(path))

    def _layers(self) -> Iterator[tuple[str, LoraLinear]]:
        for name, module in self._model.named_modules():
            if isinstance(module, LoraLinear):
                yield name, module

    def _enable(self, enabled: bool) -> None:
        for _, layer in self._layers():
            layer.enable_adapters(enabled)

    def _check_targets(self, targets: object) -> None:
        wrapped = {name for name, module in self._model.named_modules() if hasattr(module, "base_layer")}
        if other := wrapped - {name for name, _ in self._layers()}:
            raise ConfigError(
                f"training.lora.target_modules {targets!r}: '{min(other)}' is no linear layer; leave it out"
            )
        head = self._model.get_output_embeddings()
        tied = self._model.config.get_text_config().tie_word_embeddings
        if tied and isinstance(head, LoraLinear):
            raise ConfigError(
                f"training.lora.target_modules {targets!r}: the head's weight is that of the embeddings too, and one "
                f"merged weight cannot be both; leave the head out"
            )


@torch.no_grad()
def _merged(layer: LoraLinear) -> Tensor:
    base = layer.get_parameter("base_layer.weight")
    return base + layer.get_delta_weight(NAME)
