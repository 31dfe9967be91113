"""Decides the weight of each sampled token in the loss, and the divisor of the sum.

Every mode is S / D. S is a sum over tokens with fixed weights, and D is a number that depends only on the global batch.
So gradients of S can be added up over micro-batches, in any order, before D is known. L is the loss of a token:

| mode                      | S                            | D           |
|---------------------------|------------------------------|-------------|
| `token-mean`              | sum_i w_i sum_t L            | N_tok       |
| `seq-mean-token-mean`     | sum_i w_i / len_i sum_t L    | N_seq       |
| `seq-mean-token-sum`      | sum_i w_i sum_t L            | N_seq       |
| `seq-mean-token-sum-norm` | sum_i w_i / Hc sum_t L       | N_seq       |
| `traj-mean-token-mean`    | sum_i w_i / len_e sum_t L    | N_traj      |
| `token-sum`               | sum_i w_i sum_t L            | 1           |

Row i belongs to episode e; Hc is `horizon_tokens`; len_e = sum of w_i len_i over the episode's rows of the policy.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexmarl.errors import TrainingError
from flexmarl.records import CreditedTurn, Divisors, Sample

Aggregation = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "traj-mean-token-mean",
    "token-sum",
]


def token_weights(
    samples: Sequence[Sample], mode: Aggregation, horizon_tokens: int | None = None
) -> NDArray[np.float64]:
    """[B] float64: the weight of each token of each row, 0 for rows without sampled tokens.

    >>> token_weights([], "token-mean")
    array([], dtype=float64)
    """
    weights = np.array([sample.weight if sample.num_tokens else 0.0 for sample in samples], dtype=np.float64)
    match mode:
        case "token-mean" | "seq-mean-token-sum" | "token-sum":
            return weights
        case "seq-mean-token-mean":
            return weights / np.array([max(sample.num_tokens, 1) for sample in samples], dtype=np.float64)
        case "seq-mean-token-sum-norm":
            assert horizon_tokens is not None, "checked by the loss settings"
            return weights / horizon_tokens
        case "traj-mean-token-mean":
            return weights / np.array([_episode_tokens(sample) for sample in samples], dtype=np.float64)


def divisors_of(samples: Iterable[CreditedTurn]) -> Divisors:
    """Counts the weighted tokens, rows and episodes of one policy's samples, which must be whole episodes.

    Each sum is exact until one rounding at its end, so the order of the samples cannot change its last bit.
    """
    rows = [sample for sample in samples if sample.num_tokens and sample.weight]
    return Divisors(
        num_tokens=math.fsum(sample.weight * sample.num_tokens for sample in rows),
        num_sequences=math.fsum(sample.weight for sample in rows),
        num_trajectories=float(len({sample.turn.episode for sample in rows})),
    )


def divisor(divisors: Divisors, mode: Aggregation) -> float:
    """The divisor D of a mode; 0 means that there is nothing to learn from."""
    match mode:
        case "token-mean":
            return divisors.num_tokens
        case "seq-mean-token-mean" | "seq-mean-token-sum" | "seq-mean-token-sum-norm":
            return divisors.num_sequences
        case "traj-mean-token-mean":
            return divisors.num_trajectories
        case "token-sum":
            return float(divisors.num_sequences > 0)


def _episode_tokens(sample: Sample) -> float:
    if not sample.weight or not sample.num_tokens:
        return 1.0
    if sample.episode_tokens is None:
        raise TrainingError(
            f"sample {sample.turn.sample_id} has no episode_tokens, which aggregation 'traj-mean-token-mean' needs; "
            "set them when the episode's credit is computed, or use 'seq-mean-token-mean'"
        )
    return sample.episode_tokens
