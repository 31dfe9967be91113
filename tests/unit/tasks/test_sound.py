"""A task that cannot be played, recorded or told of is refused when it is read."""

import json
from pathlib import Path

import pytest

from flexmarl.errors import ConfigError
from flexmarl.records import Task
from flexmarl.tasks import task_generator
from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.tasks.table import JsonlTasks

GOOD = {"id": "a-1", "question": "1+1", "answer": "2"}


def source(folder: Path, **changes: object):
    rows = [GOOD, {**GOOD, "id": "a-2", **changes}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tasks = JsonlTasks(file=Path("train.jsonl"), input_id="id", prompt="question", reference="answer", held_out_share=0)
    return tasks.open(seed=0, base=folder)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("id", "a\0b", r"the input_id 'a\\x00b' holds '\\x00'; it must be one line without control characters"),
        ("id", "a\nb", r"the input_id 'a\\nb' holds '\\n'; it must be one line"),
        ("id", "a\u2028b", "it must be one line"),
        ("id", "\x1b[2J", "without control characters"),
        ("id", "\ud83d", r"the input_id holds half a surrogate pair, '\\ud83d', at character 0"),
        ("id", " ", "the input_id ' ' is blank; give the task a name of its own"),
        ("question", "half: \ud83d", r"the prompt holds half a surrogate pair, '\\ud83d', at character 6"),
        ("answer", "\udc00", r"the reference holds half a surrogate pair, '\\udc00', at character 0"),
    ],
)
def test_a_line_that_makes_no_sound_task_is_named(tmp_path: Path, field: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"train\.jsonl:2: .*{said}") as refused:
        source(tmp_path, **{field: value})
    str(refused.value).encode()


@pytest.mark.parametrize("name", ["HumanEval/0", "a_b", "größe 7", "数-1", "a\\b", "x" * 300])
def test_ids_of_known_data_sets_are_taken(tmp_path: Path, name: str) -> None:
    assert name in {source(tmp_path, id=name).train(index).input_id for index in (0, 1)}


def test_a_generator_is_held_to_the_same() -> None:
    @task_generator("unsound")
    def unsound(seed, index, split):
        made = [Task(input_id="a\nb", prompt="?"), Task(input_id="a", prompt="\ud83d"), "1+1"]
        return made[index]

    tasks = GeneratorTasks(name="unsound").open(seed=0)
    for index, said in enumerate(["it must be one line", "the prompt holds half", "must be a flexmarl.records.Task"]):
        with pytest.raises(ConfigError, match=f"generator 'unsound', train task {index}: .*{said}"):
            tasks.train(index)
