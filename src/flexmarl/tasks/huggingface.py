"""Task source on Hugging Face datasets: the hub, or local Parquet, CSV and JSON files."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from flexmarl.errors import ConfigError, MissingExtra, boundary
from flexmarl.tasks.table import Row, Table, TableSource


class HuggingFaceTasks(Table):
    """Tasks from a dataset; needs the extra `datasets`. Columns that no key names are in `Task.data`."""

    type: Literal["huggingface"] = "huggingface"
    dataset: str
    """Name on the hub, e.g. `openai/gsm8k`; or `parquet`, `csv`, `json` with `data_files`."""
    subset: str | None = None
    """The dataset's configuration, e.g. `main`."""
    data_files: tuple[str, ...] | None = None
    """Local files, relative to the config, or URLs."""
    revision: str | None = None
    """Commit or tag on the hub; set it for runs that can be repeated."""
    split: str = "train"
    """What is trained on."""
    held_out_split: str | None = None
    """E.g. `test`; null: `held_out_share` of `split`."""

    def open(self, *, seed: int, base: Path = Path("."), load: Callable[..., Any] | None = None) -> TableSource:
        """The source. `load` takes the place of `datasets.load_dataset`. Raises MissingExtra or ConfigError."""
        load = load or _load_dataset()
        rows = self._rows(load, self.split, base)
        held_out = None if self.held_out_split is None else self._rows(load, self.held_out_split, base)
        return TableSource(self, name=self.dataset.rpartition("/")[2], rows=rows, held_out=held_out, seed=seed)

    def _rows(self, load: Callable[..., Any], split: str, base: Path) -> list[Row]:
        files = self.data_files and [file if "://" in file else str(base / file) for file in self.data_files]
        with boundary(ConfigError, f"tasks: loading the split '{split}' of {self.dataset}"):
            dataset = load(self.dataset, self.subset, split=split, data_files=files, revision=self.revision)
            return [(f"{self.dataset}[{split}][{number}]", dict(row)) for number, row in enumerate(dataset)]


def _load_dataset() -> Callable[..., Any]:
    try:
        return import_module("datasets").load_dataset
    except ImportError as error:
        raise MissingExtra("datasets", "tasks of type huggingface") from error
