"""Cold start: what it minimises, what it repeats, and that it learns."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from flexmarl.errors import TrainingError
from flexmarl.training.backends.supervised import Demonstration, batches, num_updates, train_supervised
from flexmarl.training.settings import AdamWSettings, SupervisedSettings

Model = Callable[..., PreTrainedModel]


def copying(num: int, seed: int = 0) -> list[Demonstration]:
    """Prompt `a`, separator 0, answer `a`: only the answer is trained."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        word = random.integers(1, 23, random.integers(1, 4)).astype(np.int32)
        ids = np.concatenate((word, np.zeros(1, np.int32), word))
        rows.append(Demonstration(ids, np.arange(len(ids)) > len(word)))
    return rows


def test_it_learns_to_copy(make_model: Model) -> None:
    seen: list[float] = []
    chosen = SupervisedSettings(epochs=3, batch=16, optimizer=AdamWSettings(learning_rate=1e-2))
    rows = copying(320)
    last = train_supervised(make_model(), rows, chosen, seed=0, progress=lambda update, loss: seen.append(loss))
    assert len(seen) == num_updates(rows, chosen) == 60
    assert seen[-1] == last
    assert np.mean(seen[-10:]) < 0.8 * np.mean(seen[:10])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_its_loss_is_the_mean_over_trained_tokens_alone(make_model: Model, aggregation: str) -> None:
    rows = copying(8)
    chosen = SupervisedSettings.model_validate({"batch": 8, "aggregation": aggregation, "max_tokens_per_forward": 12})
    found = train_supervised(make_model(dtype=torch.float64), rows, chosen, seed=0)
    model = make_model(dtype=torch.float64)
    nll = []
    for row in rows:
        ids = torch.from_numpy(row.ids).long()
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        nll.append([-logprobs[t - 1, ids[t]].item() for t in np.flatnonzero(row.trained)])
    per_row = [np.mean(values) for values in nll]
    expected = np.mean(np.concatenate(nll)) if aggregation == "token-mean" else np.mean(per_row)
    assert found == pytest.approx(expected, rel=1e-7)


def test_the_same_seed_gives_the_same_weights(make_model: Model) -> None:
    def train(seed: int) -> torch.Tensor:
        model = make_model()
        train_supervised(model, copying(100), SupervisedSettings(batch=8), seed=seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(1), train(1))
    assert not torch.equal(train(1), train(2))


def test_every_demonstration_comes_once_an_epoch_among_rows_of_like_length() -> None:
    rows = copying(1000)
    chosen = SupervisedSettings(batch=10, epochs=2)
    drawn = list(batches(rows, chosen, seed=0))
    assert sorted(map(id, (r for b in drawn[:100] for r in b))) == sorted(map(id, rows))
    assert np.mean([len({len(r.ids) for r in batch}) == 1 for batch in drawn]) > 0.9


def test_a_demonstration_without_trained_tokens_is_refused(make_model: Model) -> None:
    row = Demonstration(np.array([1, 2], dtype=np.int32), np.array([True, False]))
    with pytest.raises(TrainingError, match="demonstration 0 has 2 ids and 2 marks, 1 of them set"):
        train_supervised(make_model(), [row], SupervisedSettings(), seed=0)
