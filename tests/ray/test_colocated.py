"""Mode `colocated` on real processes: engines and places have the same rooms in turn, and the bits of `sync`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import flexmarl
from flexmarl.config import load_run
from flexmarl.events.run_events import ProcessStarted, StepEnded, WorkerLost
from flexmarl.events.serving_events import InstanceReplaced
from flexmarl.events.training_events import DevicesFreed, MicroBatchDone, Swapped, Updated
from tests.ray.child_run import Left, assert_same
from tests.small_run import write_model

pytestmark = pytest.mark.ray

STEPS = 3
POLICIES = ("one", "two")
POLICY = (
    "{model: model, engine: {type: embedded, slots: 8, max_len: 64}, "
    "training: {micro_batch: 2, optimizer: {learning_rate: 3e-3}}}"
)
TEAM = [
    *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", "batch={groups: 2, episodes: 3}"),
    *("evaluate.tasks=0", "checkpoint={every: 2, keep: 9}"),
    *(f"policies.{name}={POLICY}" for name in POLICIES),
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 6}}",
]
COLOCATED = ["cluster.backend=ray", "mode=colocated"]
Listeners = Mapping[Any, Callable[[Any], None]]


def train(config: Path, out: Path, *more: str, on: Listeners | None = None) -> Left:
    before = psutil.Process().children(recursive=True)
    try:
        run = flexmarl.train(load_run(config, [*TEAM, f"out={out}", *more]), on=on or {}, show=False)
    finally:
        assert set(psutil.Process().children(recursive=True)) <= set(before), "nothing outlives the run"
    return Left(run.folder)


@pytest.fixture(scope="module")
def in_step(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run in mode `sync`, in one process."""
    return train(small_run, tmp_path_factory.mktemp("sync"), "mode=sync")


def assert_in_turn(run: Left) -> None:
    """Trainers are on devices only while engines have given them up."""
    lent = False
    there = set[str]()
    since = 0.0
    for event in run.events(DevicesFreed, Swapped):
        match event:
            case DevicesFreed(by="engines"):
                assert not there
                lent, since = True, event.ended
            case DevicesFreed():
                assert not there
                lent = False
            case Swapped():
                assert lent, "a swap ends while trainers have the devices"
                assert event.began >= since, "it begins after the engines have given them up"
                (there.add if event.direction == "resume" else there.discard)(event.policy)
            case _:
                raise AssertionError(event)
    assert not lent


def test_a_colocated_team_ends_with_the_bits_of_sync_and_has_half_the_rooms(
    small_run: Path, tmp_path: Path, in_step: Left
) -> None:
    rooms: dict[str, float] = {}

    def resources(event: Updated) -> None:
        import ray

        rooms.update(ray.cluster_resources())
        rooms["free"] = ray.available_resources().get("CPU", 0.0)

    assert_same(in_step, train(small_run, tmp_path / "inline", "mode=colocated"), steps=STEPS)
    colocated = train(small_run, tmp_path / "ray", *COLOCATED, on={Updated: resources})
    assert_same(in_step, colocated, steps=STEPS)
    assert rooms["CPU"] == len(POLICIES), "a room for an engine and a rank each"
    assert rooms["free"] == 0.0
    started = [event.process for event in colocated.events(ProcessStarted)]
    assert sorted(name for name in started if name.kind == "rank") == ["rank/0/0", "rank/1/0"]
    assert not [name for name in started if name.kind == "trainer"]
    assert_in_turn(colocated)
    by = [event.by for event in colocated.events(DevicesFreed)]
    assert by == ["engines", "trainers"] * (1 + STEPS + 2), "the first publication, steps, and two checkpoints"


def test_an_engine_killed_asleep_and_a_rank_killed_on_its_device_change_no_bit(
    small_run: Path, tmp_path: Path, in_step: Left
) -> None:
    pids: dict[str, int] = {}
    killed: dict[str, int] = {}
    freed: list[DevicesFreed] = []

    def started(event: ProcessStarted) -> None:
        pids[event.process] = event.pid

    def asleep(event: DevicesFreed) -> None:
        freed.append(event)
        if event.by == "engines" and len(freed) == 3:  # In the first step; the first two were for the first weights.
            killed["engine/one/0"] = pids["engine/one/0"]
            psutil.Process(killed["engine/one/0"]).kill()

    def on_its_device(event: MicroBatchDone) -> None:
        if "rank/0/0" not in killed and "engine/one/1" in pids:
            assert freed[-1].by == "engines"
            killed["rank/0/0"] = pids["rank/0/0"]
            psutil.Process(killed["rank/0/0"]).kill()

    run = train(
        small_run,
        tmp_path,
        *(*COLOCATED, "process_groups={at_once: 1, keep_updated: true}"),
        on={ProcessStarted: started, DevicesFreed: asleep, MicroBatchDone: on_its_device},
    )
    assert [(event.process, event.pid) for event in run.events(WorkerLost)] == list(killed.items()), "witness"
    assert list(killed) == ["engine/one/0", "rank/0/0"]
    assert_same(in_step, run, steps=STEPS)
    assert_in_turn(run)
    (replaced,) = run.events(InstanceReplaced)
    assert replaced.replaces == "one/0"
    (came,) = [event.t for event in run.events(ProcessStarted) if event.process == "engine/one/1"]
    back = next(event.ended for event in run.events(DevicesFreed)[3:] if event.by == "trainers")
    assert came > back, "it is started when trainers have given the devices back"


LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is in no file and not shared: without the blocks in /dev/shm that it has mapped."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) * 1024


def test_asleep_and_set_aside_neither_process_holds_weights(small_run: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", **LARGE)
    pids: dict[str, int] = {}
    held: dict[str, list[int]] = {}

    def started(event: ProcessStarted) -> None:
        pids[event.process] = event.pid
        if event.process == "rank/0/0":
            note("rank started", event.process)

    def note(moment: str, process: str) -> None:
        held.setdefault(moment, []).append(anonymous_bytes(pids[process]))

    def freed(event: DevicesFreed) -> None:
        if event.by == "engines":
            note("engine asleep", "engine/one/0")
        else:
            note("rank suspended", "rank/0/0")

    def ended(event: StepEnded) -> None:
        note("engine awake", "engine/one/0")

    def updated(event: Updated) -> None:
        note("rank training", "rank/0/0")

    words = [
        *("cluster.threads=1", "steps=3", "batch={groups: 2, episodes: 3}", "evaluate.tasks=0", "checkpoint.every=0"),
        *(
            "policies.one.training.micro_batch=4",
            f"policies.one.model={tmp_path / 'model'}",
            f"out={tmp_path / 'runs'}",
            *COLOCATED,
        ),
    ]
    listeners = {ProcessStarted: started, DevicesFreed: freed, StepEnded: ended, Updated: updated}
    flexmarl.train(load_run(small_run, words), on=listeners, show=False)
    weights = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    asleep = max(held["engine asleep"][1:])  # The first time it had its weights of no store.
    assert min(held["engine awake"]) - asleep > 0.9 * weights
    (first, *later), suspended = held["rank training"], max(held["rank suspended"])
    assert first - suspended > 3 * weights, "its weights, and the moments that its first update made"
    assert min(later) - suspended > 0.9 * weights, "its weights; the moments came back in blocks"
    assert suspended - held["rank started"][0] < weights, "of these nothing is left"


def test_a_resumed_run_loads_its_trainers_on_the_devices_that_engines_gave_up(
    small_run: Path, tmp_path: Path, in_step: Left
) -> None:
    begun = train(small_run, tmp_path, *COLOCATED, "steps=2")
    settings = load_run(small_run, [*TEAM, f"out={tmp_path}", *COLOCATED])
    flexmarl.train(settings, resume=begun.path, show=False)
    assert_same(in_step, begun, steps=STEPS)
    assert_in_turn(begun)


ADAPTERS = [
    *("evaluate={tasks: 2, every: 1}", "checkpoint={every: 1, keep: 9}", "steps=2"),
    "policies.one.training={lora: {rank: 2}, micro_batch: 2, kl: {coef: 0.1, where: reward}}",
    "policies.two.training={lora: {rank: 3}, micro_batch: 2, critic: {learning_rate: 1e-2}}",
    "credit.estimator={type: gae}",
    "credit.per_agent.solver={type: grpo}",
]


def test_adapters_whose_credit_asks_trainers_in_turn_end_with_the_bits_of_sync(small_run: Path, tmp_path: Path) -> None:
    inline = train(small_run, tmp_path / "inline", *ADAPTERS, "mode=sync")
    run = train(small_run, tmp_path / "ray", *ADAPTERS, *COLOCATED, "process_groups.at_once=1")
    assert_same(inline, run, steps=2)
    assert_in_turn(run)
