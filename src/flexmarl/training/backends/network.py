"""Network of a policy on one device: a Hugging Face causal LM, and what the settings attach to it.

         ┌── adapter      the part that is trained, if not all (peft's LoRA layers)
model ───┼── value head   the critic's expectation at each token
         ├── reference    the initial weights of the run, which never change, for a divergence
         └── shape        the cost of passes along prefix trees, if the model can run along them
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmarl.cluster.torch_device import deterministic_kernels, place, returning_heap, with_threads
from flexmarl.errors import TrainingError
from flexmarl.records import Sample
from flexmarl.training.backends.adapter import Adapter
from flexmarl.training.backends.causal_lm import DTYPES, precision, prepare_for_training, unbounded, unique_tensors
from flexmarl.training.backends.forward import Pass, TokenOutputs, ValueHead, inputs_of, plan, run
from flexmarl.training.backends.logprobs import head_form_of_kind
from flexmarl.training.backends.ranks import ALONE, Ranks, part, part_of
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS
from flexmarl.training.partition import partition
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import shape_of, use_prefix_trees
from flexmarl.training.tree.merge import PrefixTree

CANARY_TOKENS = 8
"""Tokens of a canary: enough that no two versions agree on their log-probabilities. A load waits for them twice."""


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

    @property
    def copy(self) -> PreTrainedModel:
        """The copy."""
        return self._copy

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
            part(tensor.detach()).copy_(part_of(tensors[name], tensor))


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
        ranks: Ranks = ALONE,
    ) -> None:
        """`seed` sets the first weights of a new adapter. With `deterministic`, equal passes give equal bits.

        Each of several `ranks` has its part of model, reference and value head; what is whole is seen before.
        """
        self.model, self.ranks = model, ranks
        self._dtype = DTYPES[settings.dtype]
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
        self._form = head_form_of_kind(model)
        if ranks.world > 1:
            self._shard()

    def _shard(self) -> None:
        if self._adapter is not None and self._settings.publish == "adapter":
            self._adapter.base()
        self.ranks.shard(self.model, compute=self._dtype)
        if isinstance(self._reference, FrozenCopy):
            self.ranks.shard(self._reference.copy, compute=self._dtype)
        if self._value_head is not None:
            self.ranks.shard(self._value_head)
        with torch.no_grad(), self.computing():  # FSDP2 asks in the first pass what is trained: the adapter is on now.
            self.model(input_ids=torch.tensor([[0, 1]], device=self.model.device), use_cache=False)

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

    @property
    def adapter(self) -> Adapter | None:
        """The part that is trained; None if it is the whole model."""
        return self._adapter

    @property
    def value_head(self) -> ValueHead | None:
        """The critic's part; None without a critic."""
        return self._value_head

    def plan_rows(self, samples: Sequence[Sample]) -> list[Pass]:
        """Divides samples into passes of padded rows; none goes along a tree."""
        return plan(samples, self._settings, overhead=self._overhead)

    def plan(self, samples: Sequence[Sample]) -> list[Pass]:
        """Divides samples into passes through the model.

        Together: of several ranks, each gets passes over its own samples, and all get equally many, idle ones included.
        """
        if self.ranks.world == 1 or not samples:
            return plan(samples, self._settings, self._shape, overhead=self._overhead)
        inputs, names = [inputs_of(sample) for sample in samples], [sample.turn.sample_id for sample in samples]
        mine = np.array(partition(inputs, names, self.ranks.world)[self.ranks.number], dtype=np.int64)
        passes = plan([samples[row] for row in mine], self._settings, self._shape, overhead=self._overhead)
        shortest = min(range(len(inputs)), key=lambda row: (len(inputs[row]), names[row]))
        idle = Pass(np.array([shortest]), idle=True)
        most = max(self.ranks.everyone(len(passes)))
        own = [replace(together, rows=mine[together.rows]) for together in passes]
        return own + [idle] * (most - len(passes))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which forward and backward passes must run."""
        device = self.model.device
        kernels = deterministic_kernels(device, wanted=self._deterministic)
        with returning_heap(device), precision(self.model), kernels, self.ranks.computing(self.model):
            yield

    def outputs(
        self, samples: Sequence[Sample], tree: PrefixTree | None, *, entropy_gradient: bool = False
    ) -> TokenOutputs:
        """Outputs with gradient. Call it, and its backward, inside `computing`."""
        return self._run(self.model, samples, tree, value_head=self._value_head, entropy_gradient=entropy_gradient)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Log-probabilities under the current weights."""
        with self.computing():
            return self._run(self.model, samples, tree).logprobs

    @torch.no_grad()
    def values(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Values of the critic."""
        with self.computing():
            values = self._run(self.model, samples, tree, value_head=self._value_head).values
        assert values is not None, "asked of a network with a critic only"
        return values

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[Sample], tree: PrefixTree | None) -> Tensor:
        """Log-probabilities under the initial weights."""
        assert self._reference is not None, "asked of a network with a reference only"
        with self._reference.model() as model, self.computing(), self.ranks.computing(model):
            return self._run(model, samples, tree).logprobs

    def _run(
        self, model: PreTrainedModel, samples: Sequence[Sample], tree: PrefixTree | None, **options: Any
    ) -> TokenOutputs:
        return run(model, samples, tree=tree, form=self._form, dtype=self._dtype, **options)

    @property
    def reference(self) -> Reference:
        """The reference policy. Raises TrainingError if there is none."""
        if self._reference is None:
            raise TrainingError("the policy has no reference to reset; set training.kl")
        return self._reference

    @torch.no_grad()
    def canary(self) -> dict[str, Tensor]:
        """Fixed ids, spread over the vocabulary, and the log-probability of each after all of them (`canary_key`)."""
        embeddings: Any = self.model.get_input_embeddings()
        ids = torch.arange(CANARY_TOKENS, device=self.model.device) * 7919 % embeddings.num_embeddings
        with with_threads(1), self.computing():  # Several would wait for each other where an engine has the cores.
            logits = self.model(input_ids=ids[None], use_cache=False, logits_to_keep=1).logits[0, -1]
        return {"ids": ids.cpu(), "logprobs": torch.log_softmax(logits.float(), -1)[ids].cpu()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the model by name, without tied duplicates, in the type in which it computes."""
        return self._computed(dict(unique_tensors(self.model)))

    def _computed(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.ranks.world == 1:
            return dict(found)
        return {name: t.to(self._dtype) if t.is_floating_point() else t for name, t in found.items()}

    def published(self) -> dict[str, Tensor]:
        """The weights that engines serve: those of the model by name, without tied duplicates; or the adapter alone.

        Together; empty on all ranks but the first.
        """
        if self._adapter is not None and self._settings.publish == "adapter":
            factors = self.ranks.whole(self._computed(dict(self._adapter.named_factors())))
            return self._adapter.published(factors).as_tree() if factors else {}
        tensors = self.ranks.whole(self.tensors())
        return tensors if self._adapter is None else dict(self._adapter.merged(tensors))

    def unbounded(self, published: Mapping[str, Tensor]) -> list[str]:
        """Names of published tensors that are not finite or have no finite norm; of an adapter, those of its layers."""
        if self._adapter is not None and self._settings.publish == "adapter":
            return self._adapter.overflowing(published)
        return unbounded(published)

    def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Writes a Hugging Face folder: the model, or the adapter alone if `form`, or else its settings, say so.

        Together.
        """
        tensors = self.ranks.whole(self.tensors())
        self.ranks.first(lambda: self._write(path, form, tensors))

    def _write(self, path: Path, form: Literal["merged", "adapter"] | None, tensors: Mapping[str, Tensor]) -> None:
        if self._adapter is not None and (form or self._adapter.settings.export) == "adapter":
            self._adapter.export(path, tensors)
        else:
            whole = None if self.ranks.world == 1 else dict(tensors)
            merged = whole if self._adapter is None else dict(self._adapter.merged(tensors))
            self.model.save_pretrained(path, state_dict=merged)
