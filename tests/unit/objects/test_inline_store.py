"""The inline world's object store against the contract, copying at once or on a thread."""

import asyncio
import threading

import pytest
import torch

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectKey
from flexmarl.testing.object_checks import check_object_store


def test_the_inline_store_keeps_the_contract() -> None:
    asyncio.run(check_object_store(InlineObjectStore))


def test_it_keeps_the_contract_on_a_thread() -> None:
    thread = DeviceThread()
    asyncio.run(check_object_store(lambda: InlineObjectStore(thread)))
    thread.close()


def test_copies_are_made_on_its_thread_and_the_event_loop_goes_on_meanwhile() -> None:
    thread, may_copy = DeviceThread(), threading.Event()
    key, tensor = ObjectKey("weights"), torch.zeros(3)

    async def scenario() -> None:
        store = InlineObjectStore(thread)
        busy = asyncio.ensure_future(thread.run(may_copy.wait))
        setting = asyncio.ensure_future(store.set(key, {"w": tensor}))
        again = asyncio.ensure_future(store.set(key, {"w": tensor}))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not setting.done()
        with pytest.raises(KeyError):
            await store.get(key)
        may_copy.set()
        await busy
        await setting
        with pytest.raises(ValueError, match="keys name immutable objects"):
            await again
        assert torch.equal((await store.get(key))["w"], tensor)

    asyncio.run(scenario())
    thread.close()
