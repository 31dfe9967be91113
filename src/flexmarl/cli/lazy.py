"""Modules that import torch, loaded when a command first uses them: help and wrong configs answer at once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


class Lazy:
    """Stands for a module until one of its names is asked for.

    Not importlib's LazyLoader: that leaves a husk in `sys.modules`, and torch looks into all of them while it loads.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    from flexmarl import assemble
    from flexmarl.cli import examine, simulations
    from flexmarl.simulator import plots
else:
    assemble = Lazy("flexmarl.assemble")
    examine = Lazy("flexmarl.cli.examine")
    plots = Lazy("flexmarl.simulator.plots")
    simulations = Lazy("flexmarl.cli.simulations")

__all__ = ["assemble", "examine", "plots", "simulations"]
