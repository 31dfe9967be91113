"""Settings of training. Imports neither torch nor transformers nor peft, so that a laptop can check any config."""

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flexmarl.settings import Settings
from flexmarl.training.corrections import CorrectionSettings, NoCorrection
from flexmarl.training.kl import CriticSettings, KlSettings
from flexmarl.training.losses import LOSSES, LossSettings, Ppo
from flexmarl.training.phases import PhaseSettings


class ScheduleSettings(Settings):
    """Warm-up from 0 to the full learning rate; then constant, or linear or cosine decay to `min_ratio` times it."""

    type: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(default=0, ge=0, description="Updates before the full learning rate is reached.")
    decay_steps: int | None = Field(
        default=None,
        gt=0,
        description="Updates, warm-up included, after which the rate stays at its minimum; null: the `steps` that the "
        "run begins with. A resumed run keeps it, however many steps it is given.",
    )
    min_ratio: float = Field(default=0.0, ge=0, le=1, description="Final rate as a share of the learning rate.")

    @model_validator(mode="after")
    def _there_is_a_decay_after_the_warm_up(self) -> Self:
        if self.decay_steps is None:
            return self
        if self.type == "constant":
            raise ValueError(f"decay_steps is {self.decay_steps} but type is 'constant'; use 'linear' or 'cosine'")
        if self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps is {self.decay_steps} with type '{self.type}' and warmup_steps {self.warmup_steps}; set "
                "it to the number of updates of the run, more than warmup_steps"
            )
        return self

    def over(self, updates: int) -> Self:
        """Returns the schedule of a run of so many updates: a decay without a length ends with the last of them."""
        if self.type == "constant" or self.decay_steps is not None:
            return self
        return self.model_copy(update={"decay_steps": max(updates, self.warmup_steps + 1)})

    def factor(self, update: int) -> float:
        """Share of the learning rate for update number `update`, counted from 0. Raises ValueError without a length.

        The warm-up is one update ahead of that of transformers' `get_scheduler`, whose first update has the rate 0.

        >>> [ScheduleSettings(type="linear", warmup_steps=2, decay_steps=6).factor(i) for i in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        """
        if update < self.warmup_steps:
            return (update + 1) / self.warmup_steps
        if self.type == "constant":
            return 1.0
        if self.decay_steps is None:
            raise ValueError(f"decay_steps is null with type '{self.type}'; set it to the number of updates of the run")
        progress = min(1.0, (update - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        shape = 1.0 - progress if self.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_ratio + (1.0 - self.min_ratio) * shape


class LoraSettings(Settings):
    """LoRA (arXiv 2106.09685): the weights W stay fixed, and a linear layer computes with W + (alpha / rank) B A."""

    rank: int = Field(default=16, ge=1, description="Rows of A and columns of B: how much an adapter can say.")
    alpha: float = Field(default=32.0, gt=0, description="Scale of the adapter, divided by the rank.")
    dropout: float = Field(
        default=0.0, description="0 only: the trainer must see the distribution that the engine sampled from."
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear",
        description="Linear layers that get an adapter, by the ends of their names, e.g. [q_proj, v_proj]; all-linear: "
        "every one but the head.",
    )
    export: Literal["merged", "adapter"] = Field(
        default="merged",
        description="What `flexmarl export` writes: a whole model, or the adapter alone, which needs its base.",
    )

    @field_validator("dropout")
    @classmethod
    def _dropout_is_zero(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                f"dropout is {dropout}, but the engine samples without it, and the trainer must see the same "
                f"distribution; use 0"
            )
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _something_is_adapted(cls, targets: Literal["all-linear"] | tuple[str, ...]) -> object:
        if not targets:
            raise ValueError("target_modules is empty, so that nothing could learn; use all-linear, or names")
        return targets


Dtype = Literal["float32", "bfloat16", "float64"]


def _on_or_off(value: object) -> object:
    """Turns booleans back into on and off, which YAML reads as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Sharing = Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_or_off)]
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
    publish: Literal["auto", "merged", "adapter"] = Field(
        default="auto",
        description="With lora, what engines get: merged weights, whole and under the base's names; or the adapter "
        "alone, far smaller, which the engine must take (the embedded one does) beside its base. auto: the adapter "
        "alone if the type of engine takes it.",
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
    ranks: int = Field(
        default=1,
        ge=1,
        description="Processes that train the policy side by side, each with its part of weights, gradients and "
        "optimiser (FSDP2) and its share of the rows. They need cluster.backend=ray.",
    )
    together: bool = Field(
        default=False,
        description="With lora: policies of one model that all say so are trained in one process on one copy of its "
        "weights, and micro-batches of theirs that wait at the same time are computed in the same passes. The loss is "
        "the same.",
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
    phases: tuple[PhaseSettings, ...] = Field(
        default=(),
        description="Steps in which the policy is trained or rests, again and again; empty: it is trained in all. A "
        "policy that rests is served as it is, and its calls are not trained on.",
    )

    @field_validator("phases")
    @classmethod
    def _some_phase_trains(cls, phases: tuple[PhaseSettings, ...]) -> tuple[PhaseSettings, ...]:
        if phases and not any(phase.train for phase in phases):
            raise ValueError(
                f"none of the {len(phases)} phases has train: true, so the policy would never be trained; add one, or "
                f"use trainable=false"
            )
        return phases

    @model_validator(mode="after")
    def _publish_needs_lora(self) -> Self:
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

    @property
    def streaming_obstacle(self) -> str:
        """The setting that keeps streaming credit from being exact, and what would work; empty if there is none."""
        if not self.loss.linear_in_advantage:
            linear = ", ".join(sorted(name for name in LOSSES.built_in if LOSSES[name].linear_in_advantage))
            kind = getattr(self.loss, "type", "")
            return f"loss.type is '{kind}', whose value is not linear in the advantage; use {linear}"
        if self.loss.aggregation == "traj-mean-token-mean":
            return (
                "loss.aggregation is 'traj-mean-token-mean', which has to know all rows of an episode that are trained"
            )
        if self.correction.type != "none":
            return "correction is set, which streaming credit does not measure; use correction.type=none"
        terms = {"kl": self.kl, "entropy_coef": self.entropy_coef, "critic": self.critic}
        for name, term in terms.items():
            if term:
                return f"{name} adds a term that no advantage multiplies; leave it out"
        return ""


class SupervisedSettings(UpdateSettings):
    """Supervised training on demonstrations, as a cold start."""

    optimizer: AdamWSettings = Field(default=AdamWSettings(learning_rate=2e-3), description="The optimiser.")
    epochs: int = Field(default=1, gt=0, description="Passes over the demonstrations.")
    batch: int = Field(default=128, gt=0, description="Demonstrations in one update.")
    max_tokens_per_forward: int = Field(default=16384, gt=0, description="Padded tokens of one forward pass.")
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = Field(
        default="token-mean", description="Whether long demonstrations weigh more (token-mean) or all the same."
    )

    @field_validator("schedule")
    @classmethod
    def _its_length_is_known(cls, schedule: ScheduleSettings) -> ScheduleSettings:
        if schedule.type != "constant" and schedule.decay_steps is None:
            raise ValueError(
                f"decay_steps is None with type '{schedule.type}'; set it to the number of updates: epochs times "
                f"demonstrations, divided by batch"
            )
        return schedule


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
    host_gb: float | None = Field(
        default=None,
        ge=0,
        description="Host memory (shared memory) for states that are set aside, beside their weights, in GB. States "
        "that find no room are files in the temp folder. null: no bound. On a Ray that others started "
        "objects.memory_gib bounds it.",
    )

    keep_updated: bool | None = Field(
        default=None,
        description="Set a copy of a policy's state aside after each update, from which it goes on when one of its "
        "training processes is lost. null: where a policy has several ranks.",
    )
    copies: Literal[1, 2] = Field(
        default=1,
        description="2: a state that is set aside is copied to the controller's node too, so that it outlives the node "
        "of its training processes. It needs several nodes.",
    )
    call_timeout_s: float | None = Field(
        default=3600.0,
        gt=0,
        description="Seconds after which a training process that does not answer is lost; null: it is waited for.",
    )

    @property
    def host_bytes(self) -> int | None:
        """The bound of host memory in bytes."""
        return None if self.host_gb is None else int(self.host_gb * 1e9)
