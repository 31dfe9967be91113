"""Decides the admission law of a mode (docs/math.md, section 9)."""

import math
from decimal import Decimal

from flexmarl.orchestrator.settings import Mode, PipelineSettings
from flexmarl.rollout.admission import AdmissionLaw


def law_of(mode: Mode, pipeline: PipelineSettings, *, groups: int) -> AdmissionLaw:
    """P = `groups` per step, and what the mode makes of lag S and window W.

    >>> law_of(Mode.ASYNC, PipelineSettings(lag=1, window=0.25), groups=6).window
    3
    """
    if mode.synchronous:
        return AdmissionLaw(groups=groups, lag=0, window=1, ahead=pipeline.ahead)
    one_step_off = mode is Mode.ONE_STEP_OFF
    lag = 1 if one_step_off else pipeline.lag
    windows = {
        Mode.ONE_STEP_OFF: groups,
        # As a decimal: 0.4 of 15 groups are 6, and in floats a little more.
        Mode.ASYNC: math.ceil(Decimal(str(pipeline.window)) * (lag + 1) * groups),
        Mode.FIFO: 1,
        Mode.GREEDY: None,
    }
    return AdmissionLaw(groups=groups, lag=lag, window=windows[mode], steps_in_order=one_step_off)
