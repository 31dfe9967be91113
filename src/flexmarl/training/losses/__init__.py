"""Policy losses. In: log-probabilities and advantages of tokens. Out: the loss of each token, before aggregation.

A settings class is the loss. To add one, write its file and add its class to `LossSettings`.
"""

from typing import Annotated, get_args

from pydantic import Field

from flexmarl.training.losses.base import PolicyLoss
from flexmarl.training.losses.ppo import Ppo
from flexmarl.training.losses.reinforce import Reinforce

LossSettings = Annotated[Ppo | Reinforce, Field(discriminator="type")]
LOSSES: dict[str, type[PolicyLoss]] = {
    loss.model_fields["type"].default: loss for loss in get_args(get_args(LossSettings)[0])
}

__all__ = ["LOSSES", "LossSettings", "PolicyLoss", "Ppo", "Reinforce"]
