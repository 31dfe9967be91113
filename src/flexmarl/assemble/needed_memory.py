"""Memory that a run takes at its peak, part by part, from the shapes of its models.

No weights are loaded: what a pass keeps until its backward is counted on a model without memory. The peak is reached in
a pass of a trainer, when gradients, their sums and the optimiser's moments are there beside the engines, or when a
version is published. In one process (`cluster.backend: inline`) passes run one after the other, on Ray side by side. In
mode `colocated` on Ray, engines give up what they have before a pass.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmarl.config import RunSettings
from flexmarl.config.run_settings import PolicySettings
from flexmarl.events.machine import GIB
from flexmarl.inference.backends.embedded.kv_cache import attention_shape, cached_numbers
from flexmarl.inference.settings import (
    VLLM_CPU_KV_GIB,
    VLLM_RANKS,
    VLLM_SHARE,
    EmbeddedSettings,
    VllmSettings,
    computes,
)
from flexmarl.training.backends.causal_lm import DTYPES
from flexmarl.training.backends.logprobs import BLOCK_LOGITS, LEAN_FROM, is_linear
from flexmarl.training.backends.network import Adapter
from flexmarl.training.settings import TrainingSettings

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_COUNTED_TOKENS = 2
"""Tokens of the pass that is counted: few, as the attention that is counted keeps a number for each pair of them."""
_LOGIT_ARRAYS = 4
"""Arrays [N, V] at the peak of log-probabilities that are made from all logits at once."""
_LEAN_ARRAYS = 4
"""Arrays of a block's size at the peak of lean log-probabilities."""

_HEAP = 1.23
"""Memory by which a pass on a CPU makes a process grow, by the bytes of its tensors: the C library's heap keeps holes
between them. Measured with glibc 2.36: 1 643 by 1 333 MiB, with the shape of SmolLM2-135M and an adapter."""


class Part(NamedTuple):
    """Bytes of one kind at the peak, and the setting that lowers them."""

    name: str
    num_bytes: float
    setting: str
    """The setting that lowers it; "" if none does."""
    most: float = 0.0
    """Bytes that the settings allow, if they may come to more than is foreseen."""

    def plus(self, other: "Part") -> "Part":
        """Both as one part, which keeps this one's name and setting."""
        most = max(self.most, self.num_bytes) + max(other.most, other.num_bytes) if self.most or other.most else 0.0
        return self._replace(num_bytes=self.num_bytes + other.num_bytes, most=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of one policy's model, from its config alone."""

    parameters: int
    """Without those of an adapter."""
    trained: int
    """Parameters that are trained: all, the adapter's, or none."""
    has_adapter: bool
    """True if an adapter is what is trained."""
    head: int
    """Weights of the head."""
    vocabulary: int
    is_linear: bool
    """True if log-probabilities can be made without all logits of a pass."""
    token_bytes: float
    """Bytes that a pass keeps of a token until its backward, the head aside."""
    cached: int
    """Numbers in the keys and values of one token."""
    cached_layer: int
    """The same of one layer."""
    adaptable: int
    """Numbers of an adapter of rank 1 for all layers that vLLM adapts: linear ones, and the embeddings."""


def size_of(model: PreTrainedModel, policy: PolicySettings) -> ModelSize:
    """Counts a model on the device `meta`, which it prepares for training as the policy says."""
    training = policy.training
    parameters, cached, layers = sum(p.numel() for p in model.parameters()), 0, 1
    if isinstance(policy.engine, EmbeddedSettings):
        cached, layers = cached_numbers(model), attention_shape(model)[0]
    head = model.get_output_embeddings()
    adaptable = sum(sum(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding))
    trained, has_adapter = parameters * policy.trainable, policy.trainable and training.lora is not None
    if policy.trainable and training.lora is not None:
        Adapter(model, training.lora, seed=0)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return ModelSize(
        parameters=parameters,
        trained=trained,
        has_adapter=has_adapter,
        head=0 if head is None else sum(p.numel() for p in head.parameters()),
        vocabulary=int(model.config.get_text_config().vocab_size),
        is_linear=is_linear(head),
        token_bytes=_token_bytes(model, training) if policy.trainable else 0.0,
        cached=cached,
        cached_layer=cached // layers,
        adaptable=adaptable,
    )


def _token_bytes(model: PreTrainedModel, training: TrainingSettings) -> float:
    """Bytes that a pass keeps per token, counted in a pass over a model without memory.

    With `activation_checkpointing` a pass keeps the inputs of the layers, and in backward all of one layer.
    """
    model.to(DTYPES[training.dtype])  # pyright: ignore[reportArgumentType] - torch's own `to`
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    head = model.get_output_embeddings()
    ids = torch.zeros(1, _COUNTED_TOKENS, dtype=torch.long, device="meta")
    # With a mask of all pairs, transformers does not ask for the values of any tensor: there are none.
    mask = torch.zeros(1, 1, _COUNTED_TOKENS, _COUNTED_TOKENS, dtype=model.dtype, device="meta")
    removed = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, :0],)) if head is not None else None
    upcasts = not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    try:
        # Attention on the device `meta` is the plain one, which otherwise keeps bfloat16 in float32; the fused one of
        # real devices does not.
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.train()(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(not upcasts)
        if removed is not None:
            removed.remove()
    config, per_token = model.config.get_text_config(), sum(s.nbytes() for s in kept.values()) / _COUNTED_TOKENS
    if not training.activation_checkpointing:
        return per_token
    layers = config.num_hidden_layers
    return layers * config.hidden_size * BYTES[training.dtype] + per_token / layers


def parts(
    settings: RunSettings,
    sizes: Mapping[str, ModelSize],
    longest: Mapping[str, int] = MappingProxyType({}),
    *,
    device_bytes: int = 0,
) -> list[Part]:
    """The parts at the peak, the largest first. `sizes` has every policy.

    `longest` has the tokens that a policy's longest request is foreseen to take, prompt and reply; without it, they are
    `engine.max_len`. `device_bytes` is the memory of an accelerator, 0 if none is known: the keys and values are then
    left out of vLLM's engines to which `engine.kv_gib` gives no bound.
    """
    inline = settings.cluster.backend == "inline"
    of_run = [_libraries(settings)] if settings.cluster.device == "cpu" else []
    others = {name for names in settings.trained_together for name in names[1:]}
    kept = settings.process_groups.copies if settings.shared_places and settings.keeps_updated else 0
    passes: list[Part] = []
    for name, policy in settings.policies.items():
        if settings.together(name)[0] == name:  # Its instances are those of all that it serves with.
            if isinstance(policy.engine, VllmSettings):
                of_run += _of_vllm(settings, name, policy.engine, sizes[name], device_bytes)
            of_run += _of_engines(settings, name, sizes[name], longest.get(name))
        if policy.trainable:
            of_run += _of_trainer(policy, sizes[name], shares_base=name in others, kept=kept)
            if settings.credit.streaming == "linear":
                of_run.append(_open_groups(settings, policy.training, sizes[name]))
            tensors = pass_of(policy.training, sizes[name], settings.cluster.device)
            holes = _HEAP if settings.cluster.device == "cpu" else 1.0
            if name not in others:  # They are trained with another one, in its passes.
                gradients = max(4, BYTES[policy.training.dtype]) * sizes[name].trained  # Not yet in their sums.
                passes.append(tensors._replace(num_bytes=holes * tensors.num_bytes + gradients))
    of_run += [max(passes, key=lambda part: part.num_bytes)] if inline and passes else passes
    total: dict[str, Part] = {}
    for part in of_run:
        held = total.get(part.name)
        total[part.name] = part if held is None else held.plus(part)
    return sorted((part for part in total.values() if part.num_bytes), key=lambda part: -part.num_bytes)


ASLEEP = ("engines' weights", "keys and values", "a layer's keys and values")
"""Parts that engines give up while they sleep."""
SUSPENDED = {"cpu": ("a pass",), "cuda": ("a pass", "trainers' weights", "optimiser", "gradients", "reference")}
"""Parts that a suspended trainer gives up. On a CPU its state is set aside in the same memory."""


def peak_bytes(settings: RunSettings, found: Iterable[Part]) -> float:
    """The bytes of all parts together, but for those that are never there together: in mode `colocated` on Ray."""
    bytes_of = {part.name: part.num_bytes for part in found}
    served = [name for name, policy in settings.policies.items() if computes(policy.engine)]
    if not settings.in_turns or not all(map(settings.takes_turns, served)):
        return sum(bytes_of.values())
    suspended = SUSPENDED["cpu" if settings.cluster.device == "cpu" else "cuda"]
    in_turn = [sum(bytes_of.get(name, 0.0) for name in names) for names in (ASLEEP, suspended)]
    return sum(bytes_of.values()) - min(in_turn)


def _libraries(settings: RunSettings) -> Part:
    """Python, torch and transformers in each process of the run: this process has loaded the same."""
    processes = 1
    if settings.cluster.backend == "ray":
        hosts = [policy for name, policy in settings.policies.items() if settings.together(name)[0] == name]
        engines = [policy.instances for policy in hosts if computes(policy.engine)]
        alone = len(settings.trained) - sum(len(names) - 1 for names in settings.trained_together)
        processes += sum(engines) + (settings.shared_places * settings.ranks or alone)
    setting = "cluster.backend=inline" if processes > 1 else ""
    return Part("libraries", psutil.Process().memory_info().rss * processes, setting)


def _of_engines(settings: RunSettings, name: str, size: ModelSize, longest: int | None) -> Iterator[Part]:
    engine, count, deterministic = (policy := settings.policies[name]).engine, policy.instances, settings.deterministic
    if not isinstance(engine, EmbeddedSettings):
        return
    number = BYTES[engine.dtype]
    block = engine.kv_bytes(size.cached).block
    most = engine.kv_blocks(deterministic=deterministic) * block
    if engine.kv_gib is not None:
        most = min(most, int(engine.kv_gib * GIB))
    # If each agent waits for its reply before it asks again.
    calls = sum(agent.policy in settings.together(name) for agent in settings.team.agents.values())
    calls *= settings.rollout.inter_query * settings.rollout.intra_query
    as_set = longest is None or deterministic
    held = min(most, engine.kv_blocks(longest, None if as_set else calls, deterministic=deterministic) * block)
    bound = "engine.max_len" if held == most and engine.kv_gib is None else "engine.kv_gib"
    yield Part("engines' weights", count * size.parameters * number, "engine.dtype, or instances")
    yield Part("keys and values", count * held, bound, count * most if most > held else 0.0)
    padded = engine.slots * engine.max_len * size.cached_layer * number if deterministic else 0
    yield Part("a layer's keys and values", count * padded, "engine.slots, engine.max_len or deterministic=false")


def _of_vllm(
    settings: RunSettings, name: str, engine: VllmSettings, size: ModelSize, device_bytes: int
) -> Iterator[Part]:
    """The parts of the instances of a policy, but for what a pass of vLLM takes, which nobody knows before it runs."""
    on_cpu, number, count = settings.cluster.device == "cpu", BYTES[engine.dtype], settings.policies[name].instances
    # On a CPU a version that is loaded lies in the same memory as the weights that are served.
    copies = 2 if on_cpu and engine.adapters is None else 1
    numbers = copies * size.parameters
    if (room := engine.adapters) is not None:
        rank = next(rank for rank in VLLM_RANKS if rank >= room.max_rank)
        numbers += (room.slots * settings.adapter_versions + 1) * rank * size.adaptable
    held = numbers * number
    yield Part("engines' weights", count * held, "engine.dtype, or instances")
    kv_gib = engine.kv_gib or (VLLM_CPU_KV_GIB if on_cpu else None)
    share = engine.options.get("gpu_memory_utilization", VLLM_SHARE) * device_bytes
    free = max(0.0, engine.tensor_parallel * share - held)
    kv = free if kv_gib is None else kv_gib * GIB * engine.tensor_parallel
    yield Part("keys and values", count * kv, "engine.kv_gib")


def _of_trainer(policy: PolicySettings, size: ModelSize, *, shares_base: bool, kept: int) -> Iterator[Part]:
    """`kept`: the number of blocks that have its state as it was updated last, while it trains on."""
    training = policy.training
    number, precise = BYTES[training.dtype], max(4, BYTES[training.dtype])
    adapter = size.trained if size.has_adapter else 0
    own = (0 if shares_base else size.parameters) + adapter
    masters = precise * size.trained if training.dtype == "bfloat16" else 0
    small = "training.lora" if not size.has_adapter else "training.lora.rank"
    yield Part("trainers' weights", own * number + masters, "training.dtype")
    yield Part("optimiser", 2 * precise * size.trained, small)
    yield Part("gradients", precise * size.trained, small)
    reference = size.parameters * number if training.kl is not None and not size.has_adapter else 0
    yield Part("reference", reference, "training.lora")
    published = number * (size.trained if training.publish == "adapter" else size.parameters)
    yield Part("published version", published, "training.lora" if not size.has_adapter else "training.publish")
    state = (masters or adapter * number) + 2 * precise * size.trained + reference
    copied = state + published if kept == 2 else 0
    which = "copies" if kept == 2 else "keep_updated"
    yield Part("kept states", state * min(kept, 1) + copied, f"process_groups.{which}")


def _open_groups(settings: RunSettings, training: TrainingSettings, size: ModelSize) -> Part:
    """Two sums of gradients for each group that is played at once, as if each had rows that are trained already."""
    sums = 2 * min(settings.batch.groups, settings.rollout.inter_query)
    return Part("open groups", sums * max(4, BYTES[training.dtype]) * size.trained, "credit.streaming=off")


def pass_of(training: TrainingSettings, size: ModelSize, device: str = "cpu") -> Part:
    """The memory that a pass of `max_tokens_per_forward` tokens adds, all of which are trained."""
    tokens = training.max_tokens_per_forward
    logits, precise = tokens * size.vocabulary, max(4, BYTES[training.dtype])
    if size.is_linear and logits >= LEAN_FROM:
        block = BLOCK_LOGITS["cpu" if device == "cpu" else "cuda"]
        of_head = _LEAN_ARRAYS * min(block, logits) * precise
        of_head += size.head * precise if not size.has_adapter else 0  # Its gradient, before it is added to the others.
    else:
        of_head = _LOGIT_ARRAYS * logits * precise
    return Part("a pass", tokens * size.token_bytes + of_head, "training.max_tokens_per_forward")
