"""Decides the admission law of a mode (docs/math.md, section 9)."""

import math

from flexmarl.orchestrator.settings import Mode, PipelineSettings
from flexmarl.rollout.admission import AdmissionLaw


def law_of(mode: Mode, pipeline: PipelineSettings, *, groups: int) -> AdmissionLaw:
    """P = `groups` per step, and what the mode makes of lag S and window W.

    >>> law_of(Mode.ASYNC, PipelineSettings(lag=1, window=0.25), groups=6)
    AdmissionLaw(groups=6, lag=1, window=3)
    """
    if mode.synchronous:
        return AdmissionLaw(groups=groups, lag=0, window=1)
    # One step off and first in, first out are one law: with S = 1 a step is the P oldest groups, and P more play.
    lag = 1 if mode is Mode.ONE_STEP_OFF else pipeline.lag
    windows = {
        Mode.ONE_STEP_OFF: 1,
        Mode.ASYNC: math.ceil(pipeline.window * (lag + 1) * groups),
        Mode.FIFO: 1,
        Mode.GREEDY: None,
    }
    return AdmissionLaw(groups=groups, lag=lag, window=windows[mode])
