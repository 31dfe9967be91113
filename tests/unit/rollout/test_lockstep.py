"""Calls of a group in rounds: one policy after another, and nobody waits for an episode that is gone."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import EngineError
from flexmarl.records import FinishReason, Generation, GenerationRequest, PolicyName, Sampling, Version, unserved
from flexmarl.rollout.episode_calls import Lockstep
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.rollout.plays import now

PLANNER, WRITER = PolicyName("planner"), PolicyName("writer")


def asks(policy: PolicyName, name: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=name, policy=policy, prompt_ids=np.zeros(1, np.int32), sampling=Sampling(), seed=0
    )


class Engine:
    """Answers a call after as many seconds as its name ends with; `-` in front of them: it fails then."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, str]] = []
        self.in_flight: list[PolicyName] = []
        self.mixed = False
        """Whether calls of two policies were ever under way together."""

    async def __call__(self, request: GenerationRequest, /, **how: Any) -> Generation:
        self.sent.append((now(), request.request_id))
        self.in_flight.append(request.policy)
        self.mixed |= len(set(self.in_flight)) > 1
        try:
            seconds = float(request.request_id.rpartition(":")[2])
            await asyncio.sleep(abs(seconds))
            if seconds < 0:
                raise EngineError("broken")
        finally:
            self.in_flight.remove(request.policy)
        return unserved(request, Version(0), FinishReason.STOP)


class Group:
    """A group in lockstep; an episode is a list of steps: a call's name, or seconds that a tool takes."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.lockstep = Lockstep([PLANNER, WRITER, PLANNER])
        self.ended: dict[int, float] = {}

    async def episode(self, index: int, steps: Sequence[Any]) -> None:
        with self.lockstep.episode(self.engine) as generate:
            for step in steps:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    names = [step] if isinstance(step, str) else step
                    await asyncio.gather(
                        *(generate(asks(PLANNER if name.startswith("p") else WRITER, name)) for name in names)
                    )
        self.ended[index] = now()

    def play(self, *episodes: Sequence[Any], cancel: Mapping[int, float] = {}) -> list[BaseException | None]:
        async def run() -> list[BaseException | None]:
            tasks = [asyncio.create_task(self.episode(index, steps)) for index, steps in enumerate(episodes)]
            for index, after in cancel.items():
                asyncio.get_running_loop().call_later(after, tasks[index].cancel)
            return await asyncio.gather(*tasks, return_exceptions=True)

        return run_virtual(run())


def test_a_round_goes_policy_by_policy_and_waits_for_the_longest_call_of_each():
    group = Group()
    group.play(["p0:1", "w0:1"], ["p1:3", "p1:1"], ["w2:2", "w2:2"])
    assert group.engine.sent == [
        (0.0, "p0:1"),
        (0.0, "p1:3"),
        (3.0, "w2:2"),
        (5.0, "p1:1"),
        (6.0, "w0:1"),
        (6.0, "w2:2"),
    ]
    assert group.ended == {0: 7.0, 1: 6.0, 2: 8.0}


def test_a_round_waits_for_a_slow_tool_of_one_episode():
    group = Group()
    group.play(["p0:1", "p0:1"], ["p1:1", 9.0, "p1:1"])
    assert sorted(group.engine.sent[2:]) == [(10.0, "p0:1"), (10.0, "p1:1")]


def test_an_episode_that_ends_while_the_others_wait_for_it_lets_them_go_on():
    group = Group()
    group.play(["p0:1", "p0:1"], ["p1:1", 9.0])
    assert group.engine.sent[-1] == (10.0, "p0:1")
    assert group.ended == {0: 11.0, 1: 10.0}


def test_a_call_that_fails_frees_the_turn_behind_it():
    group = Group()
    first, second = group.play(["p0:-2", "p0:1"], ["w1:1", "w1:1"])
    assert isinstance(first, EngineError)
    assert second is None
    assert group.engine.sent == [(0.0, "p0:-2"), (2.0, "w1:1"), (3.0, "w1:1")]


@pytest.mark.parametrize("after", [0.5, 1.5, 2.5])
def test_an_episode_that_is_cancelled_is_waited_for_by_nobody(after: float):
    """Before its turn, while its call is under way, and in the next round."""
    group = Group()
    first, second = group.play(["p0:1", "p0:1", "p0:1"], ["w1:1", "w1:1", "w1:1"], cancel={1: after})
    assert first is None
    assert isinstance(second, asyncio.CancelledError)
    assert len([name for _, name in group.engine.sent if name == "p0:1"]) == 3
    assert group.ended[0] <= 2 * 2 + 1


def test_a_second_call_of_one_episode_that_comes_late_has_a_round_of_its_own():
    group = Group()

    async def late() -> None:
        with group.lockstep.episode(group.engine) as generate:
            first = asyncio.ensure_future(generate(asks(WRITER, "w:4")))
            await asyncio.sleep(1.0)
            await asyncio.gather(first, generate(asks(PLANNER, "p:1")))

    run_virtual(late())
    assert group.engine.sent == [(0.0, "w:4"), (4.0, "p:1")]


CALL = st.builds(lambda policy, seconds: f"{policy}:{seconds}", st.sampled_from("pw"), st.sampled_from([-1, 0, 1, 2]))
STEP = CALL | st.sampled_from([0.0, 0.5, 3.0]) | st.lists(CALL, min_size=2, max_size=3)
EPISODES = st.lists(st.lists(STEP, max_size=4), min_size=1, max_size=5)


@given(episodes=EPISODES, cancel=st.dictionaries(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, 2.5]), max_size=3))
@settings(max_examples=300, deadline=None)
def test_every_episode_ends_and_two_policies_are_never_under_way_together(episodes, cancel):
    """Whatever fails or is cancelled: a wait that nobody ends would be a DeadlockError."""
    group = Group()
    group.play(*episodes, cancel={index: after for index, after in cancel.items() if index < len(episodes)})
    assert not group.engine.mixed
    assert not group.engine.in_flight
