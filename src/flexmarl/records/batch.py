"""Records that training reads: samples, micro-batches, and the divisors of an update."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexmarl.records.episode import AnyTurn, Turn
from flexmarl.records.ids import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedTurn:
    """The result of credit for one turn, written into the turn's row. The tokens are in the store."""

    turn: AnyTurn
    advantage: float
    """Advantage of every sampled token, unless `advantages` is given. Fixed when the row becomes READY."""
    advantages: NDArray[np.float64] | None = None
    """[R] advantage of each token, if the tokens differ; None: all have `advantage`."""
    returns: NDArray[np.float64] | None = None
    """[R] value that a critic should have predicted at each token; None: the critic learns nothing here."""
    values: NDArray[np.float64] | None = None
    """[R] value that the critic predicted at each token when the advantages were computed."""
    open_group: str = ""
    """The turn's credit group, if that is not complete yet. `advantage` is then only a score c: the complete group has
    a line, and the advantage is scale x c + offset. "": `advantage` is final."""
    weight: float = 1.0
    """Row weight w_i of docs/math.md section 1; 0 keeps the row out of sums and divisors."""
    reward: float = 0.0
    shaped: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward that credit used, by name; empty if no term changed those that the workflow gave."""
    episode_tokens: float | None = None
    """len_e of docs/math.md section 1: sum of w_i len_i over the episode's rows of this policy. Only the aggregation
    `traj-mean-token-mean` needs it."""

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return self.turn.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(CreditedTurn):
    """One turn as training sees it: its tokens, their advantages and a weight."""

    turn: Turn

    @property
    def token_advantages(self) -> NDArray[np.float64]:
        """[R] advantage of each sampled token."""
        return np.full(self.num_tokens, self.advantage) if self.advantages is None else self.advantages

    @property
    def has_gradient(self) -> bool:
        """True if the sample can give a gradient: it has a non-zero advantage, or returns for a critic."""
        return self.returns is not None or bool(self.token_advantages.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one policy that go through one gradient accumulation."""

    micro_batch_id: str
    """Accumulating the same id twice changes nothing."""
    policy: PolicyName
    samples: tuple[Sample, ...]

    def counts(self) -> dict[str, Any]:
        """The LossReport's counts of samples and weighted tokens; those of open credit groups are counted apart."""
        closed = [sample for sample in self.samples if not sample.open_group]
        opened = [sample for sample in self.samples if sample.open_group]
        return {
            "num_samples": len(closed),
            "num_tokens": sum(sample.weight * sample.num_tokens for sample in closed),
            "open_samples": len(opened),
            "open_tokens": sum(sample.weight * sample.num_tokens for sample in opened),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisors:
    """Sizes of one policy's global batch, counted on rows after filtering: the D of every aggregation mode.

    >>> Divisors(num_tokens=10.0, num_sequences=2.0, num_trajectories=1.0) + Divisors()
    Divisors(num_tokens=10.0, num_sequences=2.0, num_trajectories=1.0)
    """

    num_tokens: float = 0.0
    """N_tok = sum of w_i len_i."""
    num_sequences: float = 0.0
    """N_seq = sum of w_i over rows with sampled tokens."""
    num_trajectories: float = 0.0
    """N_traj = episodes with at least one weighted row."""

    def __add__(self, other: "Divisors") -> "Divisors":
        """Divisors of two disjoint batches. Exact for trajectories: all rows of an episode arrive with its group."""
        return Divisors(
            num_tokens=self.num_tokens + other.num_tokens,
            num_sequences=self.num_sequences + other.num_sequences,
            num_trajectories=self.num_trajectories + other.num_trajectories,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """Un-normalised sums of one micro-batch. Added over all micro-batches, they give the sums of the batch."""

    micro_batch_id: str
    num_samples: int
    """Samples in the sums. Samples of open credit groups count as `open_samples` until their group is closed."""
    num_tokens: float
    open_samples: int = 0
    open_tokens: float = 0.0
    sums: Mapping[str, float] = field(default_factory=dict)
    """`loss`, `clipped`, `kl_to_sampler`, `entropy` ... each a sum over weighted tokens."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CreditLine:
    """The line that gives a row's advantage from its score c, for a complete credit group.

    A = (c - baseline) / divisor = scale c + offset
    """

    baseline: float
    divisor: float
    """Infinite if nothing can be learned from the group: all its advantages are then 0."""
    weight: float = 1.0
    """Row weight of all rows of the group."""

    @property
    def scale(self) -> float:
        """Factor of the score."""
        return 1 / self.divisor

    @property
    def offset(self) -> float:
        """Number added to the scaled score of every row of the group."""
        return -self.baseline / self.divisor
