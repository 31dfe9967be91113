"""How rewards become advantages: the `credit` section of a config."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.default import Default
from flexmarl.credit.filters import OutcomeFilter


class CreditSettings(BaseModel):
    """Filter, then estimate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    estimator: AnyEstimator = Default()
    """Chosen by `type`; its options are its own."""
    filter: OutcomeFilter | None = OutcomeFilter()
    """Which tasks are worth training on; null trains on all."""
    ready: Literal["group", "trajectory"] = Field(
        default="group",
        description="When rows may be trained: when all episodes of their task have ended, or their own; the latter "
        "needs an estimator that looks at single rows, such as reinforce, and filter=null.",
    )
