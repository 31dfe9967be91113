"""What tests of the device share: they run on CUDA where there is CUDA, else on the CPU, as far as they can."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
import torch

from flexmarl.cluster.concurrency import DeviceThread

T = TypeVar("T")
Scenario = Callable[[DeviceThread], Awaitable[T]]
LACKS_CUDA = "needs CUDA, and torch sees no CUDA device here"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that is marked `gpu` has nothing to prove elsewhere."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(LACKS_CUDA)


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def on_thread() -> Iterator[Callable[[Scenario[T]], T]]:
    """Runs a scenario on an event loop, with the one thread of the device."""
    thread = DeviceThread("test")

    async def bounded(scenario: Scenario[T]) -> T:
        async with asyncio.timeout(100):  # Only a hang takes so long.
            return await scenario(thread)

    yield lambda scenario: asyncio.run(bounded(scenario))
    thread.close()
