"""Policy losses. In: log-probabilities and advantages of tokens. Out: the loss of each token, before aggregation.

A settings class is the loss. To add one, write its file and add its class to `LossSettings`.
"""

from typing import Annotated, get_args

from pydantic import Field

from flexmarl.training.losses.base import PolicyLoss
from flexmarl.training.losses.cispo import Cispo
from flexmarl.training.losses.gmpo import Gmpo
from flexmarl.training.losses.gpg import Gpg
from flexmarl.training.losses.gspo import Gspo
from flexmarl.training.losses.ppo import Ppo
from flexmarl.training.losses.reinforce import Reinforce
from flexmarl.training.losses.sapo import Sapo

LossSettings = Annotated[Ppo | Reinforce | Gpg | Gspo | Cispo | Sapo | Gmpo, Field(discriminator="type")]
LOSSES: dict[str, type[PolicyLoss]] = {
    loss.model_fields["type"].default: loss for loss in get_args(get_args(LossSettings)[0])
}

__all__ = [
    "Cispo",
    "Gmpo",
    "Gpg",
    "Gspo",
    "LOSSES",
    "LossSettings",
    "PolicyLoss",
    "Ppo",
    "Reinforce",
    "Sapo",
]
