"""A function is a source of tasks, and its parameters come from the config."""

from types import FunctionType
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from flexmarl.errors import ConfigError
from flexmarl.records import Task
from flexmarl.tasks import Split, TaskSettings, check_disjoint, task_generator
from flexmarl.tasks.generator import GeneratorTasks


@task_generator("test-sum")
def make_sum(seed: int, index: int, split: Split, *, digits: int, leak: bool = False) -> Task:
    if digits < 1:
        raise ValueError("digits must be at least 1")
    sign = "+" if split == "train" or leak else "-"
    return Task(input_id=f"{split}-{index}", prompt=f"{seed * 10**digits}{sign}{index}", data={"digits": digits})


def test_tasks_are_made_by_seed_position_and_split() -> None:
    source = GeneratorTasks(name="test-sum", params={"digits": 1}).open(seed=7)
    assert source.num_train is None
    assert source.train(3) == make_sum(7, 3, "train", digits=1)
    assert [task.prompt for task in source.held_out(2)] == ["70-0", "70-1"]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("test-product", {}, r"tasks.name: there is no task generator 'test-product'; did you mean 'test-sum'"),
        ("test-sum", {"digits": 1, "digit": 2}, r"tasks.params.digit: unknown; 'test-sum' takes digits, leak"),
        ("test-sum", {}, r"tasks.params.digits: missing; 'test-sum' takes digits, leak"),
    ],
)
def test_a_wrong_name_or_parameter_is_answered_with_those_there_are(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GeneratorTasks(name=name, params=params).open(seed=0)


def test_what_a_generator_raises_says_where() -> None:
    source = GeneratorTasks(name="test-sum", params={"digits": 0}).open(seed=0)
    with pytest.raises(ConfigError, match="generator 'test-sum', train task 5: ValueError: digits must be at least 1"):
        source.train(5)


def test_a_generator_may_take_any_parameter() -> None:
    @task_generator("test-any")
    def make_any(seed: int, index: int, split: Split, **params: Any) -> Task:
        return Task(input_id=f"{split}{index}", prompt=str(params))

    assert GeneratorTasks(name="test-any", params={"x": 1}).open(seed=0).train(0).prompt == "{'x': 1}"


def test_a_name_is_given_once() -> None:
    task_generator("test-sum")(make_sum)
    again = FunctionType(make_sum.__code__, {}, make_sum.__name__)
    task_generator("test-sum")(again)  # As when its file is imported under a second name.
    task_generator("test-sum")(make_sum)
    with pytest.raises(ConfigError, match="two task generators are called 'test-sum'"):
        task_generator("test-sum")(lambda *_, **__: Task(input_id="", prompt=""))


def test_overlapping_splits_are_refused_by_the_first_overlap() -> None:
    params = {"digits": 1, "leak": True}
    source = GeneratorTasks(name="test-sum", params=params).open(seed=1)
    with pytest.raises(
        ConfigError, match=r"'train-0' \(position 0\) has the prompt of held-out task 'held_out-0': '10\+0'"
    ):
        check_disjoint(source, num_train=10, num_held_out=5)
    check_disjoint(source, num_train=0, num_held_out=5)
    check_disjoint(source, num_train=10, num_held_out=0)


def test_a_source_is_chosen_by_its_type() -> None:
    adapter = TypeAdapter(TaskSettings)
    assert adapter.validate_python({"type": "generator", "name": "test-sum"}) == GeneratorTasks(name="test-sum")
    with pytest.raises(ValidationError, match="'generator', 'jsonl', 'huggingface'"):
        adapter.validate_python({"type": "csv"})
