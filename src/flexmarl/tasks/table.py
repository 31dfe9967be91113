"""Task source on rows of a file or dataset.

TableSource       makes a task of each row, chooses the held-out tasks and orders the others
JsonlTasks        rows from a JSONL file, one JSON object per line
HuggingFaceTasks  rows from a Hugging Face dataset: on the hub, in a folder that `save_to_disk` wrote, or in a folder or
                  list of local Parquet, CSV and JSON files
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from flexmarl.errors import ConfigError, MissingExtra, boundary
from flexmarl.events.safe_json import parse_json
from flexmarl.records import Spoken, Task
from flexmarl.records.scorers import SCORERS
from flexmarl.settings import Settings
from flexmarl.tasks.interface import SourceExhausted, checked_task


class TaskTable(Settings):
    """The settings that all sources on rows share."""

    prompt: str = "prompt"
    """Field with the question: a text, or a list of messages `{role, content}` that ends with the user's."""
    system: str | None = None
    """Field with a system prompt of the task's own, a text; null: the tasks have none."""
    reference: str | None = "reference"
    """Field with the reference answer: a text or number; an object or list counts as its JSON. null: there is none."""
    input_id: str | None = None
    """Field with the id of a task, unique; null: the id is made from the row's number."""
    scorer: str = "exact"
    """`exact`, `number` (the last numbers in answer and reference are equal), `python_tests` (the answer is code, the
    reference its hidden tests), or one registered with `@scorer`."""
    held_out_share: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the prompts that is held out if no held-out file or split is set. The choice depends only on them."""
    shuffle: bool = True
    """A new order in each epoch, by the run's seed."""
    epochs: int | None = Field(default=None, ge=1)
    """How often the rows are repeated; null: without end."""


Row = tuple[str, Mapping[str, Any]]
"""(place for error messages, e.g. `train.jsonl:12`; fields)."""


class TableSource:
    """Tasks of rows in memory. All are checked when the source is made: a ConfigError names the place of a bad row."""

    def __init__(
        self, settings: TaskTable, *, name: str, rows: Sequence[Row], held_out: Sequence[Row] | None, seed: int
    ) -> None:
        """`held_out` None: a share of `rows` is held out. `name` begins the ids of tasks without an id of their own."""
        if not rows:
            raise ConfigError(f"tasks: {name} has no rows")
        self._settings = settings
        self._seed = seed
        if held_out is None:
            tasks = _tasks(settings, name, rows)
            chosen = _choose_held_out([task.question for task in tasks], settings.held_out_share)
            self._train = [task for task in tasks if task.question not in chosen]
            self._held_out = tuple(task for task in tasks if task.question in chosen)
            if not self._train:
                raise ConfigError(
                    f"tasks.held_out_share: {settings.held_out_share} of the {len(chosen)} prompts of {name} leaves "
                    f"none to train on; use a smaller share, or a separate file or split"
                )
        else:
            self._train = _tasks(settings, name, rows)
            self._held_out = tuple(_tasks(settings, f"{name}-held-out", held_out))
        self._order: tuple[int, Sequence[int]] = (-1, ())

    @property
    def num_rows(self) -> int:
        """Number of training tasks."""
        return len(self._train)

    @property
    def num_train(self) -> int | None:
        """Number of training tasks times epochs; None: no end."""
        return None if self._settings.epochs is None else len(self._train) * self._settings.epochs

    def train(self, index: int) -> Task:
        """The task at position `index`, counted on from one epoch to the next."""
        epoch, place = divmod(index, len(self._train))
        if self.num_train is not None and index >= self.num_train:
            raise SourceExhausted(
                f"tasks: position {index} is past the end: {len(self._train)} tasks, {self._settings.epochs} epoch(s); "
                f"raise tasks.epochs, or set it to null to repeat for ever"
            )
        if not self._settings.shuffle:
            return self._train[place]
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._train)).tolist())
        return self._train[self._order[1][place]]

    def held_out(self, n: int) -> tuple[Task, ...]:
        """The first n held-out rows, in their order."""
        return self._held_out[:n]


def _tasks(settings: TaskTable, name: str, rows: Sequence[Row]) -> list[Task]:
    score = SCORERS[settings.scorer]
    keys = (settings.prompt, settings.system, settings.reference, settings.input_id)
    named = {field for field in keys if field is not None}
    tasks: dict[str, Task] = {}
    for number, (where, row) in enumerate(rows):
        own_id, reference = settings.input_id, settings.reference
        opening, prompt = _messages(row, where, settings)
        task = Task(
            input_id=f"{name}-{number}" if own_id is None else str(_field(row, where, "input_id", own_id)),
            prompt=prompt,
            opening=opening,
            reference="" if reference is None else _as_text(_field(row, where, "reference", reference)),
            scorer=score,
            data={field: value for field, value in row.items() if field not in named},
        )
        checked_task(task, where)
        if task.input_id in tasks:
            raise ConfigError(
                f"{where}: a second task has the {own_id} '{task.input_id}'; tasks.input_id must be unique"
            )
        tasks[task.input_id] = task
    return list(tasks.values())


def _as_text(value: Any) -> str:
    """A reference as a text: a list or an object as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def _field(row: Mapping[str, Any], where: str, key: str, field: str) -> Any:
    if field not in row:
        fields = ", ".join(sorted(row)) or "none"
        raise ConfigError(f"{where}: no field '{field}' (set by tasks.{key}); there are: {fields}")
    if row[field] is None:
        raise ConfigError(f"{where}: '{field}' (set by tasks.{key}) is null; give it a value, or remove the row")
    return row[field]


def _messages(row: Mapping[str, Any], where: str, settings: TaskTable) -> tuple[tuple[Spoken, ...], str]:
    """The messages before the prompt, and the prompt. `checked_task` looks at the order of their roles."""
    field = settings.prompt
    value = _field(row, where, "prompt", field)
    if isinstance(value, str):
        opening: list[Spoken] = []
    else:
        value = [*value] if isinstance(value, Sequence) else []
        if not value:
            raise ConfigError(f"{where}: '{field}' must be a text or a list of messages, got {row[field]!r}")
        said = [_message(one, f"{where}: '{field}': message {number}") for number, one in enumerate(value)]
        if said[-1].role != "user":
            raise ConfigError(f"{where}: '{field}': the last message must be the user's, got role {said[-1].role!r}")
        opening, value = said[:-1], said[-1].content
    if settings.system is not None:
        system = _field(row, where, "system", settings.system)
        if not isinstance(system, str):
            raise ConfigError(f"{where}: '{settings.system}' must be a text, got {system!r}")
        if opening and opening[0].role == "system":
            raise ConfigError(
                f"{where}: '{settings.system}' is a system prompt, and '{field}' begins with one too; remove one"
            )
        opening = [Spoken("system", system), *opening]
    return tuple(opening), value


def _message(value: Any, where: str) -> Spoken:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be {{role, content}}, got {repr(value)[:80]}")
    if unknown := sorted(key for key in value if key not in ("role", "content") and value[key] is not None):
        raise ConfigError(f"{where}: has the key {unknown[0]!r}; a message has a role and a content")
    role, content = value.get("role"), value.get("content")
    if role not in ("system", "user", "assistant"):
        raise ConfigError(f"{where}: has the role {role!r}; use system, user or assistant")
    if not isinstance(content, str):
        raise ConfigError(f"{where}: its content must be a text, got {repr(content)[:80]}")
    return Spoken(role, content)


def _choose_held_out(prompts: Sequence[str], share: float) -> set[str]:
    """The prompts that are held out. Equal prompts stay together, so that no prompt is on both sides."""
    unique = sorted(set(prompts), key=lambda prompt: hashlib.blake2b(prompt.encode(), digest_size=16).digest())
    return set(unique[: max(1, round(share * len(unique))) if share else 0])


class JsonlTasks(TaskTable):
    """Tasks from a JSONL file. Fields that no key names are in `Task.data`."""

    type: Literal["jsonl"] = "jsonl"
    file: Path
    """Path, relative to the config."""
    held_out_file: Path | None = None
    """Path of the held-out tasks; null: `held_out_share` of `file`."""

    def open(self, *, seed: int, base: Path = Path(".")) -> TableSource:
        """Opens the source. Raises ConfigError naming file and line."""
        held_out = None if self.held_out_file is None else read_jsonl(base / self.held_out_file, "tasks.held_out_file")
        rows = read_jsonl(base / self.file, "tasks.file")
        if not rows:
            raise ConfigError(f"tasks.file: {self.file} has no rows; write a JSON object per line")
        return TableSource(self, name=self.file.stem, rows=rows, held_out=held_out, seed=seed)


def read_jsonl(file: Path, key: str) -> list[Row]:
    """The objects of a file, each with its place; blank lines are skipped. `key`: the setting that names the file."""
    rows: list[Row] = []
    try:
        lines = file.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        number, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise ConfigError(f"{file}:{number}: the byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot read {file}: {error.strerror}; give a JSONL file, by a path relative to the config"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}:{number}: a task is a JSON object, got {line.strip()[:60]!r}")
        rows.append((f"{file}:{number}", row))
    return rows


class HuggingFaceTasks(TaskTable):
    """Tasks from a dataset; needs the extra `datasets`. Columns that no key names are in `Task.data`."""

    type: Literal["huggingface"] = "huggingface"
    dataset: str
    """Name on the hub, e.g. `openai/gsm8k`; or a folder, relative to the config: one that `save_to_disk` wrote, or one
    of Parquet, CSV or JSON files; or `parquet`, `csv`, `json` with `data_files`."""
    subset: str | None = None
    """The dataset's configuration, e.g. `main`."""
    data_files: tuple[str, ...] | None = None
    """Local files, relative to the config, or URLs."""
    revision: str | None = None
    """Commit or tag on the hub; set it for runs that can be repeated."""
    split: str = "train"
    """Split that is trained on."""
    held_out_split: str | None = None
    """Split that is held out, e.g. `test`; null: `held_out_share` of `split`."""

    def open(self, *, seed: int, base: Path = Path("."), load: Callable[..., Any] | None = None) -> TableSource:
        """Opens the source. `load` replaces `datasets.load_dataset`. Raises MissingExtra or ConfigError."""
        loads = load or self._loader(base)
        rows = self._rows(loads, self.split, base)
        held_out = None if self.held_out_split is None else self._rows(loads, self.held_out_split, base)
        return TableSource(self, name=Path(self.dataset).name, rows=rows, held_out=held_out, seed=seed)

    def _loader(self, base: Path) -> Callable[..., Any]:
        datasets = _datasets()
        return partial(_load_saved, datasets) if _is_saved(base / self.dataset) else datasets.load_dataset

    def _rows(self, load: Callable[..., Any], split: str, base: Path) -> list[Row]:
        folder = base / self.dataset
        files = self.data_files and [file if "://" in file else str(base / file) for file in self.data_files]
        with boundary(ConfigError, f"tasks: loading the split '{split}' of {self.dataset}"):
            dataset = load(
                str(folder) if folder.is_dir() else self.dataset,
                self.subset,
                split=split,
                data_files=files,
                revision=self.revision,
            )
            return [(f"{self.dataset}[{split}][{number}]", dict(row)) for number, row in enumerate(dataset)]


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise MissingExtra("datasets", "tasks of type huggingface") from error


def _is_saved(folder: Path) -> bool:
    """True if `save_to_disk` of a dataset, or of a dictionary of splits, wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _load_saved(datasets: Any, folder: str, subset: str | None, *, split: str, **unused: object) -> Any:
    """Loads a split of what `save_to_disk` wrote. A dataset without splits is its own split `train`."""
    if given := [key for key, value in {"subset": subset, **unused}.items() if value is not None]:
        raise ConfigError(f"tasks.{given[0]} is set, but {folder} was written by `save_to_disk`, which has none")
    loaded = datasets.load_from_disk(folder)
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if split not in splits:
        raise ConfigError(
            f"tasks: {folder} has no split '{split}'; there are: {', '.join(splits)}. Set tasks.split and "
            f"tasks.held_out_split, or null to hold out a share"
        )
    return splits[split]
