"""Memory of the device: what sleeping engines leave, and what `flexmarl check` says that a run needs."""

import gc
from typing import Any

import pytest
import torch

from flexmarl.assemble.needed_memory import BYTES
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.testing.training import sample_of
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import Dtype, TrainingSettings
from tests.gpu.models import SOLVER, engine, micro_batches, qwen3, requests

pytestmark = pytest.mark.gpu
TRAINER_BYTES = {"float64": 5 * 8, "float32": 5 * 4, "bfloat16": 2 + 5 * 4}
"""Bytes per trained parameter: weight, gradient, gradient sum and AdamW's two moments. In bfloat16 all but the weight
are float32, and there is a float32 master weight."""
ROUNDED = 2**20
"""Bytes by which small tensors may differ: torch gives memory out in blocks of 512 bytes, kernels keep workspaces."""

SEGMENT = 2 * 2**20
"""Bytes that torch takes from the device at once for small tensors, one of which may be left."""


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # One for each thread that has multiplied matrices; autograd has its own.
    return torch.cuda.memory_allocated()


def test_an_engine_asleep_holds_no_memory_of_the_device_and_wakes_as_it_was(device: str, on_thread: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        asked = requests(64, max_tokens=600)  # 512 bytes of keys and values for each token
        before = allocated()
        async with engine(qwen3, InlineObjectStore(), thread, device, slots=64, max_len=2048) as made:
            first = {a.request_id: a async for a in made.generate(asked)}
            awake = allocated()
            assert awake > before + 16 * ROUNDED
            for _ in range(3):
                await made.sleep()
                assert allocated() <= before + ROUNDED
                kept = torch.cuda.memory_reserved()
                assert kept <= before + SEGMENT, "what torch keeps for later goes back to the device"
                await made.wake()
                assert before < allocated() <= awake, "blocks are taken again when requests need them"
            again = {a.request_id: a async for a in made.generate(asked)}
            for name, answer in first.items():
                assert again[name].response_ids.tolist() == answer.response_ids.tolist()

    on_thread(scenario)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check_foretells_what_trainer_and_engine_hold(dtype: Dtype, device: str, on_thread: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        store, asked = InlineObjectStore(), requests()
        before = allocated()
        made = engine(qwen3, store, thread, device, slots=64, max_len=2048, kept_prefixes=0, dtype=dtype)
        parameters = sum(p.numel() for p in qwen3().parameters())
        assert abs(allocated() - before - BYTES[dtype] * parameters) <= ROUNDED, "no request, no keys and values"
        played = [sample_of(asked[0], a) async for a in made.generate(asked[:1])]
        tokens = 2 * (len(asked[0].prompt_ids) + asked[0].sampling.max_tokens + 4 * 32)  # doubling, and whole blocks
        cache = tokens * (2 * 2 * 2 * 16)  # layers, keys and values, key heads, width
        assert allocated() - before <= BYTES[dtype] * (parameters + cache) + ROUNDED
        await made.close()
        del made
        before = allocated()
        trainer = SingleProcessTrainer(
            SOLVER, qwen3(), TrainingSettings(dtype=dtype, tree="off"), store, thread=thread, device=device
        )
        for step in range(2):
            for batch in micro_batches(played * 2, size=1):
                await trainer.accumulate_batch(batch)
            assert (await trainer.step(divisors_of(played * 2))).version == step + 1
        # Between steps neither gradients nor their sums are held: two of the numbers of each parameter.
        held = allocated() - before
        assert held <= TRAINER_BYTES[dtype] * parameters + ROUNDED

    on_thread(scenario)
