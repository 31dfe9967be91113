"""Run on a folder: what a run left, or has written so far, as Python objects."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexmarl.config import Overrides, RunSettings, load_run
from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.events.event import Event
from flexmarl.events.journal import check_format, read_run
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_folder import RunFolder
from flexmarl.records import split_sample_id

if TYPE_CHECKING:
    import pandas

    from flexmarl.analysis.summary import Summary


class Run:
    """A run that has ended, failed or still goes on, read from its folder. Every property reads the files anew."""

    def __init__(self, folder: Path) -> None:
        self._files = RunFolder(folder)

    def __repr__(self) -> str:
        return f"<flexmarl.Run {self.folder}>"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._files.path

    @property
    def settings(self) -> RunSettings:
        """The settings of the run, every default filled in."""
        return load_run(self._files.config)

    @property
    def summary(self) -> "Summary":
        """Figures of the whole run: those of summary.json, or of what there is so far if the run did not end well."""
        from flexmarl.analysis.summary import history_of, read_held_out, summarise
        from flexmarl.assemble.commands import finished

        if done := finished(self._files):
            return done
        history = history_of(self.events())
        return summarise(self._figures, history, held_out=read_held_out(self._files, history))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The figures of each step, as in metrics.jsonl: `[{"step": 0, "eval/success": 0.25}, {"step": 1, ...}]`.

        Step 0 is the evaluation before the first step. A figure that is not finite is left out. Of a step that was
        done twice, by a run that was resumed, the newest figures count.
        """
        return [{"step": step, **values} for step, values in self._figures.items()]

    def metrics_frame(self) -> "pandas.DataFrame":
        """Returns the metrics as a pandas DataFrame, a row for each step. Raises MissingExtra without pandas."""
        return _pandas("metrics_frame").DataFrame(self.metrics).set_index("step")

    def turns(self) -> list[dict[str, Any]]:
        """Returns every turn in the experience store, in the order of groups, episodes and hops.

        Keys: `sample_id`, `task` (its id), `step` (from 1), `agent`, `policy`, `version`, `group`, `episode`,
        `attempt`, `hop`, `state`, `reason` (of a row that is not trained), `prompt` and `text` (of the reply),
        `reward`, `parts` (that it adds up from, by name) and `advantage`; a value that the row lacks is None. Raises
        StoreError if there is no store, as of a simulation or with `store.type: memory`.
        """
        import numpy as np

        from flexmarl.analysis.conversations import Conversations, parts_of
        from flexmarl.assemble.blueprint import decoder_of
        from flexmarl.experience.schema import quote
        from flexmarl.experience.store_file import read_store

        rows: list[dict[str, Any]] = []
        with read_store(self._files.store) as store:
            step_of, decode = Conversations(self._files, store).step_of, decoder_of(self.settings)
            for agent in store.agents:
                found = store.query(
                    f"SELECT sample_id, policy, policy_version AS version, group_id AS 'group', "
                    f"episode_index AS episode, attempt, hop, state, reason, payload(prompt_ids) AS prompt, "
                    f"payload(text) AS text, reward, payload(parts) AS parts, advantage FROM {quote(agent)}"
                )
                for cells in found.rows:
                    row = dict(zip(found.columns, cells, strict=True))
                    row["task"], row["step"] = split_sample_id(row["sample_id"])[0], step_of(row["group"])
                    if row["prompt"] is not None:
                        row["prompt"] = decode(row["policy"], np.array(json.loads(row["prompt"])))
                    row["parts"] = parts_of(row["reward"], row["parts"] and json.loads(row["parts"]))
                    rows.append({"agent": agent, **row})
        return sorted(rows, key=lambda row: (row["group"], row["episode"], row["attempt"], row["hop"]))

    def turns_frame(self) -> "pandas.DataFrame":
        """Returns the turns as a pandas DataFrame. Raises MissingExtra without pandas, StoreError without a store."""
        return _pandas("turns_frame").DataFrame(self.turns()).set_index("sample_id")

    def events(self) -> Iterator[Event]:
        """Yields the events of the journal, of all commands on one clock; docs/howto/journal.md lists them."""
        return read_run(self._files.journal)

    @property
    def _figures(self) -> dict[int, dict[str, float]]:
        return read_metrics(self._files.metrics) if self._files.metrics.exists() else {}


def _pandas(method: str) -> Any:
    try:
        import pandas
    except ImportError:
        raise MissingExtra("pandas", method) from None
    return pandas


def load_run_folder(path: Path, overrides: Overrides = ()) -> tuple[RunSettings, RunFolder]:
    """Returns the settings of a trained run, whose code is imported, and its folder. Raises as `run_folder` does."""
    folder = run_folder(path)
    return load_run(folder.config, overrides), folder


def run_folder(path: Path) -> RunFolder:
    """Returns the folder of a run, and imports none of its code.

    Raises ConfigError if `path` is no run folder, FlexmarlError if the run is of another format.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(f"'{path}' is no run folder: it has no config.yaml; give the path that `train` printed last")
    check_format(folder.journal)
    return folder
