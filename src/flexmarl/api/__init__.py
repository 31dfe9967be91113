"""Python interface, for scripts and notebooks. In: a config. Out: a run, with its figures, turns and events; models.

    settings = flexmarl.load("run.yaml", {"batch.groups": 8}, steps=4)
    run = flexmarl.train(settings)                   # in a script
    run = await flexmarl.train_async(settings)       # where an event loop runs, as in a notebook
    print(run.folder, run.metrics[-1]["team/success"])

The commands call the same functions. docs/howto/python.md shows them all.
"""

from flexmarl.api.functions import (
    evaluate,
    evaluate_async,
    export,
    export_async,
    load,
    open_run,
    simulate,
    simulate_async,
    train,
    train_async,
)
from flexmarl.api.handle import Run
from flexmarl.config import RunSettings

__all__ = ["Run", "RunSettings", "evaluate", "evaluate_async", "export", "export_async", "load", "open_run"]
__all__ += ["simulate", "simulate_async", "train", "train_async"]
