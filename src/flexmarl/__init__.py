"""Trains teams of LLM agents with reinforcement learning, from a laptop CPU to a cluster with one config.

The names below are the Python interface: see docs/howto/python.md. They are loaded when they are first used, so that
`import flexmarl` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexmarl.api import Run, RunSettings, evaluate, evaluate_async, export, export_async, load, open_run
    from flexmarl.api.functions import simulate, simulate_async, train, train_async

__version__ = "0.1.0"
__all__ = ["Run", "RunSettings", "evaluate", "evaluate_async", "export", "export_async", "load", "open_run"]
__all__ += ["simulate", "simulate_async", "train", "train_async"]


def __getattr__(name: str) -> Any:
    """Returns a name of the interface."""
    if name not in __all__:
        raise AttributeError(f"module 'flexmarl' has no attribute '{name}'; it has: {', '.join(__all__)}")
    return getattr(import_module("flexmarl.api"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
