"""How rewards become advantages: the `credit` section of a config."""

from pydantic import BaseModel, ConfigDict

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
