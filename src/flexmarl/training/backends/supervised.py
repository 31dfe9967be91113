"""Supervised training on a causal LM: the cold start that gives every agent of a team its first skill."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from flexmarl.errors import TrainingError
from flexmarl.records import IntArray
from flexmarl.training.backends.causal_lm import Updater, precision, prepare_for_training
from flexmarl.training.backends.forward import predict
from flexmarl.training.backends.logprobs import HeadForm, head_form
from flexmarl.training.batching import pad, plan_passes
from flexmarl.training.settings import SupervisedSettings

WINDOW_BATCHES = 64
"""Rows are sorted by length inside windows of this many batches: little padding, and a new mix in every epoch."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Token ids of one row, with marks on those that the model is to learn."""

    ids: IntArray
    trained: NDArray[np.bool_]
    """[len(ids)] True for trained tokens. The first token cannot be trained, since nothing predicts it."""


Progress = Callable[[int, float], None]
"""Called after an update with its number, from 1, and its mean loss."""


def _ignore(update: int, loss: float) -> None:
    pass


def train_supervised(
    model: PreTrainedModel,
    demonstrations: Sequence[Demonstration],
    settings: SupervisedSettings,
    *,
    seed: int,
    progress: Progress = _ignore,
) -> float:
    """Trains in place on minus the mean log-probability of the trained tokens; returns the last update's loss.

    Deterministic for a seed, device and number of threads. It blocks: call it from a script or on a device thread.
    Raises TrainingError for a demonstration without trained tokens, or with marks that do not fit its ids.
    """
    for index, row in enumerate(demonstrations):
        if len(row.ids) != len(row.trained) or row.trained[:1].any() or not row.trained.any():
            raise TrainingError(
                f"demonstration {index} has {len(row.ids)} ids and {len(row.trained)} marks, "
                f"{int(row.trained.sum())} of them set; mark at least one token, and not the first"
            )
    prepare_for_training(model, activation_checkpointing=False)
    updater, form = Updater(model, settings), head_form(model)
    loss = 0.0
    for update, batch in enumerate(batches(demonstrations, settings, seed)):
        loss = _accumulate(model, batch, settings, form)
        updater.apply(updater.take_gradients(), update, f"supervised update {update + 1}")
        progress(update + 1, loss)
    return loss


def num_updates(demonstrations: Sequence[Demonstration], settings: SupervisedSettings) -> int:
    """Number of updates that `train_supervised` makes: the natural value of `decay_steps`."""
    return settings.epochs * -(-len(demonstrations) // settings.batch)


def batches(
    demonstrations: Sequence[Demonstration], settings: SupervisedSettings, seed: int
) -> Iterator[list[Demonstration]]:
    """Every demonstration once per epoch, in batches of similar length that come in random order."""
    random = np.random.default_rng(seed)
    lengths = np.array([len(row.ids) for row in demonstrations])
    window = WINDOW_BATCHES * settings.batch
    for _ in range(settings.epochs):
        shuffled = random.permutation(len(demonstrations))
        for start in range(0, len(shuffled), window):
            rows = shuffled[start : start + window]
            rows = rows[np.argsort(lengths[rows], kind="stable")]
            cuts = [rows[i : i + settings.batch] for i in range(0, len(rows), settings.batch)]
            for cut in random.permutation(len(cuts)):
                yield [demonstrations[i] for i in cuts[cut]]


def _accumulate(
    model: PreTrainedModel, batch: Sequence[Demonstration], settings: SupervisedSettings, form: HeadForm | None
) -> float:
    counts = np.array([row.trained.sum() for row in batch])
    per_row = settings.aggregation == "seq-mean-token-mean"
    weights = 1.0 / (counts * len(batch)) if per_row else np.full(len(batch), 1.0 / counts.sum())
    total = 0.0
    for rows in plan_passes(np.array([len(row.ids) for row in batch]), settings.max_tokens_per_forward):
        padded = pad([batch[i].ids for i in rows], [batch[i].trained for i in rows])
        token_weights = torch.from_numpy(np.repeat(weights[rows], counts[rows])).to(model.device)
        with precision(model):
            logprobs = predict(model, padded, form=form).logprobs
            loss = -(logprobs @ token_weights.to(logprobs.dtype))
            loss.backward()
        total += loss.item()
    return total
