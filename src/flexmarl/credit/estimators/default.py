"""Decides advantages as we recommend: compared per agent, centred, not scaled, a lone row teaches nothing."""

from typing import Literal

from flexmarl.credit.estimators.group_relative import GroupRelative


class Default(GroupRelative):
    """Each agent's turns on a task against their mean. The base class's defaults, unchanged.

    Why not scaled: dividing by the standard deviation favours nearly solved and nearly hopeless tasks and magnifies
    small penalties.
    """

    type: Literal["default"] = "default"
