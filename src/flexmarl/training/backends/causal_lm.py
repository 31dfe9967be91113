"""Causal LM on transformers: loaded whole, prepared for training, and updated by AdamW.

Linear layers run on oneDNN: torch ships it, but does not use it for float32 on x86. Torch uses MKL there, which uses
AVX-512 on Intel's processors only. On an AMD EPYC, MKL reaches 100 GFLOP/s a core, forward and backward, and oneDNN 180
to 240; on Zen 4, where AVX-512 comes in halves, both 90 to 110. Products take most of a small model's CPU time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from flexmarl.cluster.torch_device import with_threads
from flexmarl.errors import ConfigError, TrainingError, boundary
from flexmarl.training.backends.ranks import ALONE, Ranks, as_whole, part
from flexmarl.training.settings import Dtype, UpdateSettings

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_model(source: str | Path, dtype: Dtype = "float32") -> PreTrainedModel:
    """Loads a causal LM onto the CPU, from a Hugging Face folder or name.

    Raises ConfigError that names the tensors that are missing, not finite, of another shape, or not the model's.
    Transformers itself would fill in or leave out such tensors.
    """
    model = _loaded(source, dtype=DTYPES[dtype])
    if names := unbounded(dict(model.named_parameters())):
        raise ConfigError(
            f"the model '{source}' holds weights that are not finite, or too large for a finite norm: "
            f"{some_of(names)}; take another copy or an earlier checkpoint of it"
        )
    use_onednn(model)
    return model


def check_model_files(source: str | Path) -> PreTrainedModel:
    """Checks names and shapes in the files as `load_model` does, and returns a model without memory.

    Raises ConfigError as `load_model` does, but does not look for numbers that are not finite.
    """
    with with_threads(1):  # With several, the calling thread would keep a team of them, however little is computed.
        return _loaded(source, device_map="meta")


def architecture_of(source: str | Path) -> str:
    """A model's config as text, without its name: models with the same one compute the same with the same weights."""
    facts = AutoConfig.from_pretrained(source).to_dict()
    return json.dumps({key: facts[key] for key in sorted(facts) if key not in _NO_ARCHITECTURE}, default=str)


_NO_ARCHITECTURE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


@contextmanager
def _without_messages() -> Iterator[None]:
    """Hides transformers' progress bars, and its report of differing tensors, which our error contains."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _loaded(source: str | Path, **options: Any) -> PreTrainedModel:
    """The model, if its files hold exactly its tensors. Tied tensors and buffers may be missing."""
    with boundary(ConfigError, f"loading the model '{source}'"), _without_messages():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        model, found = loaded
    lacking, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    problems = [f"its files lack {some_of(lacking)}"] if lacking else []
    for name, held, wanted in sorted(found["mismatched_keys"]):
        problems.append(f"{name} has the shape {list(held)} in its files, and {list(wanted)} by its config.json")
    if unexpected:
        problems.append(f"its files hold {some_of(unexpected)}, for which the model of its config.json has no place")
    if problems or found["error_msgs"]:
        raise ConfigError(
            f"the model '{source}' is not whole: {some_of([*problems, *found['error_msgs']])}; copy config.json and "
            f"all weight files of one model there again, or save it with `save_pretrained`"
        )
    return model


MIN_ROWS = 16
"""Least rows for oneDNN. With fewer, its fixed cost of about 10 us a call is more than it saves."""


def use_onednn(model: nn.Module) -> None:
    """Puts the model's plain linear layers on oneDNN, in place. Names, parameters and everything else do not change."""
    if torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear


class OneDnnLinear(nn.Linear):
    """Linear layer that uses oneDNN for float32 on a CPU, and torch for the rest: GPUs, other types, few rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Product with the weight, plus bias."""
        if not _is_for_onednn(input, self.weight):
            return super().forward(input)
        product = _Product.apply if torch.is_grad_enabled() else _product
        return product(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """x W^T + b with its gradients. The gradients of x and W are one product each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the name of ctx
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        flat = grad.flatten(0, -2)
        return (
            _product(grad, weight.t()) if wants_x else None,
            _product(flat.t(), x.flatten(0, -2).t()) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, I] times weight [O, I] transposed, plus bias [O]: on oneDNN or torch, as `OneDnnLinear` chooses.

    Not for autograd: `OneDnnLinear` is.
    """
    if _is_for_onednn(x, weight) and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available():
        return _product(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    is_plain = x.dtype == torch.float32 and x.device.type == "cpu"
    return is_plain and x.numel() >= MIN_ROWS * weight.shape[1]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., I] times [O, I] transposed, by the operator that torch's own compiler calls for linear layers on CPUs."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def prepare_for_training(model: PreTrainedModel, *, activation_checkpointing: bool) -> None:
    """Sets training mode, with all dropout at 0: the trainer must see the distribution that the engine sampled from."""
    module: Any
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    model.train()
    if activation_checkpointing:
        # PyTorch leaves function modes when it enters backward, so the recomputation needs its own.
        contexts = {"context_fn": lambda: (nullcontext(), precision(model))}
        # Transformers 5.18 introduced the first name and keeps the second as a deprecated alias.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, **contexts})


class KeepFloat64(TorchFunctionMode):
    """Keeps float64 tensors from being cast to float32 inside the block.

    Models cast to float32 inside their norms to protect low precision. In double precision that cast loses digits, and
    updates would depend on the order of the rows in the seventh digit.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skips such casts and calls everything else."""
        wanted = (*args[1:], *(kwargs or {}).values())
        lowers = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in wanted)
        if lowers and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def precision(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Context in which forward and backward passes of the model must run."""
    return KeepFloat64() if model.dtype == torch.float64 else nullcontext()


def unique_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The state dict without tied duplicates. A tensor with several names is yielded under the first."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


@torch.no_grad()
def unbounded(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of floating-point tensors that hold a NaN or an infinity, or numbers too large for a finite L2 norm.

    It is one fused reduction that reads each number once, in a third of the time of a fused AdamW step.
    """
    numbers = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
    norms = torch._foreach_norm(list(numbers.values()))
    if not norms or torch.stack([norm.double() for norm in norms]).isfinite().all():
        return []
    return [name for name, norm in zip(numbers, norms, strict=True) if not norm.isfinite()]


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Text for an error: the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class Updater:
    """AdamW on a model's parameters. A bfloat16 parameter has a float32 master copy, in which small updates survive.

    Weights are cast once per update instead of in every operation (autocast), so that the forward pass runs on exactly
    the bfloat16 weights that the engine gets.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: UpdateSettings,
        *,
        extra: Mapping[str, nn.Parameter] = {},
        extra_rate: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`extra` are parameters, by name, that are trained with the model but are not part of it.

        `extra_rate` is their peak learning rate; None means that of the model. Each of several `ranks` updates its part
        of every parameter: masters, gradients and moments are parts.
        """
        self._settings, self._ranks = settings, ranks
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad} | dict(extra)
        for parameter in self.parameters.values():
            if parameter.dtype == torch.bfloat16:
                parameter.grad_dtype = torch.float32
        self._held = {name: p if part(p) is p else part(p.detach()) for name, p in self.parameters.items()}
        """The parts of the parameters that this rank has."""
        self.masters = {name: p.detach().float() if p.dtype == torch.bfloat16 else p for name, p in self._held.items()}
        adamw = settings.optimizer
        own = [master for name, master in self.masters.items() if name not in extra]
        self._rates = [adamw.learning_rate, *([extra_rate or adamw.learning_rate] if extra else [])]
        groups = [{"params": own}, *([{"params": [self.masters[name] for name in extra]}] if extra else [])]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=adamw.learning_rate,
            betas=(adamw.beta1, adamw.beta2),
            eps=adamw.eps,
            weight_decay=adamw.weight_decay,
            fused=True,
        )

    def take_gradients(self) -> list[Tensor]:
        """Takes the gradients since the last call out of the parameters, with zeros for parameters that have none."""
        gradients = [
            torch.zeros_like(master) if parameter.grad is None else part(parameter.grad)
            for parameter, master in zip(self.parameters.values(), self.masters.values(), strict=True)
        ]
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients

    def apply(self, gradients: Sequence[Tensor], update: int, where: str) -> tuple[float, float]:
        """Clips, steps and refreshes the parameters; returns (gradient norm before clipping, learning rate).

        Raises TrainingError if a gradient is not finite, and then the weights do not change. Raises it also if weights
        are not finite after the update, and then they are lost.
        """
        norm = self._ranks.norm(torch.nn.utils.get_total_norm(gradients))
        if not norm.isfinite():
            raise TrainingError(
                f"{where}: gradient norm is {norm.item()}; the weights are unchanged. Look for extreme advantages, or "
                "try a lower learning_rate, or dtype float32"
            )
        masters = list(self.masters.values())
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        if self._settings.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, self._settings.max_grad_norm, norm)
        factor = self._settings.schedule.factor(update)
        learning_rate = self._rates[0] * factor
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.refresh()
        if names := self.unbounded():
            raise TrainingError(
                f"{where}: after update {update + 1} these weights are not finite, or too large for a finite norm: "
                f"{some_of(names)}; nothing of this update is published or saved. The likely cause is "
                f"training.optimizer.learning_rate, {self._settings.optimizer.learning_rate:g} "
                f"({learning_rate:g} in this update): use a lower one"
            )
        return norm.item(), learning_rate

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies master weights into the parameters that have a separate master."""
        for held, master in zip(self._held.values(), self.masters.values(), strict=True):
            if held is not master:
                held.copy_(master)

    def unbounded(self) -> list[str]:
        """Together: names of parameters that are not finite, or have no finite norm."""
        return list(dict.fromkeys(name for of_rank in self._ranks.everyone(unbounded(self._held)) for name in of_rank))

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """The whole of a parameter's master, gradient or moment, from this rank's part: a DTensor if there are more."""
        return as_whole(mine, self.parameters[name]) if mine.dim() else mine
