"""Decides the versions that a run may train on.

`law_of`     the admission law of a mode (docs/math.md, section 9)
`Versions`   the served version of each policy, and whether sampled tokens are recent enough to train on (laws 3, 10)
"""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal

from flexmarl.errors import TrainingError
from flexmarl.orchestrator.settings import Mode, PipelineSettings
from flexmarl.records import AnyTurn, PolicyName, Version
from flexmarl.rollout.admission import AdmissionLaw


def law_of(mode: Mode, pipeline: PipelineSettings, *, groups: int) -> AdmissionLaw:
    """The admission law of a mode, with P = `groups` per step: its lag S and its window W.

    >>> law_of(Mode.ASYNC, PipelineSettings(lag=1, window=0.25), groups=6).window
    3
    """
    if mode.synchronous:
        return AdmissionLaw(groups=groups, lag=0, window=1, ahead=pipeline.ahead)
    one_step_off = mode is Mode.ONE_STEP_OFF
    lag = 1 if one_step_off else pipeline.lag
    windows = {
        Mode.ONE_STEP_OFF: groups,
        # In decimals 0.1 * 3 * 10 is 3. In floats it is a little more, and would round up to 4.
        Mode.ASYNC: math.ceil(Decimal(str(pipeline.window)) * (lag + 1) * groups),
        Mode.FIFO: 1,
        Mode.GREEDY: None,
    }
    return AdmissionLaw(groups=groups, lag=lag, window=windows[mode], steps_in_order=one_step_off)


class Versions:
    """The served version of each policy. Nothing else in a run keeps them."""

    def __init__(self, served: Mapping[PolicyName, Version]) -> None:
        self._served = dict(served)

    @property
    def served(self) -> Mapping[PolicyName, Version]:
        """By policy, the version that every live instance has acknowledged."""
        return dict(self._served)

    def acknowledged(self, policy: PolicyName, version: Version) -> None:
        """Notes that all live instances of the policy serve `version`. Raises TrainingError if it is an older one."""
        if version < self._served[policy]:
            raise TrainingError(f"policy '{policy}' serves version {self._served[policy]}; {version} would go back")
        self._served[policy] = version

    def check(self, turns: Iterable[AnyTurn], *, max_staleness: int | None) -> None:
        """Checks that every token was sampled at most `max_staleness` versions before the served one (law 3).

        None means no bound. Raises TrainingError, which names the turn, for an older token, and for one of a version
        that is not served yet.
        """
        for turn in turns:
            served = self._served[turn.policy]
            oldest = 0 if max_staleness is None else served - max_staleness
            wrong = [run for run in turn.versions if not oldest <= run.version <= served]
            if wrong:
                allowed = f"version {served}" if oldest == served else f"versions {max(0, oldest)} to {served}"
                raise TrainingError(
                    f"turn {turn.sample_id}: token {wrong[0].start} was sampled by version {wrong[0].version} of "
                    f"'{turn.policy}', but this step is trained on {allowed}"
                )
