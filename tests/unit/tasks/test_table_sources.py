"""Files and datasets become tasks by position, and say where they are wrong."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.records import Spoken
from flexmarl.tasks import SourceExhausted, check_disjoint
from flexmarl.tasks.table import HuggingFaceTasks, JsonlTasks, TableSource, TaskTable


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", "utf-8")
    return path


def products(n: int, start: int = 0) -> list[dict]:
    return [{"prompt": f"{i}*7", "reference": i * 7, "level": "easy"} for i in range(start, start + n)]


def table(rows: list[dict], *, seed: int = 0, held_out: list[dict] | None = None, **options) -> TableSource:
    def places(some: list[dict]) -> list[tuple[str, dict]]:
        return [(f"row {number}", row) for number, row in enumerate(some)]

    held = None if held_out is None else places(held_out)
    return TableSource(TaskTable(**options), name="t", rows=places(rows), held_out=held, seed=seed)


def test_a_file_becomes_tasks(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", products(20))
    source = JsonlTasks(file=Path("train.jsonl"), held_out_share=0.25).open(seed=1, base=tmp_path)
    task = source.train(0)
    assert task.input_id.startswith("train-")
    assert task.score(str(int(task.prompt.split("*")[0]) * 7)) == 1.0
    assert task.data == {"level": "easy"}
    assert len(source.held_out(100)) == 5
    assert source.held_out(2) == source.held_out(100)[:2]


def test_a_separate_file_is_held_out(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", products(3))
    write(tmp_path / "b.jsonl", products(2, start=3))
    tasks = JsonlTasks(file=Path("a.jsonl"), held_out_file=Path("b.jsonl"), epochs=1)
    source = tasks.open(seed=0, base=tmp_path)
    assert source.num_train == 3
    assert [task.prompt for task in source.held_out(9)] == ["3*7", "4*7"]


def test_fields_have_the_names_that_the_config_gives() -> None:
    rows = [
        {"question": "2+2?", "answer": "#### 4", "id": "gsm-1"},
        {"question": "1+1?", "answer": "#### 2", "id": "x"},
    ]
    source = table(rows, prompt="question", reference="answer", input_id="id", scorer="number", held_out_share=0.0)
    tasks = {task.input_id: task for task in (source.train(0), source.train(1))}
    assert tasks["gsm-1"].score("it is 4") == 1.0
    assert source.held_out(5) == ()


@given(n=st.integers(2, 30), seed=st.integers(0, 9), epochs=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_each_epoch_holds_every_task_once_and_positions_alone_decide(n: int, seed: int, epochs: int) -> None:
    source = table(products(n), seed=seed, epochs=epochs)
    size, rest = divmod(source.num_train or 0, epochs)
    assert rest == 0
    played = [source.train(index).prompt for index in range(size * epochs)]
    for epoch in range(epochs):
        assert len(set(played[epoch * size : (epoch + 1) * size])) == size
    fresh = table(products(n), seed=seed, epochs=epochs)
    assert [fresh.train(index).prompt for index in reversed(range(size * epochs))] == played[::-1]
    with pytest.raises(SourceExhausted, match=rf"position {size * epochs} is past the end: {size} tasks"):
        source.train(size * epochs)


def test_epochs_have_different_orders_and_so_do_seeds() -> None:
    source = table(products(50), held_out_share=0.0)
    orders = {tuple(source.train(epoch * 50 + place).prompt for place in range(50)) for epoch in range(3)}
    orders.add(tuple(table(products(50), held_out_share=0.0, seed=1).train(place).prompt for place in range(50)))
    assert len(orders) == 4


def test_without_shuffling_tasks_come_as_they_stand_for_ever() -> None:
    source = table(products(3), shuffle=False, held_out_share=0.0)
    assert source.num_train is None
    assert [source.train(index).prompt for index in range(5)] == ["0*7", "1*7", "2*7", "0*7", "1*7"]


@given(
    prompts=st.lists(st.text(min_size=1, max_size=3), min_size=2, max_size=40).filter(lambda p: len(set(p)) > 1),
    share=st.floats(0.01, 0.5),
    seed=st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_a_share_never_splits_equal_prompts_and_ignores_seed_and_order(
    prompts: list[str], share: float, seed: int
) -> None:
    rows = [{"prompt": prompt, "reference": ""} for prompt in prompts]
    source = table(rows, seed=seed, epochs=1, held_out_share=share)
    held_out = {task.prompt for task in source.held_out(len(prompts))}
    assert len(held_out) == max(1, round(share * len(set(prompts))))
    assert held_out == {task.prompt for task in table(rows[::-1], held_out_share=share).held_out(len(prompts))}
    check_disjoint(source, num_train=10**6, num_held_out=len(prompts))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "1", "reference": 1}\n\n{"prompt": ', r"tasks.jsonl:3: not JSON"),
        ("[1]", r"tasks.jsonl:1: a task is a JSON object, got '\[1\]'"),
        (
            '{"question": "1", "answer": 1}',
            r"tasks.jsonl:1: no field 'prompt' \(set by tasks.prompt\); there are: answer",
        ),
        ('{"prompt": "1", "reference": null}', r"tasks.jsonl:1: 'reference' \(set by tasks.reference\) is null"),
        ('{"prompt": "1"}', r"tasks.jsonl:1: no field 'reference' \(set by tasks.reference\); there are: prompt"),
        ('{"prompt": 1, "reference": 1}', r"tasks.jsonl:1: 'prompt' must be a text or a list of messages, got 1"),
        ('{"prompt": [], "reference": 1}', r"tasks.jsonl:1: 'prompt' must be a text or a list of messages, got \[\]"),
        (
            '{"prompt": ["hi"], "reference": 1}',
            r"tasks.jsonl:1: 'prompt': message 0: must be {role, content}, got 'hi'",
        ),
        (
            '{"prompt": [{"role": "tool", "content": "7"}], "reference": 1}',
            r"tasks.jsonl:1: 'prompt': message 0: has the role 'tool'; use system, user or assistant",
        ),
        (
            '{"prompt": [{"role": "user", "content": ["a"]}], "reference": 1}',
            r"tasks.jsonl:1: 'prompt': message 0: its content must be a text, got \['a'\]",
        ),
        (
            '{"prompt": [{"role": "user", "text": "a"}], "reference": 1}',
            r"tasks.jsonl:1: 'prompt': message 0: has the key 'text'; a message has a role and a content",
        ),
        (
            '{"prompt": [{"role": "assistant", "content": "a"}], "reference": 1}',
            r"tasks.jsonl:1: 'prompt': the last message must be the user's, got role 'assistant'",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "reference": 1}',
            r"tasks.jsonl:1: the message before the prompt is the user's; an assistant's must stand between",
        ),
        (
            '{"prompt": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}], "reference": 1}',
            r"tasks.jsonl:1: message 0: has the role 'assistant', and 'user' is due",
        ),
        ("\n", "tasks.file: tasks.jsonl has no rows"),
        ('{"prompt": "1", "reference": 1}', r"held_out_share: 0.1 of the 1 prompts of tasks leaves none to train on"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        JsonlTasks(file=Path("tasks.jsonl")).open(seed=0, base=tmp_path)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", products(2))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert JsonlTasks(file=path, held_out_share=0.0, shuffle=False).open(seed=0).train(0).prompt == "0*7"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_byte_that_is_not_utf_8_is_named_with_its_line(tmp_path: Path, mark: bytes) -> None:
    lines = ['{"prompt": "1", "reference": 1}', '{"prompt": "B\xe4r", "reference": 2}']
    (tmp_path / "tasks.jsonl").write_bytes(mark + "\r\n".join(lines).encode("latin-1"))
    with pytest.raises(ConfigError, match=r"tasks.jsonl:2: the byte 0xe4 is not UTF-8; save the file as UTF-8"):
        JsonlTasks(file=Path("tasks.jsonl")).open(seed=0, base=tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path, works = tmp_path / "nowhere.jsonl", "give a JSONL file, by a path relative to the config"
    there = write(tmp_path / "tasks.jsonl", products(2))
    for key, source in {
        "tasks.file": JsonlTasks(file=Path(path.name)),
        "tasks.held_out_file": JsonlTasks(file=there, held_out_file=Path(path.name)),
    }.items():
        with pytest.raises(ConfigError) as error:
            source.open(seed=0, base=tmp_path)
        assert str(error.value) == f"{key}: cannot read {path}: No such file or directory; {works}"


def test_ids_must_be_unique() -> None:
    rows = [{"prompt": "1", "reference": 1, "id": "a"}, {"prompt": "2", "reference": 2, "id": "a"}]
    with pytest.raises(ConfigError, match="row 1: a second task has the id 'a'"):
        table(rows, input_id="id")


def test_an_unknown_scorer_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tasks.scorer: there is no scorer 'exakt'; did you mean 'exact'\? there are: .*exact, .*number",
    ):
        table(products(2), scorer="exakt")


def test_a_dataset_becomes_tasks(tmp_path: Path) -> None:
    asked = []

    def load(path: str, name: str | None, **options: object) -> list[dict]:
        asked.append((path, name, options))
        return products(4) if options["split"] == "train" else products(2, start=4)

    tasks = HuggingFaceTasks(dataset="parquet", data_files=("a.parquet",), held_out_split="test", epochs=1)
    source = tasks.open(seed=0, base=tmp_path, load=load)
    assert (source.num_train, [task.prompt for task in source.held_out(9)]) == (4, ["4*7", "5*7"])
    assert source.held_out(1)[0].input_id == "parquet-held-out-0"
    files = [str(tmp_path / "a.parquet")]
    assert asked == [
        ("parquet", None, {"split": "train", "data_files": files, "revision": None}),
        ("parquet", None, {"split": "test", "data_files": files, "revision": None}),
    ]


def test_a_dataset_that_does_not_load_is_a_config_error() -> None:
    def load(*_: object, **__: object) -> None:
        raise FileNotFoundError("no such dataset")

    with pytest.raises(ConfigError, match="loading the split 'train' of nobody/nothing: FileNotFoundError"):
        HuggingFaceTasks(dataset="nobody/nothing").open(seed=0, load=load)


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"tasks of type huggingface needs the extra 'datasets'"):
        HuggingFaceTasks(dataset="openai/gsm8k").open(seed=0)


def test_a_prompt_may_be_a_list_of_messages_and_a_task_may_have_a_system_prompt(tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "In metres."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "How high?"},
    ]
    rows = [
        {"prompt": said, "answer": "3"},
        {"prompt": said[-1:], "answer": "4"},
        {"prompt": "How high?", "answer": "5"},
    ]
    path = write(tmp_path / "said.jsonl", rows)
    source = JsonlTasks(file=path, reference="answer", held_out_share=0.0, shuffle=False).open(seed=0)
    tasks = [source.train(index) for index in range(3)]
    assert [task.prompt for task in tasks] == ["How high?"] * 3
    assert tasks[0].opening == tuple(Spoken(one["role"], one["content"]) for one in said[:-1])  # type: ignore[arg-type]
    assert [task.opening for task in tasks[1:]] == [(), ()]
    assert len({task.question for task in tasks}) == 2, "a question is the prompt and what stands before it"
    rows = [{"prompt": said[1:], "answer": "3", "role": "Be brief."}]
    path = write(tmp_path / "system.jsonl", rows)
    task = JsonlTasks(file=path, reference="answer", system="role", held_out_share=0.0).open(seed=0).train(0)
    assert task.opening == (Spoken("system", "Be brief."), Spoken("user", "Hi"), Spoken("assistant", "Hello"))
    assert task.data == {}


def test_two_system_prompts_of_one_task_are_refused(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    path = write(tmp_path / "two.jsonl", [{"prompt": said, "answer": "3", "role": "c"}])
    with pytest.raises(ConfigError, match=r"two\.jsonl:1: 'role' is a system prompt, and 'prompt' begins with one too"):
        JsonlTasks(file=path, reference="answer", system="role").open(seed=0)
