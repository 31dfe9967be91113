"""Network of a policy on one device: a Hugging Face causal LM, and what the settings attach to it.

         ┌── adapter      the part that is trained, if not all (LoRA)
model ───┼── value head   the critic's expectation at each token
         ├── reference    the initial weights of the run, which never change, for a divergence
         └── shape        the cost of passes along prefix trees, if the model can run along them
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmarl.cluster.torch_device import deterministic_kernels, place
from flexmarl.records import Sample
from flexmarl.training.backends.causal_lm import (
    DTYPES,
    precision,
    prepare_for_training,
    unbounded,
    unique_tensors,
)
from flexmarl.training.backends.forward import Pass, TokenOutputs, ValueHead, plan, run
from flexmarl.training.backends.lora import Adapter
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import shape_of, use_prefix_trees
from flexmarl.training.tree.merge import PrefixTree


class Reference(Protocol):
    """Access to the reference policy inside a block, in which nothing may be trained."""

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """A model that computes what the initial weights would."""
        ...


class FrozenCopy:
    """A second copy of the weights at the time when it is made. Make it before a checkpoint is loaded over them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Needs the memory of the weights once more, but no gradients or optimiser state."""
        self._copy = deepcopy(model).requires_grad_(False)

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The copy."""
        yield self._copy


class Network:
    """Network of one policy. It takes the model over: the model is cast, moved and updated in place.

    Its methods take samples that go through the model together, all with sampled tokens, and their tree if they are
    merged. A Tensor [N] holds one number for each of their N sampled tokens, in order.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainingSettings,
        *,
        device: str,
        seed: int,
        deterministic: bool = False,
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

    @property
    def has_reference(self) -> bool:
        """True if `reference_logprobs` may be called."""
        return self._reference is not None

    @property
    def has_values(self) -> bool:
        """True if `values` may be called."""
        return self._value_head is not None

    @property
    def beside(self) -> Mapping[str, nn.Parameter]:
        """Trained parameters that are not part of the model, by name."""
        return {} if self._value_head is None else dict(self._value_head.named_parameters(prefix="value_head"))

    def plan(self, samples: Sequence[Sample]) -> list[Pass]:
        """Divides samples into passes through the model."""
        return plan(samples, self._settings, self._shape, overhead=self._overhead)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which forward and backward passes must run."""
        with precision(self.model), deterministic_kernels(self.model.device, wanted=self._deterministic):
            yield

    def outputs(
        self, samples: Sequence[Sample], tree: PrefixTree | None, *, entropy_gradient: bool = False
    ) -> TokenOutputs:
        """Outputs with gradient. Call it, and its backward, inside `computing`."""
        return run(self.model, samples, tree=tree, value_head=self._value_head, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Log-probabilities under the current weights."""
        with self.computing():
            return run(self.model, samples, tree=tree).logprobs

    @torch.no_grad()
    def values(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Values of the critic."""
        with self.computing():
            values = run(self.model, samples, tree=tree, value_head=self._value_head).values
        assert values is not None, "asked of a network with a critic only"
        return values

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Log-probabilities under the initial weights."""
        assert self._reference is not None, "asked of a network with a reference only"
        with self._reference.model() as model, self.computing():
            return run(model, samples, tree=tree).logprobs

    def published(self) -> dict[str, Tensor]:
        """The weights that engines serve: those of the model by name, without tied duplicates; or the adapter alone."""
        if self._adapter is not None and self._settings.publish == "adapter":
            return self._adapter.published().as_tree()
        return dict(self._adapter.merged() if self._adapter is not None else unique_tensors(self.model))

    def unbounded(self, published: Mapping[str, Tensor]) -> list[str]:
        """Names of published tensors, or of layers merged from them, that are not finite or have no finite norm."""
        names = unbounded(published)
        if self._adapter is not None and self._settings.publish == "adapter":
            names = names or self._adapter.overflowing()
        return names

    def export(self, path: Path) -> None:
        """Writes a Hugging Face folder: the model, or the adapter alone if its settings say so."""
        if self._adapter is not None and self._adapter.settings.export == "adapter":
            self._adapter.export(path)
        else:
            merged = None if self._adapter is None else dict(self._adapter.merged())
            self.model.save_pretrained(path, state_dict=merged)
