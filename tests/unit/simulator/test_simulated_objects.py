"""The object store of the simulated world: the same contract, and time that bytes take."""

import asyncio

import torch

from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectKey
from flexmarl.simulator.modelled_residents import SimulatedObjectStore
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.object_checks import check_object_store

KEY = ObjectKey("weights/solver/1")


async def took(store: SimulatedObjectStore) -> tuple[float, float]:
    """Seconds of a set, and of a get, of 80 bytes."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await store.set(KEY, {"weight": torch.zeros(10, dtype=torch.float64)})
    between = clock()
    await store.get(KEY)
    return between - began, clock() - between


def test_it_keeps_the_contract() -> None:
    run_virtual(check_object_store(lambda: SimulatedObjectStore(InlineObjectStore(), latency_s=1.0, bytes_per_s=100.0)))


def test_by_default_it_takes_no_time() -> None:
    assert run_virtual(took(SimulatedObjectStore(InlineObjectStore()))) == (0.0, 0.0)


def test_each_way_takes_the_latency_and_the_time_of_the_bytes() -> None:
    assert run_virtual(took(SimulatedObjectStore(InlineObjectStore(), latency_s=1.0, bytes_per_s=40.0))) == (3.0, 3.0)


def test_an_object_may_stand_for_a_larger_one() -> None:
    store = SimulatedObjectStore(
        InlineObjectStore(), bytes_per_s=1e9, bytes_of=lambda key: 28_000_000_000 if key == KEY else 0
    )
    assert run_virtual(took(store)) == (28.0, 28.0)
