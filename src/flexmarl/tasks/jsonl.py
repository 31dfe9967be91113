"""Task source on a JSONL file: one JSON object per line."""

from pathlib import Path
from typing import Literal

from flexmarl.errors import ConfigError
from flexmarl.observability.strict_json import parse_json
from flexmarl.tasks.table import Row, Table, TableSource


class JsonlTasks(Table):
    """Tasks from a file. Fields that no key names are in `Task.data`."""

    type: Literal["jsonl"] = "jsonl"
    file: Path
    """Relative to the config."""
    held_out_file: Path | None = None
    """Null: `held_out_share` of `file`."""

    def open(self, *, seed: int, base: Path = Path(".")) -> TableSource:
        """The source. Raises ConfigError naming file and line."""
        held_out = None if self.held_out_file is None else read_jsonl(base / self.held_out_file)
        return TableSource(self, name=self.file.stem, rows=read_jsonl(base / self.file), held_out=held_out, seed=seed)


def read_jsonl(file: Path) -> list[Row]:
    """The objects of a file and where they are; blank lines are skipped."""
    rows: list[Row] = []
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"tasks: cannot read {file}: {error}") from error
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
