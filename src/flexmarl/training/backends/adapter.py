"""LoRA adapter of a policy on peft: the part that is trained, on a base that stays as it is.

base W ── frozen ──────────────┐
adapter A, B ── trained        ├──► published: W + (alpha / rank) B A, under the base's names, or the adapter alone
  │                            │    exported:  the same choice
  └── gradients, optimiser, checkpoints
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmarl.errors import ConfigError, boundary
from flexmarl.imports import Lazy
from flexmarl.objects.interface import Checksum, PublishedAdapter, checksum
from flexmarl.training.backends.causal_lm import unique_tensors
from flexmarl.training.backends.ranks import as_whole, part, part_of
from flexmarl.training.settings import LoraSettings

if TYPE_CHECKING:
    import peft
    from peft.tuners import lora
else:  # Only adapters need them, and every other command would wait for them.
    peft, lora = Lazy("peft"), Lazy("peft.tuners.lora")

Factors = tuple[Mapping[str, tuple[Tensor, Tensor]], float]
"""A [rank, in] and B [out, rank] of layers, by name; and the scale of B A."""
ADAPTER = "default"
"""Name of the adapter. peft could hold several per model, and we have one."""
WRAPPED = ".base_layer"
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
        self._config = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType] - any number is divided by the rank
            target_modules=targets if isinstance(targets, str) else list(targets),
            task_type=peft.TaskType.CAUSAL_LM,
            base_model_name_or_path=model.name_or_path,
        )
        with torch.random.fork_rng(devices=[]), boundary(ConfigError, f"training.lora.target_modules {targets!r}"):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(self._config, model, ADAPTER)
        self._layers = [(name, module) for name, module in model.named_modules() if isinstance(module, lora.Linear)]
        self._check_targets(targets)
        self._anchor: dict[str, Tensor] = {}
        """The adapter of the last reset of the reference, by name; empty before the first one."""

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The model as the reference has it, inside the block: without its adapter, or with that of the last reset."""
        if self._anchor:
            self._exchange()
        else:
            self._enable(False)
        try:
            yield self._model
        finally:
            if self._anchor:
                self._exchange()
            else:
                self._enable(True)

    def reset(self) -> None:
        """Makes the present adapter that of the reference."""
        self._anchor = {name: tensor.detach().clone() for name, tensor in self.named_factors()}

    @property
    def _scaling(self) -> float:
        return self.settings.alpha / self.settings.rank

    @property
    def _factors(self) -> "dict[str, tuple[nn.Parameter, nn.Parameter]]":
        """A and B of each layer, by its name in the base."""
        return {
            name: (layer.lora_A[ADAPTER].get_parameter("weight"), layer.lora_B[ADAPTER].get_parameter("weight"))
            for name, layer in self._layers
        }

    @property
    def factors(self) -> "Factors":
        """A and B of each layer, by its name in the base, and the scale of their product."""
        return self._factors, self._scaling

    @property
    def reference_factors(self) -> "Factors":
        """The same for the reference: none before the first reset, when it is the base alone."""
        layers = self._layers if self._anchor else ()
        return {name: (self._anchor[f"{name}.A"], self._anchor[f"{name}.B"]) for name, _ in layers}, self._scaling

    @property
    def moved(self) -> bool:
        """True if the reference was reset."""
        return bool(self._anchor)

    def tensors(self) -> dict[str, Tensor]:
        """The reference's adapter, by name; empty before the first reset."""
        return dict(self._anchor)

    def take(self, tensors: Mapping[str, Tensor], *, moved: bool) -> None:
        """Restores what `tensors` returned."""
        own, device = dict(self.named_factors()), self._model.device
        self._anchor = {n: as_whole(part_of(t.to(device), own[n]), own[n].detach()) for n, t in tensors.items()}

    def named_factors(self) -> Iterator[tuple[str, Tensor]]:
        """A and B of each layer, as `{layer}.A` and `{layer}.B`."""
        for layer, (a, b) in self._factors.items():
            yield f"{layer}.A", a
            yield f"{layer}.B", b

    def _exchange(self) -> None:
        """Swaps the trained adapter and that of the reference, in place: ranks share the memory with their gathers."""
        for name, factor in self.named_factors():
            mine, others = part(factor.detach()), part(self._anchor[name])
            kept = mine.clone()
            mine.copy_(others)
            others.copy_(kept)

    def merged(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights of the base and the adapter together, under the base's names, from all tensors of the model.

        Merged tensors are new: the base is only read, so that a thousand updates leave no rounding in it.
        """
        for name, tensor in tensors.items():
            if ".lora_" not in name:
                layer = name.removesuffix(f"{WRAPPED}.weight")
                a, b = (tensors.get(f"{layer}.lora_{which}.{ADAPTER}.weight") for which in "AB")
                whole = tensor if a is None or b is None else merged(tensor, a, b, self._scaling)
                yield name.replace(WRAPPED, ""), whole

    def base(self) -> Checksum:
        """The checksum of the base, which is computed once."""
        if self._base is None:
            tensors = unique_tensors(self._model)
            self._base = checksum({name.replace(WRAPPED, ""): t for name, t in tensors if ".lora_" not in name})
        return self._base

    def published(self, factors: Mapping[str, Tensor]) -> PublishedAdapter:
        """The adapter alone, from its factors as `named_factors` names them, with the checksum of the base."""
        layers = {layer: (factors[f"{layer}.A"], factors[f"{layer}.B"]) for layer, _ in self._layers}
        return PublishedAdapter(layers, self._scaling, self.base())

    def overflowing(self, published: Mapping[str, Tensor]) -> list[str]:
        """Names of layers whose A, B or merged weights may not be finite: their norms bound every number of B A."""
        numbers = [published[f"{name}.lora_{which}"].detach() for name, _ in self._layers for which in "AB"]
        precise = torch.promote_types(self._model.dtype, torch.float32)
        of_a, of_b = torch.stack(torch._foreach_norm(numbers, dtype=precise)).double().view(-1, 2).unbind(1)
        bounded = self._scaling * of_a * of_b <= torch.finfo(self._model.dtype).max
        return [name for (name, _), is_bounded in zip(self._layers, bounded.tolist(), strict=True) if not is_bounded]

    def export(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Writes the adapter alone: `adapter_config.json` and `adapter_model.safetensors`, of the model's tensors."""
        path.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = peft.get_peft_model_state_dict(
            self._model, state_dict=dict(tensors), adapter_name=ADAPTER
        )
        save_file(
            {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in state.items()},
            path / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        self._config.save_pretrained(str(path))

    def _enable(self, enabled: bool) -> None:
        for _, layer in self._layers:
            layer.enable_adapters(enabled)

    def _check_targets(self, targets: object) -> None:
        wrapped = {name for name, module in self._model.named_modules() if hasattr(module, "base_layer")}
        if other := wrapped - {name for name, _ in self._layers}:
            raise ConfigError(
                f"training.lora.target_modules {targets!r}: '{min(other)}' is no linear layer; leave it out"
            )
        head = self._model.get_output_embeddings()
        tied = self._model.config.get_text_config().tie_word_embeddings
        if tied and isinstance(head, lora.Linear):
            raise ConfigError(
                f"training.lora.target_modules {targets!r}: the head's weight is that of the embeddings too, and one "
                f"merged weight cannot be both; leave the head out"
            )


@torch.no_grad()
def merged(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + scaling B A. The bits are peft's, which makes the product in float32 for a 16-bit type on a CPU."""
    if base.device.type == "cpu" and a.dtype in (torch.float16, torch.bfloat16):
        return torch.add(base, (b.float() @ a.float()).mul_(scaling).to(a.dtype))
    return torch.add(base, (b @ a).mul_(scaling))
