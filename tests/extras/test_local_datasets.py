"""Datasets on this disk become tasks: folders of files, lists of files, and what `save_to_disk` wrote."""

from pathlib import Path
from typing import Any

import pytest

from flexmarl.errors import ConfigError
from flexmarl.tasks import check_disjoint
from flexmarl.tasks.table import HuggingFaceTasks

datasets: Any = pytest.importorskip("datasets", reason="needs the extra 'datasets': make test-extras")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def products(start: int, end: int) -> Any:
    rows = [{"question": f"{i}*7", "answer": i * 7, "level": "easy"} for i in range(start, end)]
    return datasets.Dataset.from_list(rows)


def opened(base: Path, **options: Any) -> tuple[list[str], list[str]]:
    """Prompts of one epoch and of the held-out tasks."""
    tasks = HuggingFaceTasks(prompt="question", reference="answer", scorer="number", epochs=1, shuffle=False, **options)
    source = tasks.open(seed=0, base=base)
    first = source.train(0)
    assert first.score(f"it is {int(first.prompt.split('*')[0]) * 7}") == 1.0
    assert first.data == {"level": "easy"}
    assert source.num_train is not None
    check_disjoint(source, num_train=source.num_train, num_held_out=99)
    return (
        [source.train(index).prompt for index in range(source.num_train)],
        [task.prompt for task in source.held_out(99)],
    )


def prompts(start: int, end: int) -> list[str]:
    return [f"{i}*7" for i in range(start, end)]


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_a_folder_of_files_is_a_dataset_with_a_split_per_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "data").mkdir()
    for split, rows in {"train": products(0, 6), "test": products(6, 9)}.items():
        getattr(rows, f"to_{kind}")(str(tmp_path / "data" / f"{split}.{kind}"))
    assert opened(tmp_path, dataset="data", held_out_split="test") == (prompts(0, 6), prompts(6, 9))


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_named_files_are_relative_to_the_config(tmp_path: Path, kind: str) -> None:
    getattr(products(0, 6), f"to_{kind}")(str(tmp_path / f"rows.{kind}"))
    train, held_out = opened(tmp_path, dataset=kind, data_files=(f"rows.{kind}",), held_out_share=0.34)
    assert sorted([*train, *held_out]) == prompts(0, 6)
    assert len(held_out) == 2


def test_what_save_to_disk_wrote_is_read_with_its_splits(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": products(0, 6), "test": products(6, 9)})
    both.save_to_disk(str(tmp_path / "saved"))
    assert opened(tmp_path, dataset="saved", held_out_split="test") == (prompts(0, 6), prompts(6, 9))


def test_one_dataset_without_splits_is_the_split_train(tmp_path: Path) -> None:
    products(0, 6).save_to_disk(str(tmp_path / "saved"))
    assert opened(tmp_path, dataset="saved", held_out_share=0.0) == (prompts(0, 6), [])


def test_a_split_that_was_not_saved_is_answered_with_those_there_are(tmp_path: Path) -> None:
    products(0, 6).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"saved has no split 'test'; there are: train\."):
        opened(tmp_path, dataset="saved", held_out_split="test")


def test_a_key_that_saved_datasets_lack_is_refused(tmp_path: Path) -> None:
    products(0, 6).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"tasks\.revision is set, but .*saved was written by `save_to_disk`"):
        opened(tmp_path, dataset="saved", revision="main")
