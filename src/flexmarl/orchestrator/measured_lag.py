"""Decides how many steps rollout may be ahead, from what a run has measured (`pipeline.lag: auto`).

The rule (docs/benchmarks.md, asynchronous modes): `lag + 1` steps last as long as all but one task in a thousand.

    a task    from its admission until its last episode ends; one that plays still, for as long as it has played
    a step    its seconds without those in which finished groups stood outside the window: a larger lag widens it

A longer lag makes tokens older, a shorter one makes trainers wait. The lag is raised as soon as the rule says so, and
lowered by one when the rule has asked for less in each of the last `CALM` steps, so that it does not swing.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from flexmarl.rollout.admission import AdmissionLaw

FEWEST = 3
"""Steps that are measured before the first decision. The first step of a command is not one: it begins with nothing."""
CALM = 8
MOST_STEPS = 1000
"""A task lasts no more steps than that in the rule; some steps take no time that can be measured."""
LATEST_STEPS, LATEST_TASKS = 16, 1000
"""Older measurements are forgotten: lengths change while a policy learns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRuling:
    """The admission law that takes the place of another one, and why."""

    law: AdmissionLaw
    because: str


class MeasuredLag:
    """Decides the lag of one command. All durations are in seconds."""

    def __init__(self, laws: Mapping[int, AdmissionLaw], *, lag: int) -> None:
        """`laws`: the admission law of every lag from 1 to `pipeline.max_lag`; `lag`: the one to begin with."""
        self.lag = lag
        self._laws, self._most = laws, max(laws)
        self._tasks: deque[float] = deque(maxlen=LATEST_TASKS)
        self._steps: deque[float] = deque(maxlen=LATEST_STEPS)
        self._asked: deque[int] = deque(maxlen=CALM)
        """Lags that the rule asked for after the latest steps, since the last change."""

    def task_ended(self, seconds: float) -> None:
        """Notes the duration of a task."""
        self._tasks.append(seconds)

    def step_ended(self, seconds: float, *, oldest: float = 0.0) -> LagRuling | None:
        """Notes the duration of a step. Returns a new lag, if it is time for one.

        `oldest`: for how long the oldest of the tasks has played that are playing now.
        """
        self._steps.append(seconds)
        if len(self._steps) < FEWEST or not self._tasks:
            return None
        step_s = median(self._steps)
        tasks = sorted(self._tasks)
        task_s = max(oldest, tasks[math.ceil(0.999 * len(tasks)) - 1])
        steps = task_s / step_s if step_s > 0 else math.inf
        wanted = max(1, math.ceil(min(steps, MOST_STEPS)) - 1)
        self._asked.append(wanted)
        lag = min(wanted, self._most)
        if lag < self.lag:
            calm = len(self._asked) == CALM and max(self._asked) < self.lag
            lag = self.lag - 1 if calm else self.lag
        if lag == self.lag:
            return None
        self.lag = lag
        self._asked.clear()
        because = f"all but one task in a thousand last at most {task_s:.3g} s, a step {step_s:.3g} s: lag {wanted}"
        bounded = f", pipeline.max_lag is {self._most}" if wanted > self._most else ""
        return LagRuling(law=self._laws[lag], because=because + bounded)
