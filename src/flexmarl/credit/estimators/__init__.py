"""One file per estimator; the settings class is the estimator."""

import pkgutil
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexmarl.credit.interface import Estimator

ESTIMATORS: Mapping[str, str] = {
    "default": "flexmarl.credit.estimators.default:Default",
    "grpo": "flexmarl.credit.estimators.grpo:Grpo",
    "drmas": "flexmarl.credit.estimators.drmas:DrMas",
    "dr_grpo": "flexmarl.credit.estimators.dr_grpo:DrGrpo",
    "reinforce": "flexmarl.credit.estimators.reinforce:Reinforce",
}
"""Where the class of each estimator `type` is; a new one adds one line here (docs: write an estimator)."""

if TYPE_CHECKING:
    AnyEstimator = Estimator
else:
    AnyEstimator = Annotated[
        reduce(or_, (pkgutil.resolve_name(path) for path in ESTIMATORS.values())), Field(discriminator="type")
    ]
"""Settings field of any estimator in the table, chosen by its `type`."""

__all__ = ["ESTIMATORS", "AnyEstimator"]
