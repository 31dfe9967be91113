"""Decides what a workload asks of its agents: which agents, in which order, how many tokens, and what pauses.

A plan has the calls of every episode of one task. `draw_plan` draws it from the settings of a synthetic workload,
`recorded_plan` reads it from the journal of a run. `Distribution` draws single numbers, such as a tool's latency.

A synthetic workload:

    query (task)   turns: round(turns_min + Exp(turns_extra))  ──► common route    planner writer planner
                                                                        │ at each turn, with chance route_correlation
    trajectory     a draw from the shares at the other turns   ──► its own route   planner planner planner
    call           len_mean x lognormal(query + trajectory + call effect) tokens, then a pause for a tool

Every number is a function of (seed, split, task, trajectory, hop) alone, never of time. Two systems that play the same
tasks therefore play the same calls, and their steps can be compared one by one.

A recorded workload: each policy of the run becomes one agent of the same name, because the journal names only policies.
The calls of an episode are played one after another, by hop. The pause after a call is the time until the next call was
sent: tools, and the workflow's own time.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from flexmarl.errors import ConfigError
from flexmarl.events.event import Event
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Called
from flexmarl.records import Purpose, split_sample_id, split_trajectory_id
from flexmarl.settings import Settings
from flexmarl.tasks import Split


class Distribution(Settings):
    """A distribution of numbers: long-tailed, short-tailed or constant. A plain number is a constant.

    >>> Distribution.model_validate(3.5).draw(random.Random(0))
    3.5
    """

    shape: Literal["constant", "exponential", "lognormal"] = Field(
        default="constant", description="Lognormal has the longest tail; `sigma` says how long."
    )
    mean: float = Field(ge=0, description="Before floor and cap.")
    sigma: float = Field(
        default=1.0,
        ge=0,
        description="Lognormal: standard deviation of the logarithm; 1.0 draws ten means once in 400.",
    )
    floor: float = Field(default=0.0, ge=0, description="Less counts as this.")
    cap: float | None = Field(default=None, description="More counts as this; null: no cap.")

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_constant(cls, value: Any) -> Any:
        return {"mean": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("cap", mode="before")
    @classmethod
    def _infinite_is_no_cap(cls, cap: Any) -> Any:
        """Reads `.inf` as null: run folders of older versions say so."""
        return None if cap == math.inf and cls.model_fields["cap"].default is None else cap

    @model_validator(mode="after")
    def _the_range_is_not_empty(self) -> Self:
        if self.cap is not None and self.cap < self.floor:
            raise ValueError(f"cap is {self.cap}, below floor, which is {self.floor}; use a cap of at least the floor")
        return self

    def draw(self, rng: random.Random) -> float:
        """Draws a number with `rng`, clipped to [floor, cap]."""
        number = max(self._draw(rng), self.floor)
        return number if self.cap is None else min(number, self.cap)

    def _draw(self, rng: random.Random) -> float:
        if self.mean == 0 or self.shape == "constant":
            return self.mean
        if self.shape == "exponential":
            return rng.expovariate(1 / self.mean)
        # exp(mu + sigma²/2) is the mean of a lognormal.
        return rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call that an episode will make."""

    agent: str
    tokens: int
    """Response tokens."""
    pause_s: float
    """Pause until the next call, such as a tool's time."""


class Plan(Protocol):
    """The calls of every episode of one task. A task holds it in `Task.data["plan"]`."""

    def calls(self, trajectory: int) -> tuple[PlannedCall, ...]:
        """Returns the calls of episode number `trajectory` of the group, in order."""
        ...


class WorkloadSettings(Settings):
    """A workload as data: `tasks.params` of the generator `workload`. Lengths in tokens, times in seconds."""

    agents: Mapping[str, float] = Field(min_length=1)
    """Each agent's share of the calls; shares are relative to their sum."""
    turns_min: int = Field(default=3, ge=1)
    turns_extra: float = Field(default=0.0, ge=0)
    """Mean of an exponential number of turns that is added to `turns_min`, drawn once per task."""
    turns_max: int = Field(default=16, ge=1)
    len_mean: float = Field(default=300.0, gt=0)
    """Mean length of a response, before floor and cap."""
    sigma_query: float = Field(default=0.2, ge=0)
    """Standard deviation of the logarithm of the factor that all calls of a task share."""
    sigma_traj: float = Field(default=0.1, ge=0)
    """Standard deviation of the logarithm of the factor that all calls of an episode share."""
    sigma_call: float = Field(default=1.0, ge=0)
    """The same for the factor of a single call: 1.1 puts one call in a hundred above seven times the mean."""
    len_floor: int = Field(default=16, ge=1)
    len_cap: int = Field(default=8192, ge=1)
    route_correlation: float = Field(default=0.5, ge=0, le=1)
    """Chance, at each turn, that an episode calls the agent on the common route of its task."""
    tool_mean_s: float = Field(default=0.5, ge=0)
    """Mean of the exponential pause after a call."""

    @field_validator("agents")
    @classmethod
    def _shares_can_be_drawn_from(cls, agents: Mapping[str, float]) -> Mapping[str, float]:
        if not all(share >= 0 and math.isfinite(share) for share in agents.values()) or not any(agents.values()):
            raise ValueError("shares must be at least 0, and one of them above 0")
        return agents

    @model_validator(mode="after")
    def _ranges_are_not_empty(self) -> Self:
        for low, high in (("turns_min", "turns_max"), ("len_floor", "len_cap")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} is {getattr(self, low)}, above {high}, which is {getattr(self, high)}")
        return self


@dataclass(frozen=True, slots=True)
class DrawnPlan:
    """The plan of one task of a synthetic workload."""

    workload: WorkloadSettings
    stream: tuple[int, ...]
    """Root of its random numbers: seed, split, index."""
    route: tuple[int, ...]
    """The common route, as indices into `workload.agents`; its length is the number of turns."""
    log_effect: float
    """The task's part of the logarithm of every response length."""

    def calls(self, trajectory: int) -> tuple[PlannedCall, ...]:
        """Draws the calls of one episode.

        >>> settings = WorkloadSettings(agents={"planner": 0.7, "writer": 0.3})
        >>> draw_plan(settings, 0, 0, "train").calls(3) == draw_plan(settings, 0, 0, "train").calls(3)
        True
        """
        workload, turns = self.workload, len(self.route)
        rng = np.random.default_rng([*self.stream, 1, trajectory])
        own = _routes(workload, rng.random(turns))
        common = rng.random(turns) < workload.route_correlation
        effect = self.log_effect + rng.normal(0.0, workload.sigma_traj)
        lengths = np.exp(effect + rng.normal(0.0, workload.sigma_call, turns)) * _median(workload)
        tokens = np.clip(np.rint(lengths), workload.len_floor, workload.len_cap).astype(int).tolist()
        pauses = rng.exponential(workload.tool_mean_s, turns).tolist()
        names = tuple(workload.agents)
        agents = [names[place] for place in np.where(common, self.route, own).tolist()]
        return tuple(map(PlannedCall, agents, tokens, pauses))


def draw_plan(workload: WorkloadSettings, seed: int, index: int, split: Split) -> DrawnPlan:
    """Draws the plan of task number `index`."""
    stream = (seed, int(split == "held_out"), index)
    rng = np.random.default_rng([*stream, 0])
    turns = min(workload.turns_max, round(workload.turns_min + rng.exponential(workload.turns_extra)))
    effect = rng.normal(0.0, workload.sigma_query)
    return DrawnPlan(workload, stream, tuple(_routes(workload, rng.random(turns)).tolist()), effect)


def _routes(workload: WorkloadSettings, uniform: np.ndarray) -> np.ndarray:
    """Maps [turns] numbers in [0, 1) to agents, by their shares. Returns indices into `workload.agents`."""
    limits = np.cumsum(list(workload.agents.values()))
    return np.searchsorted(limits / limits[-1], uniform, side="right")


def _median(workload: WorkloadSettings) -> float:
    """Returns the median of the lognormal with mean `len_mean`: exp(N(0, s^2)) has the mean exp(s^2 / 2)."""
    variance = workload.sigma_query**2 + workload.sigma_traj**2 + workload.sigma_call**2
    return workload.len_mean * math.exp(-variance / 2)


Calls = tuple[PlannedCall, ...]
COMPLETE = frozenset({"stop", "length"})
"""Finish reasons of calls that were answered."""


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """The plan of one task: the episodes that a recorded group had."""

    episodes: tuple[Calls, ...]

    def calls(self, trajectory: int) -> Calls:
        """Returns the calls of one episode. If the run had fewer episodes, they repeat from the first."""
        return self.episodes[trajectory % len(self.episodes)]


def recorded_plan(run: Path, index: int) -> RecordedPlan:
    """Returns the plan of task number `index`. If the run had fewer groups, they repeat. Raises ConfigError."""
    plans = _plans_of(run)
    return plans[index % len(plans)]


@cache
def _plans_of(run: Path) -> tuple[RecordedPlan, ...]:
    journal = RunFolder(run).journal
    if not journal.is_file():
        raise ConfigError(f"tasks.params.recorded: '{run}' is no run folder ({journal} does not exist)")
    plans = plans_in(read_run(journal))
    if not plans:
        raise ConfigError(f"tasks.params.recorded: {journal} has no answered call of a training step; use another run")
    return plans


def plans_in(events: Iterable[Event]) -> tuple[RecordedPlan, ...]:
    """Returns the plan of each training group, in order of admission; of a repeated group, that of the last attempt."""
    groups: dict[int, dict[tuple[int, int], dict[int, Called]]] = defaultdict(lambda: defaultdict(dict))
    for event in events:
        if not isinstance(event, Called) or event.purpose is Purpose.EVALUATION:
            continue
        if event.finish in COMPLETE and event.sampled_tokens:
            _, hop, trajectory = split_sample_id(event.request)
            group, index, attempt = split_trajectory_id(trajectory)
            groups[group][attempt, index][hop] = event
    return tuple(_plan(groups[group]) for group in sorted(groups))


def _plan(episodes: Mapping[tuple[int, int], Mapping[int, Called]]) -> RecordedPlan:
    last = max(attempt for attempt, _ in episodes)
    return RecordedPlan(tuple(_calls(episodes[place]) for place in sorted(episodes) if place[0] == last))


def _calls(by_hop: Mapping[int, Called]) -> Calls:
    events = [by_hop[hop] for hop in sorted(by_hop)]
    began = [event.began for event in events[1:]]
    ended = [event.ended for event in events]
    # Calls of one episode may overlap: the pause between them is then 0.
    pauses = [max(0.0, after - before) for after, before in zip(began, ended, strict=False)]
    return tuple(
        PlannedCall(event.policy, event.sampled_tokens, pause)
        for event, pause in zip(events, [*pauses, 0.0], strict=True)
    )
