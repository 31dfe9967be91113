"""The trainer on the device: its contract, and the update that a CPU makes of the same rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, TensorTree, weights_key
from flexmarl.records import Version
from flexmarl.testing.training import check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import AdamWSettings, LoraSettings, TrainingSettings
from tests.gpu.models import MODELS, SOLVER, micro_batches, qwen3, rows

# Trees only where they are meant: on CUDA each type and width of heads compiles kernels, in float32 for half a minute.
SETTINGS = {
    "auto": TrainingSettings(dtype="bfloat16"),
    "trees": TrainingSettings(dtype="bfloat16", tree="on"),
    "float32": TrainingSettings(tree="off"),
    "bfloat16": TrainingSettings(tree="off", dtype="bfloat16"),
    "float64": TrainingSettings(tree="off", dtype="float64"),
    "checkpointing": TrainingSettings(tree="off", activation_checkpointing=True),
    "lora": TrainingSettings(tree="off", lora=LoraSettings(rank=4)),
    "critic and kl": TrainingSettings.model_validate({"tree": "off", "critic": {}, "kl": {"coef": 0.1}}),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_it_conforms(kind: str, device: str, on_thread: Any, tmp_path: Path) -> None:
    async def scenario(thread: DeviceThread) -> None:
        def make(objects: Any, reader: Any) -> SingleProcessTrainer:
            # Deterministic: of two equal trainers the contract wants equal bits, and CUDA adds in any order else.
            return SingleProcessTrainer(
                SOLVER, qwen3(), SETTINGS[kind], objects, thread=thread, device=device, deterministic=True, rows=reader
            )

        await check_trainer(make, micro_batches(rows(1)), tmp_path, streams=kind != "critic and kl")

    on_thread(scenario)


async def updated(
    device: str, settings: TrainingSettings, thread: DeviceThread, *, make: Any = qwen3, deterministic: bool = False
) -> tuple[TensorTree, Checksum]:
    """The weights after two updates."""
    store = InlineObjectStore()
    trainer = SingleProcessTrainer(
        SOLVER, make(), settings, store, thread=thread, device=device, deterministic=deterministic
    )
    for step in range(2):
        samples = rows(step)
        for batch in micro_batches(samples):
            await trainer.accumulate_batch(batch)
        await trainer.step(divisors_of(samples))
    held = await trainer.publish(Version(2))
    tree = await store.get(weights_key(SOLVER, Version(2)))
    return {name: tensor.cpu().double() for name, tensor in tree.items()}, held


def apart(one: TensorTree, other: TensorTree, start: TensorTree) -> float:
    """How far two updates are apart, by the length of the second."""
    difference = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return (difference / sum(float((other[name] - start[name]).square().sum()) for name in one)) ** 0.5


@pytest.mark.parametrize(("kind", "at_most"), [("float64", 1e-6), ("float32", 2e-2), ("checkpointing", 2e-2)])
@pytest.mark.parametrize("name", MODELS)
def test_its_updates_are_those_of_a_cpu_row_by_row(
    name: str, kind: str, at_most: float, device: str, on_thread: Any
) -> None:
    async def scenario(thread: DeviceThread) -> None:
        rate = {"optimizer": AdamWSettings(learning_rate=1e-3, eps=1e-3)}
        here, _ = await updated(device, SETTINGS[kind].model_copy(update=rate), thread, make=MODELS[name])
        plain = TrainingSettings(dtype="float64", tree="off", max_tokens_per_forward=1, **rate)
        there, _ = await updated("cpu", plain, thread, make=MODELS[name])
        start = {key: tensor.double() for key, tensor in MODELS[name]().state_dict().items()}
        assert apart(here, there, start) <= at_most

    on_thread(scenario)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "checkpointing", "trees"])
def test_deterministic_updates_are_equal_in_every_bit(kind: str, device: str, on_thread: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        held = [(await updated(device, SETTINGS[kind], thread, deterministic=True))[1] for _ in range(3)]
        assert len(set(held)) == 1

    on_thread(scenario)


def test_what_is_saved_on_the_device_goes_on_elsewhere(device: str, on_thread: Any, tmp_path: Path) -> None:
    async def scenario(thread: DeviceThread) -> None:
        batches, settings = micro_batches(rows(1)), SETTINGS["float64"]

        def trainer(where: str) -> SingleProcessTrainer:
            return SingleProcessTrainer(SOLVER, qwen3(), settings, InlineObjectStore(), thread=thread, device=where)

        first, second, back = trainer(device), trainer("cpu"), trainer(device)
        await first.accumulate_batch(batches[0])
        await first.save(tmp_path / "there")
        await second.load(tmp_path / "there")
        await second.accumulate_batch(batches[1])
        await second.save(tmp_path / "back")
        await back.load(tmp_path / "back")
        report = await back.step(divisors_of(s for batch in batches[:2] for s in batch.samples))
        assert report.version == 1
        assert report.num_samples == sum(len(batch.samples) for batch in batches[:2])

    on_thread(scenario)


def test_the_random_stream_of_the_process_is_left_as_it_was(device: str, on_thread: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        SingleProcessTrainer(SOLVER, _made_before, SETTINGS["lora"], InlineObjectStore(), device=device)
        assert torch.equal(torch.rand(3), expected)

    _made_before = qwen3()
    on_thread(scenario)
