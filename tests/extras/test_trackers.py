"""Weights & Biases and MLflow get the figures of metrics.jsonl, in their own offline stores. See `make test-extras`."""

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexmarl.cli import app
from flexmarl.errors import ConfigError
from flexmarl.events.backends.trackers import MlflowSink, WandbSink
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.settings import MlflowSettings, WandbSettings

RELAY = Path(__file__).parents[2] / "examples" / "relay" / "cpu.yaml"
SHORT = ["steps=2", "batch={groups: 2, episodes: 2}", "evaluate.tasks=4", "checkpoint.every=1"]
SECRET = "hf_0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run-1")
    folder.path.mkdir()
    return folder


def offline_file(folder: RunFolder) -> list[bytes]:
    """The records of W&B's offline files, oldest file first: LevelDB's log format behind a header of 7 bytes."""
    records, part = [], b""
    for file in sorted(folder.path.glob("wandb/*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        raw, at = file.read_bytes(), 7
        while at + 7 <= len(raw):
            left = 2**15 - at % 2**15
            if left < 7:
                at += left
                continue
            _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
            part += raw[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                records.append(part)
                part = b""
    return records


def wandb_history(folder: RunFolder) -> dict[int, dict[str, float]]:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    pytest.importorskip("wandb").teardown()  # Waits for W&B's process, which writes the last records after `finish`.
    steps: dict[int, dict[str, float]] = {}
    for raw in offline_file(folder):
        record = proto.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(item.nested_key) or item.key: float(item.value_json) for item in record.history.item}
            values = {name: value for name, value in items.items() if not name.startswith("_")}
            steps.setdefault(int(values.pop("step")), {}).update(values)
    return steps


def mlflow_history(uri: str, folder: RunFolder) -> dict[int, dict[str, float]]:
    import mlflow

    client = mlflow.MlflowClient(uri)
    (run,) = [found for found in client.search_runs(["1"]) if found.info.run_name == folder.path.name]
    steps: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            steps.setdefault(metric.step, {})[name] = metric.value
    return steps


def assert_same(theirs: Mapping[int, Mapping[str, float]], ours: Mapping[int, Mapping[str, float]]) -> None:
    assert sorted(theirs) == sorted(ours)
    for step, values in ours.items():
        assert theirs[step] == pytest.approx(dict(values), rel=1e-12)


class TestWandb:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("wandb", reason="needs the extra 'wandb': make test-extras")

    def test_a_run_has_the_figures_of_metrics_jsonl(self, tmp_path: Path) -> None:
        folder = trained(tmp_path, "metrics.wandb={mode: offline, project: teams}")
        assert len(read_metrics(folder.metrics)) == 3
        assert_same(wandb_history(folder), read_metrics(folder.metrics))

    def test_a_resumed_run_goes_on_in_the_same_run(self, folder: RunFolder) -> None:
        ids = []
        for step, success in ((3, 0.25), (2, 0.5)):  # It resumes from a checkpoint before step 3.
            sink = WandbSink(WandbSettings(mode="offline"), folder, {})
            sink.write(step, {"team/success": success, "train/solver/loss": float("nan")})
            sink.close()
            ids.append(folder.trackers.read_text())
            (part,) = folder.path.glob("wandb/offline-run-*")
            part.rename(part.parent / f"of-step-{step}")  # W&B names it by the second.
        assert ids[0] == ids[1]
        assert wandb_history(folder) == {3: {"team/success": 0.25}, 2: {"team/success": 0.5}}

    def test_no_file_holds_a_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", SECRET)
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        folder = trained(tmp_path, "metrics.wandb={mode: offline}", f"team.agents.speaker.system='{SECRET}'")
        assert_no_secret(folder, SECRET, "0123456789" * 4)

    def test_online_without_a_key_names_the_setting(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        for variable in ("WANDB_API_KEY", "WANDB_MODE"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
        monkeypatch.setenv("NETRC", str(folder.path / "netrc"))
        pytest.importorskip("wandb").teardown()  # It reads the environment once, and an earlier test had a key there.
        with pytest.raises(ConfigError, match=r"metrics\.wandb: .*`wandb login`, or use mode: offline.*No API key"):
            WandbSink(WandbSettings(), folder, {})


class TestMlflow:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("mlflow", reason="needs the extra 'mlflow': make test-extras")

    def test_a_run_has_the_figures_of_metrics_jsonl(self, tmp_path: Path) -> None:
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        folder = trained(tmp_path, f"metrics.mlflow={{tracking_uri: '{uri}', experiment: teams}}")
        ours = read_metrics(folder.metrics)
        assert_same(mlflow_history(uri, folder), ours)
        assert "policies.speaker.training.optimizer.learning_rate" in parameters(uri)

    def test_a_resumed_run_goes_on_in_the_same_run(self, tmp_path: Path, folder: RunFolder) -> None:
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        for step, success in ((3, 0.25), (2, 0.5)):
            sink = MlflowSink(MlflowSettings(tracking_uri=uri), folder, {"seed": step}, print)
            sink.write(step, {"team/success": success, "team/odd?name": 1.0, "train/loss": float("inf")})
            sink.close()
        assert mlflow_history(uri, folder) == {
            3: {"team/success": 0.25, "team/odd_name": 1.0},
            2: {"team/success": 0.5, "team/odd_name": 1.0},
        }

    def test_a_failed_run_is_shown_as_failed(self, tmp_path: Path, folder: RunFolder) -> None:
        import mlflow

        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        MlflowSink(MlflowSettings(tracking_uri=uri), folder, {}, print).close(failed=True)
        (run,) = mlflow.MlflowClient(uri).search_runs(["1"])
        assert run.info.status == "FAILED"

    def test_a_lost_server_costs_a_warning_and_no_figure_is_lost_when_it_is_back(
        self, tmp_path: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        uri, warnings = f"sqlite:///{tmp_path / 'mlflow.db'}", list[str]()
        sink = MlflowSink(MlflowSettings(tracking_uri=uri), folder, {}, warnings.append)
        send = sink._client.log_batch

        def away(*_: object, **__: object) -> None:
            raise ConnectionError("no route to host")

        monkeypatch.setattr(sink._client, "log_batch", away)
        for step in (1, 2):
            sink.write(step, {"team/success": step / 4})
            assert sink._sending is not None
            sink._sending.result()
        assert len(warnings) == 1
        assert "metrics.mlflow: ConnectionError: no route to host; metrics.jsonl has every figure" in warnings[0]
        monkeypatch.setattr(sink._client, "log_batch", send)
        sink.close()
        assert mlflow_history(uri, folder) == {1: {"team/success": 0.25}, 2: {"team/success": 0.5}}

    def test_no_file_holds_a_key(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", SECRET)
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
        folder = trained(
            tmp_path, f"metrics.mlflow={{tracking_uri: '{uri}'}}", f"team.agents.speaker.system='{SECRET}'"
        )
        assert SECRET.encode() not in (tmp_path / "mlflow.db").read_bytes()
        assert_no_secret(folder, SECRET)

    def test_a_server_that_is_not_there_names_the_setting(self, folder: RunFolder) -> None:
        with pytest.raises(ConfigError, match=r"metrics\.mlflow: beginning a run \(tracking_uri is 'http://127"):
            MlflowSink(MlflowSettings(tracking_uri="http://127.0.0.1:9"), folder, {}, print)


def trained(tmp_path: Path, *overrides: str) -> RunFolder:
    result = CliRunner().invoke(app, ["train", str(RELAY), *SHORT, f"out={tmp_path / 'runs'}", *overrides])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return RunFolder(Path(result.output.strip().splitlines()[-1]))


def parameters(uri: str) -> dict[str, Any]:
    import mlflow

    (run,) = mlflow.MlflowClient(uri).search_runs(["1"])
    return run.data.params


def files(folder: Path) -> Iterator[Path]:
    return (Path(place) / name for place, _, names in os.walk(folder) for name in names)


def assert_no_secret(folder: RunFolder, *secrets: str) -> None:
    """config.yaml is the user's own copy of the settings; every other file may be shown to others."""
    shown = [path for path in files(folder.path) if path.suffix in (".wandb", ".json", ".jsonl", ".txt", ".log")]
    assert shown
    for path in shown:
        for secret in secrets:
            assert secret.encode() not in path.read_bytes(), path
