"""Decides advantages as rLLM does: GRPO inside each agent, with the population's standard deviation."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative, Scale
from flexmarl.credit.estimators.grouped import Singleton


class Rllm(GroupRelative):
    """rLLM's GRPO over task and agent: ddof 0, eps 1e-6."""

    type: Literal["rllm"] = "rllm"
    scale: Scale = "std"
    ddof: Literal[0, 1] = 0
    singleton: Singleton = "raw"
