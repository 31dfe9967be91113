import asyncio
import math

import pytest

from flexmarl.events.backends.trackers import TensorBoardSink
from flexmarl.events.metrics import JsonlSink, Metrics, read_metrics, time_shares
from flexmarl.simulator.virtual_time import run_virtual


def test_counters_add_means_average_and_gauges_stay():
    metrics = Metrics(lambda: 0.0)
    metrics.add("rollout/tokens", 10)
    metrics.add("rollout/tokens", 32)
    metrics.mean("reward/solver", 1.0)
    metrics.mean("reward/solver", 0.0, weight=3)
    metrics.gauge("version/solver", 1)
    metrics.gauge("version/solver", 2)
    assert metrics.flush(1) == {
        "reward/solver": 0.25, "rollout/tokens": 42.0, "time/step_s": 0.0, "version/solver": 2.0,
    }  # fmt: skip
    assert metrics.flush(2) == {"time/step_s": 0.0, "version/solver": 2.0}


def test_a_name_has_one_kind():
    metrics = Metrics(lambda: 0.0)
    metrics.mean("success", 1.0)
    with pytest.raises(ValueError, match="'success' is a mean and was written as a counter"):
        metrics.add("success")


def test_phases_overlap_and_a_phase_counts_once():
    async def main() -> list[dict[str, float]]:
        metrics = Metrics(asyncio.get_running_loop().time)

        async def phase(name: str, start: float, end: float) -> None:
            await asyncio.sleep(start)
            metrics.begin(name)
            await asyncio.sleep(end - start)
            metrics.end(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(phase("rollout", 0, 4))
            group.create_task(phase("rollout", 1, 5))
            group.create_task(phase("rollout", 6, 7))
            group.create_task(phase("train", 3, 13))
            await asyncio.sleep(10)
            first = metrics.flush(1)
        return [first, metrics.flush(2), metrics.flush(3)]

    first, second, third = run_virtual(main())
    assert first == {"time/rollout_s": 6.0, "time/step_s": 10.0, "time/train_s": 7.0}
    assert second == {"time/step_s": 3.0, "time/train_s": 3.0}
    assert third == {"time/step_s": 0.0}
    assert time_shares(first) == {"rollout": 0.6, "train": 0.7}
    assert time_shares(third) == {}


def test_every_sink_gets_every_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(lambda: 0.0, [JsonlSink(path), TensorBoardSink(tmp_path / "tensorboard")])
    for step in (1, 2):
        metrics.mean("team/success", step / 4)
        metrics.flush(step)
    metrics.close()
    metrics.close()
    assert path.read_text().splitlines()[0] == '{"step":1,"team/success":0.25,"time/step_s":0.0}'
    assert read_metrics(path)[2]["team/success"] == 0.5

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("team/success")] == [(1, 0.25), (2, 0.5)]


def test_what_is_not_finite_is_null_and_absent_on_reading(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"loss": math.nan, "norm": math.inf, "success": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":1,"loss":null,"norm":null,"success":0.5}\n'
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"success": 0.5}}


def test_a_resumed_run_replaces_the_steps_it_plays_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in (1, 2, 3):
        first.write(step, {"success": 0.1})
    with path.open("a") as file:
        file.write('{"step":4,"succ')
    second = JsonlSink(path)
    second.write(3, {"success": 0.9})
    assert read_metrics(path) == {1: {"success": 0.1}, 2: {"success": 0.1}, 3: {"success": 0.9}}
