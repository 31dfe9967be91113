"""Settings of the pipeline: size of a step, overlap of rollout and training, times of evaluations and checkpoints.

`law_of` gives the admission law of a mode (docs/math.md, section 9).
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from flexmarl.rollout.admission import AdmissionLaw
from flexmarl.settings import Settings


class Mode(StrEnum):
    """Which work may overlap (docs/math.md, section 9). The first three modes are strictly on-policy."""

    SYNC = "sync"
    """Training starts when the whole step's rollout has ended."""
    MICROBATCH = "microbatch"
    """Complete groups train while others still play. One update at the end (FlexMARL section 4.3)."""
    COLOCATED = "colocated"
    """As `sync`, on shared devices: engines sleep while trainers hold them. On Ray and simulated, trainers leave them,
    too."""
    ONE_STEP_OFF = "one_step_off"
    """Step k trains while step k + 1 plays."""
    ASYNC = "async"
    """Groups play all the time. A batch is the oldest finished groups inside a window (Forge's windowed FIFO)."""
    FIFO = "fifo"
    """A window of one group: groups are trained in the order of admission. A baseline: it waits for slow groups."""
    GREEDY = "greedy"
    """No window: any finished group may be trained. A baseline: it trains on short answers before long ones."""

    @property
    def synchronous(self) -> bool:
        """True if every token of a step is sampled at the step's version."""
        return self in (Mode.SYNC, Mode.MICROBATCH, Mode.COLOCATED)


MOST = 1_000_000
"""Maximum number of tasks or episodes of one step or evaluation, all of which are in memory at once."""


class PublicationSettings(Settings):
    """After which updates new weights reach the engines, in the asynchronous modes with `updates: together`."""

    type: Literal["eager", "lazy", "adaptive"] = Field(
        default="eager",
        description="eager: after each update. lazy: after every N updates. adaptive: while few calls wait for the "
        "policy's instances and few finished groups for training, and after N updates at the latest. A checkpoint, an "
        "evaluation and the last step publish the newest weights anyway.",
    )
    every: int = Field(
        default=4,
        ge=1,
        le=64,
        description="lazy, adaptive: N. Tokens may be N - 1 versions older when they are trained on (docs/math.md, "
        "section 9).",
    )
    waiting_calls: float = Field(
        default=1.0, ge=0, description="adaptive: an update waits while more calls than this wait per instance."
    )
    waiting_steps: float = Field(
        default=1.0,
        gt=0,
        description="adaptive: an update waits while finished groups of so many steps wait to be trained.",
    )

    @property
    def unpublished(self) -> int:
        """Most updates that may be ahead of the served version."""
        return 0 if self.type == "eager" else self.every - 1


class PipelineSettings(Settings):
    """How far rollout may be ahead of training. `batch.groups` groups make a step."""

    ahead: bool = Field(
        default=False,
        description="sync, microbatch: the next step's rollout begins when this one's has ended, and each call waits "
        "for its own policy's new version; on-policy still. The other keys are for the asynchronous modes.",
    )
    lag: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default=1,
        description="Steps that rollout may be ahead: lag + 1 steps' groups are active. 1 if one_step_off. auto: it "
        "begins with 1 and follows what is measured, so that lag + 1 steps last as long as all but one task in a "
        "thousand (orchestrator/measured_lag.py).",
    )
    max_lag: int = Field(default=8, ge=1, le=64, description="lag=auto: at most this.")
    window: float = Field(
        default=0.3, gt=0, le=1, description="async: window in shares of the active groups; smaller is less off-policy."
    )
    head_deadline_s: float = Field(
        default=1800.0, gt=0, description="A group that plays for longer no longer holds up those behind it."
    )
    late: Literal["expire", "requeue"] = Field(
        default="expire",
        description="What becomes of it: it ends as expired, or its task is admitted again, at the tail, "
        "`rollout.group_retries` times at most.",
    )
    updates: Literal["together", "per_policy"] = Field(
        default="together", description="One update of all policies per step, or each policy as its own batch fills."
    )
    policy_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="per_policy: a batch whose first group has waited for longer is trained as it is.",
    )
    publish: PublicationSettings = Field(
        default=PublicationSettings(), description="together: after which updates new weights reach the engines."
    )


def law_of(mode: Mode, pipeline: PipelineSettings, *, groups: int, now: int = 1) -> AdmissionLaw:
    """The admission law of a mode, with P = `groups` per step: its lag S, which is `now` if it is auto, and window W.

    >>> law_of(Mode.ASYNC, PipelineSettings(lag=1, window=0.25), groups=6).window
    3
    """
    if mode.synchronous:
        return AdmissionLaw(groups=groups, lag=0, window=1, ahead=pipeline.ahead)
    one_step_off = mode is Mode.ONE_STEP_OFF
    lag = 1 if one_step_off else now if pipeline.lag == "auto" else pipeline.lag
    windows = {
        Mode.ONE_STEP_OFF: groups,
        # In decimals 0.1 * 3 * 10 is 3. In floats it is a little more, and would round up to 4.
        Mode.ASYNC: math.ceil(Decimal(str(pipeline.window)) * (lag + 1) * groups),
        Mode.FIFO: 1,
        Mode.GREEDY: None,
    }
    return AdmissionLaw(
        groups=groups,
        lag=lag,
        window=windows[mode],
        steps_in_order=one_step_off,
        unpublished=pipeline.publish.unpublished,
    )


class BatchSettings(Settings):
    """The global batch of a step."""

    groups: int = Field(default=64, ge=1, le=MOST, description="Tasks per step.")
    episodes: int = Field(
        default=8, ge=1, le=MOST, description="Episodes per group; group-relative credit needs at least 2."
    )

    @model_validator(mode="after")
    def _a_step_fits(self) -> Self:
        if (plays := self.groups * self.episodes) > MOST:
            raise ValueError(
                f"groups is {self.groups} and episodes {self.episodes}: a step keeps the records of all its {plays} "
                f"episodes in memory, and may have {MOST}; use fewer, and more steps"
            )
        return self


class EvaluateSettings(Settings):
    """Evaluation on held-out tasks, against pinned versions."""

    tasks: int = Field(
        default=256, ge=0, le=MOST, description="Held-out tasks before and after training; 0 turns evaluation off."
    )
    every: int = Field(default=0, ge=0, description="Also every so many steps; 0 is never.")
    every_tasks: int = Field(default=64, ge=1, le=MOST, description="Held-out tasks of these evaluations in between.")
    episodes: int = Field(default=1, ge=1, le=MOST, description="Episodes per held-out task.")
    temperature: float = Field(
        default=1.0, ge=0, description="Replaces every agent's sampling temperature; 0 is greedy."
    )
    keep: int = Field(
        default=16,
        ge=0,
        description="Evaluations of a run whose conversations stay on disk: the first and the newest ones; 0 is none.",
    )


SUCCESS = "success"
"""The figure for which a failed episode counts 0."""


class FigureSettings(Settings):
    """A figure of evaluations, and the direction in which it is better."""

    metric: str = Field(
        default=SUCCESS,
        min_length=1,
        description="Figure as `flexmarl eval` names it: success, another one that the workflow reports, or "
        "reward/AGENT. Its name in metrics.jsonl works too: eval/team/success. A failed episode counts 0 for success, "
        "and as the worst value so far for any other figure.",
    )
    mode: Literal["max", "min"] = Field(default="max", description="max: higher is better; min: lower is.")

    @field_validator("metric")
    @classmethod
    def _has_its_short_name(cls, metric: str) -> str:
        for prefix in ("evaluate.", "eval/", "team/"):
            metric = metric.removeprefix(prefix)
        return metric

    def value(self, figures: Mapping[str, float]) -> float:
        """The figure; NaN if it is missing."""
        return figures.get(self.metric, math.nan)

    def gain(self, value: float) -> float:
        """The value, signed so that more is better."""
        return value if self.mode == "max" else -value


class StopSettings(FigureSettings):
    """Ends a run whose evaluations no longer improve."""

    patience: int = Field(default=5, ge=1, description="Evaluations in a row without improvement that end the run.")
    min_delta: float = Field(
        default=0.0, ge=0, description="An evaluation improves if it is better than the best by more than this."
    )


class CheckpointSettings(Settings):
    """Checkpoints at step boundaries."""

    every: int = Field(default=10, ge=0, description="Save every so many steps, and after the last one; 0 is never.")
    keep: int = Field(default=2, ge=1, description="How many of the newest checkpoints stay.")
    best: FigureSettings | None = Field(
        default=None,
        description="Also keep the checkpoint of the best evaluation, whatever `keep` and `budget_gb` say: "
        "`checkpoints/best`. null: only the newest stay.",
    )
    budget_gb: float | None = Field(
        default=None,
        gt=0,
        description="Fewer stay if they would take more than this; the newest always stays. null: no bound.",
    )
    store: bool = Field(
        default=False,
        description="Each checkpoint holds a copy of the store, made while the run goes on. A run whose store is lost, "
        "with the disk of its machine for example, then keeps its turns. It takes the store's size on the disk each "
        "time. Without a copy, such a run goes on with an empty store.",
    )
    on_interrupt_s: float = Field(
        default=15.0,
        ge=0,
        description="After the first Ctrl-C or SIGTERM, the step under way may take so many seconds more; it is then "
        "saved. The second one ends the run at once; with 0, the first one. Slurm and Kubernetes kill 30 s after "
        "SIGTERM.",
    )

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes."""
        return None if self.budget_gb is None else int(self.budget_gb * 1e9)


class AlarmSettings(Settings):
    """Alarms: a line on the screen, in the journal and in the summary when training goes wrong. null turns one off."""

    steps: int = Field(
        default=2, ge=1, description="Steps in a row in which a condition must hold; `untrained` has its own number."
    )
    untrained: int | None = Field(default=3, ge=1, description="Steps in a row without an update of a policy.")
    no_spread: float | None = Field(
        default=0.95,
        gt=0,
        le=1,
        description="Share of a step's groups whose rewards are equal, dropped by `credit.filter` or not.",
    )
    failed: float | None = Field(default=0.5, gt=0, le=1, description="Share of a step's episodes that failed.")
    cut: float | None = Field(
        default=0.5, gt=0, le=1, description="Share of an agent's replies that `max_tokens` ended."
    )
    entropy: float | None = Field(
        default=0.02,
        gt=0,
        lt=1,
        description="Entropy of a policy, as a share of that of its first update: it is too low below this.",
    )
    drift: float | None = Field(
        default=0.1,
        gt=0,
        description="Divergence of a policy's trainer from its engine, in nats per sampled token: too much above this.",
    )
