"""Estimators; the settings class of an estimator is the estimator.

In: rows with their final rewards. Out: an advantage and a weight for each row.
"""

from typing import Annotated

from flexmarl.credit.interface import EstimatorSettings
from flexmarl.plugins import SettingsTable

BUILT_IN = {
    "default": "flexmarl.credit.estimators.presets:Default",
    "grpo": "flexmarl.credit.estimators.presets:Grpo",
    "drmas": "flexmarl.credit.estimators.presets:DrMas",
    "dr_grpo": "flexmarl.credit.estimators.presets:DrGrpo",
    "grpo_trajectory": "flexmarl.credit.estimators.presets:GrpoTrajectory",
    "atgrpo": "flexmarl.credit.estimators.presets:AtGrpo",
    "rllm": "flexmarl.credit.estimators.presets:Rllm",
    "rloo": "flexmarl.credit.estimators.presets:Rloo",
    "rloo_trajectory": "flexmarl.credit.estimators.presets:RlooTrajectory",
    "reinforce++_baseline": "flexmarl.credit.estimators.presets:ReinforcePPBaseline",
    "max_rl": "flexmarl.credit.estimators.presets:MaxRl",
    "opo": "flexmarl.credit.estimators.presets:Opo",
    "gpg": "flexmarl.credit.estimators.presets:Gpg",
    "pass@k": "flexmarl.credit.estimators.presets:PassAtK",
    "gdpo": "flexmarl.credit.estimators.gdpo:Gdpo",
    "hierarchical": "flexmarl.credit.estimators.presets:Hierarchical",
    "c3": "flexmarl.credit.estimators.c3:C3",
    "reinforce": "flexmarl.credit.estimators.baselines:Reinforce",
    "reinforce++": "flexmarl.credit.estimators.baselines:ReinforcePP",
    "gae": "flexmarl.credit.estimators.gae:Gae",
    "step_gae": "flexmarl.credit.estimators.gae:StepGae",
    "remax": "flexmarl.credit.estimators.baselines:ReMax",
    "rae": "flexmarl.credit.estimators.baselines:Rae",
    "gigpo": "flexmarl.credit.estimators.gigpo:GiGpo",
}
ESTIMATORS: SettingsTable[EstimatorSettings] = SettingsTable(
    "estimator", setting="credit.estimator.type", group="estimators", interface=[EstimatorSettings], built_in=BUILT_IN
)
"""Estimators by `type`."""
estimator = ESTIMATORS.register
"""Decorator that makes a settings class the estimator of its `type`: `@estimator`."""

AnyEstimator = Annotated[EstimatorSettings, ESTIMATORS]
"""Settings field of any estimator in the table, chosen by its `type`."""

__all__ = ["ESTIMATORS", "AnyEstimator", "estimator"]
