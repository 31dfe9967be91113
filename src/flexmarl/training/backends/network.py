"""Network of a policy on one device: a Hugging Face causal LM, and what the settings attach to it.

         ┌── adapter      the part that is trained, if not all (peft's LoRA layers)
model ───┼── value head   the critic's expectation at each token
         ├── reference    the initial weights of the run, which never change, for a divergence
         └── shape        the cost of passes along prefix trees, if the model can run along them

base W ── frozen ──────────────┐
adapter A, B ── trained        ├──► published: W + (alpha / rank) B A, under the base's names, or the adapter alone
  │                            │    exported:  the same choice
  └── gradients, optimiser, checkpoints
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmarl.cluster.torch_device import deterministic_kernels, place, returning_heap
from flexmarl.errors import ConfigError, TrainingError, boundary
from flexmarl.imports import Lazy
from flexmarl.objects.interface import Checksum, PublishedAdapter, checksum
from flexmarl.records import Sample
from flexmarl.training.backends.causal_lm import DTYPES, precision, prepare_for_training, unbounded, unique_tensors
from flexmarl.training.backends.forward import Pass, TokenOutputs, ValueHead, plan, run
from flexmarl.training.backends.logprobs import head_form
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS
from flexmarl.training.settings import LoraSettings, TrainingSettings
from flexmarl.training.tree.attention import shape_of, use_prefix_trees
from flexmarl.training.tree.merge import PrefixTree

if TYPE_CHECKING:
    import peft
    from peft.tuners import lora
else:  # Only adapters need them, and every other command would wait for them.
    peft, lora = Lazy("peft"), Lazy("peft.tuners.lora")

ADAPTER = "default"
"""Name of the adapter. peft could hold several per model, and we have one."""
CANARY_TOKENS = 32
"""Tokens whose log-probabilities are published with a version: enough that no two versions agree on them."""
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
        self._check_targets(targets)
        self._factors = {
            name: (layer.get_parameter(f"lora_A.{ADAPTER}.weight"), layer.get_parameter(f"lora_B.{ADAPTER}.weight"))
            for name, layer in self._layers()
        }
        """A and B of each layer, by its name in the base."""
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
        self._anchor = {name: tensor.detach().clone() for name, tensor in self._named_factors()}

    @property
    def moved(self) -> bool:
        """True if the reference was reset."""
        return bool(self._anchor)

    def tensors(self) -> dict[str, Tensor]:
        """The reference's adapter, by name; empty before the first reset."""
        return dict(self._anchor)

    def take(self, tensors: Mapping[str, Tensor], *, moved: bool) -> None:
        """Restores what `tensors` returned."""
        self._anchor = {name: tensor.to(self._model.device) for name, tensor in tensors.items()}

    def _named_factors(self) -> Iterator[tuple[str, Tensor]]:
        for layer, (a, b) in self._factors.items():
            yield f"{layer}.A", a
            yield f"{layer}.B", b

    def _exchange(self) -> None:
        """Swaps the trained adapter and that of the reference. No tensor is copied."""
        for name, factor in self._named_factors():
            factor.data, self._anchor[name] = self._anchor[name], factor.data

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the base and the adapter together, under the base's names, without tied duplicates.

        Merged tensors are new: the base is only read, so that a thousand updates leave no rounding in it.
        """
        scaling = self.settings.alpha / self.settings.rank
        factors = {f"{name}{WRAPPED}.weight": of_layer for name, of_layer in self._factors.items()}
        for name, tensor in unique_tensors(self._model):
            if ".lora_" not in name:
                of_layer = factors.get(name)
                yield name.replace(WRAPPED, ""), merged(tensor, *of_layer, scaling) if of_layer else tensor

    def published(self) -> PublishedAdapter:
        """The adapter alone, with the checksum of the base, which is computed once."""
        if self._base is None:
            tensors = unique_tensors(self._model)
            self._base = checksum({name.replace(WRAPPED, ""): t for name, t in tensors if ".lora_" not in name})
        return PublishedAdapter(self._factors, self.settings.alpha / self.settings.rank, self._base)

    def overflowing(self) -> list[str]:
        """Names of layers whose A, B or merged weights may not be finite: their norms bound every number of B A."""
        numbers = [tensor.detach() for of_layer in self._factors.values() for tensor in of_layer]
        precise = torch.promote_types(self._model.dtype, torch.float32)
        of_a, of_b = torch.stack(torch._foreach_norm(numbers, dtype=precise)).double().view(-1, 2).unbind(1)
        scaling = self.settings.alpha / self.settings.rank
        bounded = scaling * of_a * of_b <= torch.finfo(self._model.dtype).max
        return [name for name, is_bounded in zip(self._factors, bounded.tolist(), strict=True) if not is_bounded]

    def export(self, path: Path) -> None:
        """Writes the adapter alone: `adapter_config.json` and `adapter_model.safetensors`."""
        path.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = peft.get_peft_model_state_dict(self._model, adapter_name=ADAPTER)
        save_file(
            {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in state.items()},
            path / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )
        self._config.save_pretrained(str(path))

    def _layers(self) -> "Iterator[tuple[str, lora.Linear]]":
        for name, module in self._model.named_modules():
            if isinstance(module, lora.Linear):
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


class Reference(Protocol):
    """Gives the reference policy for a block: `with reference.model() as model`. Nothing may be trained inside it.

    At first it is that of the initial weights.
    """

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """A model that computes what the reference would."""
        ...

    def reset(self) -> None:
        """Makes the present weights the reference."""
        ...

    @property
    def moved(self) -> bool:
        """True if it was reset, so that a checkpoint must hold it."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Its own tensors, by name; empty if it needs none."""
        ...

    def take(self, tensors: Mapping[str, Tensor], *, moved: bool) -> None:
        """Restores what `tensors` returned, and whether it was reset."""
        ...


class FrozenCopy:
    """A second copy of the weights at the time when it is made. Make it before a checkpoint is loaded over them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Needs the memory of the weights once more, but no gradients or optimiser state."""
        self._trained, self._copy = model, deepcopy(model).requires_grad_(False)
        self._is_initial = True

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The copy."""
        yield self._copy

    def reset(self) -> None:
        """Copies the weights again."""
        self.take(dict(unique_tensors(self._trained)), moved=True)

    @property
    def moved(self) -> bool:
        """True if they are not the initial weights any more."""
        return not self._is_initial

    def tensors(self) -> dict[str, Tensor]:
        """The copy's tensors."""
        return dict(unique_tensors(self._copy))

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor], *, moved: bool) -> None:
        """Copies the tensors. Raises TrainingError if there are none after a reset: the initial weights are gone."""
        if not tensors and not self._is_initial:
            raise TrainingError("the reference was reset, so its initial weights are gone; load into a new trainer")
        self._is_initial = not moved
        for name, tensor in unique_tensors(self._copy) if tensors else ():
            tensor.copy_(tensors[name])


class Network:
    """Network of one policy. It takes the model over: the model is cast, moved and updated in place.

    Its methods take samples that go through the model together, all with sampled tokens, and their tree if they are
    merged. A Tensor [N] holds one number for each of their N sampled tokens, in order.
    """

    def __init__(
        self, model: PreTrainedModel, settings: TrainingSettings, *, device: str, seed: int, deterministic: bool = False
    ) -> None:
        """`seed` sets the first weights of a new adapter. With `deterministic`, equal passes give equal bits."""
        self.model = model
        self._deterministic = deterministic
        self._settings = settings
        self._adapter = Adapter(model, settings.lora, seed=seed) if settings.lora is not None else None
        place(model, device, DTYPES[settings.dtype])
        prepare_for_training(model, activation_checkpointing=settings.activation_checkpointing)
        self._shape = use_prefix_trees(model, settings.tree)
        on_cuda = model.device.type == "cuda"
        self._overhead = shape_of(model).overhead_tokens if on_cuda else PASS_OVERHEAD_TOKENS
        self._reference: Reference | None = None
        if settings.kl is not None:
            self._reference = self._adapter or FrozenCopy(model)
        self._value_head = ValueHead(model) if settings.critic is not None else None
        self._form = head_form(model)

    @property
    def has_adapter(self) -> bool:
        """True if an adapter is trained, and the model's own weights stay as they are."""
        return self._adapter is not None

    @property
    def has_reference(self) -> bool:
        """True if `reference_logprobs` may be called."""
        return self._reference is not None

    @property
    def has_values(self) -> bool:
        """True if `values` may be called."""
        return self._value_head is not None

    @property
    def extra(self) -> Mapping[str, nn.Parameter]:
        """Trained parameters that are not part of the model, by name."""
        return {} if self._value_head is None else dict(self._value_head.named_parameters(prefix="value_head"))

    def plan(self, samples: Sequence[Sample]) -> list[Pass]:
        """Divides samples into passes through the model."""
        return plan(samples, self._settings, self._shape, overhead=self._overhead)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which forward and backward passes must run."""
        device = self.model.device
        with returning_heap(device), precision(self.model), deterministic_kernels(device, wanted=self._deterministic):
            yield

    def outputs(
        self, samples: Sequence[Sample], tree: PrefixTree | None, *, entropy_gradient: bool = False
    ) -> TokenOutputs:
        """Outputs with gradient. Call it, and its backward, inside `computing`."""
        return run(
            self.model,
            samples,
            tree=tree,
            value_head=self._value_head,
            entropy_gradient=entropy_gradient,
            form=self._form,
        )

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Log-probabilities under the current weights."""
        with self.computing():
            return run(self.model, samples, tree=tree, form=self._form).logprobs

    @torch.no_grad()
    def values(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Values of the critic."""
        with self.computing():
            values = run(self.model, samples, tree=tree, value_head=self._value_head, form=self._form).values
        assert values is not None, "asked of a network with a critic only"
        return values

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Log-probabilities under the initial weights."""
        assert self._reference is not None, "asked of a network with a reference only"
        with self._reference.model() as model, self.computing():
            return run(model, samples, tree=tree, form=self._form).logprobs

    @property
    def reference(self) -> Reference:
        """The reference policy. Raises TrainingError if there is none."""
        if self._reference is None:
            raise TrainingError("the policy has no reference to reset; set training.kl")
        return self._reference

    @torch.no_grad()
    def canary(self) -> dict[str, Tensor]:
        """Fixed ids, spread over the vocabulary, and their log-probabilities under the current weights (`canary_key`).

        One pass over CANARY_TOKENS tokens.
        """
        embeddings: Any = self.model.get_input_embeddings()
        ids = torch.arange(CANARY_TOKENS, device=self.model.device) * 7919 % embeddings.num_embeddings
        with self.computing():
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[1:, None])[:, 0]
        return {"ids": ids.cpu(), "logprobs": logprobs.cpu()}

    def published(self) -> dict[str, Tensor]:
        """The weights that engines serve: those of the model by name, without tied duplicates; or the adapter alone."""
        if self._adapter is not None and self._settings.publish == "adapter":
            return self._adapter.published().as_tree()
        return dict(self._adapter.merged() if self._adapter is not None else unique_tensors(self.model))

    def unbounded(self, published: Mapping[str, Tensor]) -> list[str]:
        """Names of published tensors that are not finite or have no finite norm; of an adapter, those of its layers."""
        if self._adapter is not None and self._settings.publish == "adapter":
            return self._adapter.overflowing()
        return unbounded(published)

    def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Writes a Hugging Face folder: the model, or the adapter alone if `form`, or else its settings, say so."""
        if self._adapter is not None and (form or self._adapter.settings.export) == "adapter":
            self._adapter.export(path)
        else:
            merged = None if self._adapter is None else dict(self._adapter.merged())
            self.model.save_pretrained(path, state_dict=merged)
