"""What a workflow leaves behind does not keep the process from ending."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from flexmarl.cluster import hard_stop
from flexmarl.cluster.hard_stop import run_and_leave_threads


def test_an_asynchronous_generator_that_waits_for_ever_in_its_finally_is_waited_for_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hard_stop, "EXIT_WITHIN_S", 0.01)
    left: list[AsyncIterator[int]] = []
    ended: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            try:
                await asyncio.sleep(1e6)
            finally:
                ended.append("cancelled")

    async def main() -> str:
        left.append(numbers())
        assert await anext(left[0]) == 1
        return "done"

    assert run_and_leave_threads(main()) == "done"
    assert ended == ["cancelled"]
