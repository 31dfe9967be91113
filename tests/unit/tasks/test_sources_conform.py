"""Every source passes the conformance check, and the check catches what it should."""

import json
from pathlib import Path

import pytest

from flexmarl.records import Task
from flexmarl.tasks import Split, TaskSource, task_generator
from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.tasks.table import JsonlTasks
from flexmarl.testing.plugin_checks import FakeTasks, check_task_source


@task_generator("test-conform")
def make_product(seed: int, index: int, split: Split) -> Task:
    return Task(input_id=f"{split}-{index}", prompt=f"{split} {seed}*{index}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}+1", "reference": i + 1}) for i in range(30)))
    return path


def test_generators_conform() -> None:
    check_task_source(lambda: GeneratorTasks(name="test-conform").open(seed=3))


@pytest.mark.parametrize("epochs", [None, 1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_files_conform(file: Path, epochs: int | None, shuffle: bool) -> None:
    check_task_source(lambda: JsonlTasks(file=file, epochs=epochs, shuffle=shuffle).open(seed=3))


@pytest.mark.parametrize("num_train", [None, 7])
def test_the_fake_conforms(num_train: int | None) -> None:
    check_task_source(lambda: FakeTasks(num_train))


def test_a_source_that_is_a_stream_is_caught() -> None:
    class Stream(FakeTasks):
        drawn = 0

        def train(self, index: int) -> Task:
            self.drawn += 1
            return super().train(self.drawn)

    def make() -> TaskSource:
        return Stream()

    with pytest.raises(AssertionError, match="the position alone decides"):
        check_task_source(make)


def test_a_source_without_an_end_is_caught() -> None:
    class Endless(FakeTasks):
        def train(self, index: int) -> Task:
            return FakeTasks().train(index)

    with pytest.raises(AssertionError, match="past the end is SourceExhausted naming position 5"):
        check_task_source(lambda: Endless(5))
