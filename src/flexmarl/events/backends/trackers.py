"""Sinks on experiment trackers: TensorBoard's files, Weights & Biases, MLflow.

A resumed run continues in the trackers' own runs, whose ids are in trackers.json of the run folder. A tracker that
cannot be reached at the start is a ConfigError; one that is lost later costs the run nothing but a warning.
"""

import json
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from flexmarl.errors import ConfigError, MissingExtra, boundary, described
from flexmarl.events.metrics import Sink
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import parse_json
from flexmarl.events.settings import MetricsSettings, MlflowSettings, WandbSettings

Say = Callable[[str], None]


class TensorBoardSink:
    """Sink on TensorBoard's event files, one scalar per metric. A thread of TensorBoard writes the files.

    `tensorboard --logdir runs` shows all runs in one view.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes the values of a step to TensorBoard's writer."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool = False) -> None:
        """Writes out the values that are queued. A second call does nothing."""
        self._writer.close()


class WandbSink:
    """Sink on a run of Weights & Biases. A process of W&B sends the values, and keeps them while there is no network.

    Console, source code, command line and git state stay here: they may hold what is not to be published.
    """

    def __init__(self, settings: WandbSettings, folder: RunFolder, config: Mapping[str, Any]) -> None:
        """`config` is shown with the run; the caller masks secrets. Raises MissingExtra, or ConfigError."""
        wandb = _extra("wandb", "metrics.wandb")
        with boundary(ConfigError, "metrics.wandb: beginning a run (log in with `wandb login`, or use mode: offline)"):
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                mode=settings.mode,
                id=_known_ids(folder).get("wandb"),
                resume="allow",
                name=folder.path.name,
                dir=str(folder.path),
                config=dict(config),
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_meta=True, disable_git=True, disable_code=True
                ),
            )
        _keep_id(folder, "wandb", self._run.id)
        # Not W&B's own step, which never goes back: a run that resumes from an earlier checkpoint does.
        self._run.define_metric("*", step_metric="step")
        self.where = self._run.url or f"`wandb sync {Path(self._run.dir).parent}`"

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes the values of a step to W&B's process."""
        self._run.log({"step": step, **_finite(values)})

    def close(self, *, failed: bool = False) -> None:
        """Waits until the values are sent, or kept in the run folder. A second call does nothing."""
        self._run.finish(exit_code=int(failed))


class MlflowSink:
    """Sink on a run of MLflow. A thread sends the values; those of steps that could not be sent are sent with the next.

    A server that does not come back makes the sink warn once, and the values remain in metrics.jsonl.
    """

    MOST_UNSENT = 100_000
    """Values kept for a server that is away; older ones are then in metrics.jsonl alone."""
    AT_ONCE = 1000
    """MLflow takes no more values in one request, and no more than a tenth of it parameters."""

    def __init__(self, settings: MlflowSettings, folder: RunFolder, config: Mapping[str, Any], warn: Say) -> None:
        """`config` becomes the run's parameters; the caller masks secrets. Raises MissingExtra, or ConfigError."""
        mlflow = _extra("mlflow", "metrics.mlflow")
        self._entities, self._warn = mlflow.entities, warn
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # The default waits for minutes.
        with boundary(ConfigError, f"metrics.mlflow: beginning a run (tracking_uri is {settings.tracking_uri!r})"):
            self._client = mlflow.MlflowClient(settings.tracking_uri)
            self._run = _known_ids(folder).get("mlflow") or self._begin(settings.experiment, folder, config)
            self._client.update_run(self._run, status="RUNNING")
        _keep_id(folder, "mlflow", self._run)
        self._unsent: deque[Any] = deque(maxlen=self.MOST_UNSENT)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._sending: Future[None] | None = None
        self._warned = False
        self.where = f"run {self._run} of experiment '{settings.experiment}'"

    def _begin(self, name: str, folder: RunFolder, config: Mapping[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(number, run_name=folder.path.name).info.run_id
        parameters = [self._entities.Param(key, str(value)[:500]) for key, value in flat(config)]
        for first in range(0, len(parameters), self.AT_ONCE // 10):
            self._client.log_batch(run, params=parameters[first : first + self.AT_ONCE // 10])
        return run

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Leaves the values of a step to the thread that sends them."""
        now = int(time.time() * 1000)
        self._unsent += [
            self._entities.Metric(re.sub(r"[^\w.:/ -]", "_", name), value, now, step)
            for name, value in _finite(values).items()
        ]
        if self._sending is None or self._sending.done():
            self._sending = self._sender.submit(self._send)

    def _send(self) -> None:
        """Sends all values that there are, oldest first. Runs in the thread."""
        while self._unsent:
            some = [self._unsent[place] for place in range(min(len(self._unsent), self.AT_ONCE))]
            try:
                self._client.log_batch(self._run, metrics=some)
            except Exception as error:  # Whatever a server or the network leads to.
                if not self._warned:
                    self._warn(f"metrics.mlflow: {described(error)[:300]}; metrics.jsonl has every figure")
                self._warned = True
                return
            for _ in some:
                self._unsent.popleft()

    def close(self, *, failed: bool = False) -> None:
        """Sends what is left and ends the tracker's run. A second call does nothing."""
        if self._sending is not None:
            self._sending.result()
            self._send()
        self._sender.shutdown()
        try:
            self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")
        except Exception as error:
            self._warn(f"metrics.mlflow: {described(error)[:300]}")


def trackers(
    settings: MetricsSettings, folder: RunFolder, config: Mapping[str, Any], *, say: Say, warn: Say
) -> Iterator[Sink]:
    """Yields the sinks that the settings ask for, and says where each shows the run. `config` holds no secrets."""
    yield TensorBoardSink(folder.tensorboard)
    if settings.wandb is not None:
        sink = WandbSink(settings.wandb, folder, config)
        say(f"Weights & Biases: {sink.where}")
        yield sink
    if settings.mlflow is not None:
        sink = MlflowSink(settings.mlflow, folder, config, warn)
        say(f"MLflow: {sink.where}")
        yield sink


def flat(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each value of nested mappings with its dotted key.

    >>> list(flat({"seed": 1, "batch": {"groups": 4}}))
    [('seed', 1), ('batch.groups', 4)]
    """
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def _extra(name: str, key: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingExtra(name, key) from error


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values that metrics.jsonl has: without those that are not finite."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _known_ids(folder: RunFolder) -> dict[str, str]:
    with boundary(ConfigError, f"{folder.trackers} is damaged; remove it to begin new runs in the trackers"):
        return parse_json(folder.trackers.read_bytes()) if folder.trackers.is_file() else {}


def _keep_id(folder: RunFolder, tracker: str, run: str) -> None:
    folder.trackers.write_text(json.dumps(_known_ids(folder) | {tracker: run}), encoding="utf-8")
