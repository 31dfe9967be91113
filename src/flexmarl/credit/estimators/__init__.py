"""One file per estimator; the settings class is the estimator."""

import pkgutil
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from flexmarl.credit.interface import EstimatorSettings

ESTIMATORS: Mapping[str, str] = {
    "default": "flexmarl.credit.estimators.default:Default",
    "grpo": "flexmarl.credit.estimators.grpo:Grpo",
    "drmas": "flexmarl.credit.estimators.drmas:DrMas",
    "dr_grpo": "flexmarl.credit.estimators.dr_grpo:DrGrpo",
    "grpo_trajectory": "flexmarl.credit.estimators.grpo_trajectory:GrpoTrajectory",
    "atgrpo": "flexmarl.credit.estimators.atgrpo:AtGrpo",
    "rllm": "flexmarl.credit.estimators.rllm:Rllm",
    "rloo": "flexmarl.credit.estimators.rloo:Rloo",
    "rloo_trajectory": "flexmarl.credit.estimators.rloo_trajectory:RlooTrajectory",
    "reinforce++_baseline": "flexmarl.credit.estimators.reinforce_pp_baseline:ReinforcePPBaseline",
    "max_rl": "flexmarl.credit.estimators.max_rl:MaxRl",
    "opo": "flexmarl.credit.estimators.opo:Opo",
    "gpg": "flexmarl.credit.estimators.gpg:Gpg",
    "pass@k": "flexmarl.credit.estimators.pass_at_k:PassAtK",
    "gdpo": "flexmarl.credit.estimators.gdpo:Gdpo",
    "hierarchical": "flexmarl.credit.estimators.hierarchical:Hierarchical",
    "c3": "flexmarl.credit.estimators.c3:C3",
    "reinforce": "flexmarl.credit.estimators.reinforce:Reinforce",
    "reinforce++": "flexmarl.credit.estimators.reinforce_pp:ReinforcePP",
    "gae": "flexmarl.credit.estimators.gae:Gae",
    "step_gae": "flexmarl.credit.estimators.step_gae:StepGae",
    "remax": "flexmarl.credit.estimators.remax:ReMax",
    "rae": "flexmarl.credit.estimators.rae:Rae",
    "gigpo": "flexmarl.credit.estimators.gigpo:GiGpo",
}
"""Where the class of each estimator `type` is; a new one adds one line here (docs: write an estimator)."""

if TYPE_CHECKING:
    AnyEstimator = EstimatorSettings
else:
    AnyEstimator = Annotated[
        reduce(or_, (pkgutil.resolve_name(path) for path in ESTIMATORS.values())), Field(discriminator="type")
    ]
"""Settings field of any estimator in the table, chosen by its `type`."""

__all__ = ["ESTIMATORS", "AnyEstimator"]
