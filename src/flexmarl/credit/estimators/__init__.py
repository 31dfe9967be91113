"""One file per estimator; the settings class is the estimator."""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexmarl.credit.estimators.default import Default
from flexmarl.credit.estimators.dr_grpo import DrGrpo
from flexmarl.credit.estimators.drmas import DrMas
from flexmarl.credit.estimators.grpo import Grpo
from flexmarl.credit.interface import Estimator

ESTIMATORS = {
    "default": Default,
    "grpo": Grpo,
    "drmas": DrMas,
    "dr_grpo": DrGrpo,
}
"""A new estimator is one file and its entry here."""

if TYPE_CHECKING:
    AnyEstimator = Estimator
else:
    AnyEstimator = Annotated[reduce(or_, ESTIMATORS.values()), Field(discriminator="type")]
"""Settings field of any estimator in the table, chosen by its `type`."""

__all__ = ["AnyEstimator", "Default", "DrGrpo", "DrMas", "ESTIMATORS", "Grpo"]
