"""Decides advantages as Dr.MAS does: GRPO inside each agent."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative, Scale
from flexmarl.credit.estimators.grouped import Singleton


class DrMas(GroupRelative):
    """GRPO with each agent's own mean and deviation, so that agents on other reward scales do not disturb it."""

    type: Literal["drmas"] = "drmas"
    scale: Scale = "std"
    singleton: Singleton = "raw"
