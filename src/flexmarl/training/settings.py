"""Settings of training. Imports neither torch nor transformers, so that a laptop can check any config."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flexmarl.settings import Settings
from flexmarl.training.corrections import CorrectionSettings, NoCorrection
from flexmarl.training.kl import CriticSettings, KlSettings
from flexmarl.training.learning_rate import ScheduleSettings
from flexmarl.training.lora_settings import LoraSettings
from flexmarl.training.losses import LossSettings, Ppo

Dtype = Literal["float32", "bfloat16", "float64"]


def _said_in_yaml(value: object) -> object:
    """Turns booleans back into on and off, which YAML reads as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Sharing = Annotated[Literal["auto", "on", "off"], BeforeValidator(_said_in_yaml)]
"""Use of prefix trees in forward passes."""


class AdamWSettings(Settings):
    """AdamW (Loshchilov and Hutter 2019), with decoupled weight decay."""

    learning_rate: float = Field(default=1e-6, gt=0, description="Peak rate; 1e-3 to 2e-3 for models of a few million.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the gradient's running mean.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the squared gradient's running mean.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled, times the learning rate.")


class UpdateSettings(Settings):
    """Settings of one update of the weights: optimiser, learning rate and clipping."""

    optimizer: AdamWSettings = Field(default=AdamWSettings(), description="The optimiser.")
    schedule: ScheduleSettings = Field(default=ScheduleSettings(), description="Learning rate over the updates.")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="L2 bound on the gradient; null is off.")


class TrainingSettings(UpdateSettings):
    """Reinforcement learning of one policy."""

    loss: LossSettings = Field(default=Ppo(), description="The policy loss, chosen by `type`.")
    correction: CorrectionSettings = Field(
        default=NoCorrection(),
        description="For tokens that older versions sampled: tis multiplies their loss by how much likelier they have "
        "become, up to cap. The default is none in the modes that are on-policy, and tis with cap 2 in the others.",
    )
    lora: LoraSettings | None = Field(
        default=None, description="Train an adapter and leave the weights as they are; null trains all of them."
    )
    publish: Literal["merged", "adapter"] = Field(
        default="merged",
        description="With lora, what engines get: merged weights, whole and under the base's names; or the adapter "
        "alone, far smaller, which the engine must take (the embedded one does) and merges itself.",
    )
    kl: KlSettings | None = Field(default=None, description="Keeps the policy near its initial weights; null is off.")
    entropy_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the entropy of the model's own distribution (temperature 1), a bonus in the loss.",
    )
    critic: CriticSettings | None = Field(
        default=None, description="A value per token, for estimators that compare with one; null is none."
    )
    micro_batch: int = Field(default=16, gt=0, description="Ready rows that start one gradient accumulation.")
    max_tokens_per_forward: int = Field(
        default=16384,
        gt=0,
        description="Tokens of one forward pass: padded ones, or nodes of a tree; a longer row goes alone.",
    )
    dtype: Dtype = Field(
        default="float32",
        description="Of weights in the forward pass. With bfloat16 the optimiser keeps float32 master weights.",
    )
    tree: Sharing = Field(
        default="auto",
        description="Compute prefixes that rows of a micro-batch share once: always (on), never (off), or where it is "
        "estimated to be faster (auto). The loss is the same.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Recompute activations layer by layer: about 30% slower, far less memory."
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="Rows with advantage 0 have gradient 0: count them in the divisors without a forward pass.",
    )
    accumulation_scale: float = Field(
        default=1.0, gt=0, description="The constant kappa that gradient sums carry until the step divides it out."
    )

    @model_validator(mode="after")
    def _there_is_an_adapter_to_publish(self) -> Self:
        if self.publish == "adapter" and self.lora is None:
            raise ValueError(
                "publish is 'adapter', but lora is null, so that there is none; use lora: {rank: 16}, or publish=merged"
            )
        return self

    @model_validator(mode="after")
    def _terms_share_a_divisor(self) -> Self:
        in_loss = self.kl is not None and self.kl.where == "loss"
        terms = {"kl in the loss": in_loss, "entropy_coef": self.entropy_coef > 0, "critic": self.critic is not None}
        other = [name for name, is_set in terms.items() if is_set]
        if self.correction.normalises and other:
            raise ValueError(
                f"correction.batch_normalise is true, but {' and '.join(other)} would be divided by the mean weight of "
                f"the correction too; use batch_normalise: false, or leave {'it' if len(other) == 1 else 'them'} out"
            )
        return self

    @property
    def needs_appraisal(self) -> bool:
        """True if credit needs data from the trainer: the critic's values, or the reference's log-probabilities."""
        return self.critic is not None or (self.kl is not None and self.kl.where == "reward")


class SupervisedSettings(UpdateSettings):
    """Supervised training on demonstrations, as a cold start."""

    optimizer: AdamWSettings = Field(default=AdamWSettings(learning_rate=2e-3), description="The optimiser.")
    epochs: int = Field(default=1, gt=0, description="Passes over the demonstrations.")
    batch: int = Field(default=128, gt=0, description="Demonstrations in one update.")
    max_tokens_per_forward: int = Field(default=16384, gt=0, description="Padded tokens of one forward pass.")
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = Field(
        default="token-mean", description="Whether long demonstrations weigh more (token-mean) or all the same."
    )


class ProcessGroupSettings(Settings):
    """Number of policies that hold training devices at once, and when their state is swapped (FlexMARL section 6)."""

    at_once: int | None = Field(
        default=None, ge=1, description="Policies whose trainers are on devices at the same time; null: all of them."
    )
    suspend: Literal["eager", "on_demand"] = Field(
        default="on_demand",
        description="eager: as soon as nothing is ready for the policy; on_demand: when another one needs its devices.",
    )
    prefetch: bool = Field(
        default=True, description="Bring the state back before a micro-batch is ready, if devices are free."
    )
    leave: Literal["published", "updated"] = Field(
        default="published",
        description="When a policy's step is over for its devices: when its new weights are set in the object store, "
        "or with its update; the weights are then set from where its state is set aside.",
    )
