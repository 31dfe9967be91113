"""Settings of a LoRA adapter. Imports neither torch nor peft, so that a laptop can check any config."""

from typing import Literal

from pydantic import Field, field_validator

from flexmarl.settings import Settings


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
    def _there_is_no_dropout(cls, dropout: float) -> float:
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
