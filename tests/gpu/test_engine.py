"""The embedded engine on the device: its contract, its draws, and who else is in the batch."""

from typing import Any

import numpy as np
import pytest
import torch

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.backends.embedded.sampler import SamplingRows, sample, uniforms
from flexmarl.objects.backends.memory import InlineObjectStore, ShmObjectStore
from flexmarl.objects.interface import checksum, weights_key
from flexmarl.records import Generation, Version
from flexmarl.testing.inference import check_inference_engine
from tests.gpu.models import MODELS, SOLVER, engine, letters, qwen3, requests

# 256 ids: the smallest float64 sums of 256 probabilities are told apart from those of another order of adding.
ROWS = SamplingRows(
    temperature=np.array([1.0, 0.7, 1.0, 1.3, 0.0, 1.0, 0.9, 1.0], np.float32),
    top_k=np.array([0, 0, 20, 5, 0, 0, 50, 0]),
    top_p=np.array([1.0, 1.0, 1.0, 0.9, 1.0, 0.8, 0.95, 1.0], np.float32),
    min_p=np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02, 0.1], np.float32),
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_conforms(name: str, dtype: str, device: str, on_thread: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        store = InlineObjectStore()

        async def make() -> Any:
            # In bfloat16 a request's last digits depend on its company, and the contract compares them.
            return engine(MODELS[name], store, thread, device, dtype=dtype, deterministic=dtype == "bfloat16")

        async def publish(version: Version) -> Any:
            model = MODELS[name](7).to(getattr(torch, dtype))
            return (await store.set(weights_key(SOLVER, version), model.state_dict())).checksum

        await check_inference_engine(
            make, policy=SOLVER, stop_text=letters, publish=publish, coarse=dtype == "bfloat16"
        )

    on_thread(scenario)


async def played(thread: DeviceThread, device: str, asked: Any, **more: Any) -> dict[str, Generation]:
    async with engine(qwen3, InlineObjectStore(), thread, device, **more) as made:
        return {answer.request_id: answer async for answer in made.generate(asked)}


def test_in_deterministic_mode_a_request_gets_the_same_bits_in_any_company(device: str, on_thread: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        asked = requests()
        together = await played(thread, device, asked, deterministic=True, slots=8)
        for one in asked[:4]:
            alone = (await played(thread, device, [one], deterministic=True, slots=8))[one.request_id]
            assert alone.response_ids.tolist() == together[one.request_id].response_ids.tolist()
            assert np.array_equal(alone.raw_logprobs, together[one.request_id].raw_logprobs)

    on_thread(scenario)


def test_the_same_requests_get_the_tokens_that_they_get_on_a_cpu(device: str, on_thread: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        here, there = [await played(thread, where, requests(), slots=12) for where in (device, "cpu")]
        same = [name for name in here if here[name].response_ids.tolist() == there[name].response_ids.tolist()]
        assert len(same) >= 0.9 * len(here), "a draw may lie on the border of two tokens, but rarely"
        for name in same:
            np.testing.assert_allclose(here[name].raw_logprobs, there[name].raw_logprobs, atol=1e-3)

    on_thread(scenario)


def test_of_equal_logits_equal_tokens_are_drawn() -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(0, 3, (len(ROWS.top_k), 256)).astype(np.float32))
    there = logits.to("cuda" if torch.cuda.is_available() else "cpu")
    for number in range(50):
        u = uniforms(np.arange(len(logits), dtype=np.uint64), np.full(len(logits), number))
        (ids, own, raw), (their_ids, their_own, their_raw) = sample(logits, ROWS, u), sample(there, ROWS, u)
        assert their_ids.tolist() == ids.tolist()
        torch.testing.assert_close(their_own.cpu(), own, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(their_raw.cpu(), raw, rtol=1e-5, atol=1e-5)


def test_weights_in_shared_memory_arrive_on_the_device_whole(device: str, on_thread: Any, tmp_path: Any) -> None:
    async def scenario(thread: DeviceThread) -> None:
        store = ShmObjectStore(tmp_path / "objects")
        store.create()
        published = {name: tensor.to(device) for name, tensor in qwen3(3).state_dict().items()}
        meta = await store.set(weights_key(SOLVER, Version(1)), published)
        assert meta.checksum == checksum({name: tensor.cpu() for name, tensor in published.items()})
        async with engine(qwen3, store, thread, device) as made:
            assert await made.load_weights(SOLVER, Version(1)) == meta.checksum

    on_thread(scenario)
