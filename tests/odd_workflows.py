"""Workflows that misbehave in 1 of 7 episodes, one for each kind of oddity. Other episodes answer and are rewarded.

    run = ScriptedRun(odd_workflow("sys_exit"), steps=2, batch={"groups": 4, "episodes": 4}).play()

Whatever a workflow does, its run must reach its end, every group must end, and only odd episodes may be lost.
"""

import asyncio
import contextlib
import functools
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.agents import Seat, Team, Workflow
from flexmarl.errors import StoreError
from flexmarl.records import EpisodeStatus, Task, split_trajectory_id

FINISHED, FAILED, TIMED_OUT = EpisodeStatus.FINISHED, EpisodeStatus.FAILED, EpisodeStatus.TIMED_OUT
EVERY = 7
"""Number of episodes from one odd episode to the next."""
LONG_S = 1e6
"""Longer than any time limit of a run."""
Play = Callable[[Task, Team], Any]


@dataclass(frozen=True, slots=True)
class Oddity:
    """One kind of misbehaviour."""

    play: Play
    ends: EpisodeStatus
    """The status with which its episode ends."""
    because: str = ""
    """Words in the reason of a failed episode."""
    virtual: bool = True
    """False if it cannot be played in virtual time, because it uses threads or never waits."""


ODDITIES: dict[str, Oddity] = {}
"""All kinds, by name."""


def odd(ends: EpisodeStatus, because: str = "", *, virtual: bool = True) -> Callable[[Play], Play]:
    """Decorator that enters a workflow into `ODDITIES`, by its name."""

    def enter(play: Play) -> Play:
        ODDITIES[play.__name__] = Oddity(play, ends, because, virtual)
        return play

    return enter


def odd_workflow(*kinds: str, episodes: int = 4) -> Workflow:
    """Makes a workflow whose every 7th episode is odd, of these kinds in turn. `episodes` is the size of a group."""

    async def play(task: Task, team: Team) -> None:
        kind = kind_of(team.context.trajectory_id, kinds, episodes)
        if kind is None:
            await answer(task, team)
        else:
            await ODDITIES[kind].play(task, team)

    return play


def kind_of(trajectory_id: str, kinds: Sequence[str], episodes: int) -> str | None:
    """Returns the kind of an odd episode, None for the others. A repeated episode gets the same kind."""
    group, index, _ = split_trajectory_id(trajectory_id)
    turn, rest = divmod(group * episodes + index, EVERY)
    return None if rest else kinds[turn % len(kinds)]


async def answer(task: Task, team: Team) -> None:
    """Plays a task as a workflow should: every agent answers and is rewarded."""
    for seat in team:
        (await seat.act(task.prompt)).reward(team.rng.random())


def first(team: Team) -> Seat:
    """Returns the team's first seat."""
    return next(iter(team))


class OddBaseException(BaseException):
    """An error that `except Exception` does not catch."""


class Wordless(Exception):
    """An error whose text cannot be made: `str` raises SystemExit."""

    def __str__(self) -> str:
        raise SystemExit("no text")


# Workflows that raise.


@odd(FAILED, "ValueError: odd")
async def raises(task: Task, team: Team) -> None:
    """Raises an ordinary error, after an answer."""
    await answer(task, team)
    raise ValueError("odd")


@odd(FAILED, "OddBaseException: odd")
async def base_exception(task: Task, team: Team) -> None:
    """Raises a BaseException of its own."""
    raise OddBaseException("odd")


@odd(FAILED, "sys.exit('odd')")
async def sys_exit(task: Task, team: Team) -> None:
    """Calls `sys.exit`, like a script that was made a workflow."""
    await first(team).act(task.prompt)
    sys.exit("odd")


@odd(FAILED, "sys.exit(3)")
async def sys_exit_in_a_task(task: Task, team: Team) -> None:
    """Calls `sys.exit` in a task of a TaskGroup."""

    async def leave() -> None:
        sys.exit(3)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(first(team).act(task.prompt))
        tasks.create_task(leave())


@odd(FAILED, "GeneratorExit")
async def generator_exit(task: Task, team: Team) -> None:
    """Raises the exception that closes a coroutine."""
    raise GeneratorExit("odd")


@odd(FAILED, "StopIteration")
async def stop_iteration(task: Task, team: Team) -> None:
    """Calls `next` on an empty iterator."""
    next(iter(()))


@odd(FAILED, "TimeoutError: odd")
async def timeout_error(task: Task, team: Team) -> None:
    """Raises a TimeoutError of its own, before the episode's time is over."""
    raise TimeoutError("odd")


@odd(FAILED, "__str__ raised SystemExit")
async def error_without_text(task: Task, team: Team) -> None:
    """Raises an exception whose text cannot be made."""
    raise Wordless


@odd(FAILED, "\\ud83d\\x00\\x1b[2J")
async def unwritable_error(task: Task, team: Team) -> None:
    """Raises an error with a text that no file, database or terminal should get."""
    await first(team).act(task.prompt)
    raise RuntimeError("\ud83d\0\x1b[2J")


@odd(FAILED, "characters)")
async def huge_error(task: Task, team: Team) -> None:
    """Raises an error with a huge text, such as the whole answer of a server."""
    await first(team).act(task.prompt)
    raise RuntimeError("x" * 10_000_000)


@odd(FAILED, "ValueError: odd")
async def deep_group(task: Task, team: Team) -> None:
    """Raises exception groups in exception groups, nested deeper than Python recurses."""
    error: Exception = ValueError("odd")
    for _ in range(3000):
        nested: list[Exception] = [error]
        error = ExceptionGroup("", nested)
    raise error


@odd(FAILED, "RecursionError")
async def recursion(task: Task, team: Team) -> None:
    """Calls a function that calls itself without end."""

    def again() -> None:
        again()

    again()


@odd(FAILED, "its own")
async def somebody_elses_error(task: Task, team: Team) -> None:
    """Raises a StoreError, which would end the run if the store had raised it."""
    raise StoreError("its own")


@odd(FAILED, "asyncio.run() cannot be called")
async def nested_loop(task: Task, team: Team) -> None:
    """Calls `asyncio.run`, like code that was written for a script."""
    waiting = asyncio.sleep(0)
    try:
        asyncio.run(waiting)
    finally:
        waiting.close()


@odd(FAILED, "TypeError")
def not_awaitable(task: Task, team: Team) -> None:
    """Returns None instead of a coroutine: its `async` is missing."""
    team.reward(1.0)


# Workflows that cancel.


@odd(FAILED, "a CancelledError left it")
async def cancelled_error(task: Task, team: Team) -> None:
    """Raises CancelledError itself."""
    await first(team).act(task.prompt)
    raise asyncio.CancelledError


@odd(FAILED, "a CancelledError left it")
async def cancels_itself(task: Task, team: Team) -> None:
    """Cancels its own task."""
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await first(team).act(task.prompt)


@odd(FAILED, "a CancelledError left it")
async def awaits_what_it_cancelled(task: Task, team: Team) -> None:
    """Cancels a task and awaits it, the usual source of a CancelledError."""
    acting = asyncio.create_task(first(team).act(task.prompt))
    await asyncio.sleep(0.01)
    acting.cancel()
    await acting


@odd(FAILED, "a CancelledError left it")
async def shared_task_is_cancelled(task: Task, team: Team) -> None:
    """Awaits a task that a time limit cancelled, as when episodes share a task and one of them limits its time."""
    shared = asyncio.create_task(asyncio.sleep(LONG_S))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(shared, 0.01)
    await shared


@odd(FAILED, "CancelledError")
async def cancelled_in_a_group(task: Task, team: Team) -> None:
    """Raises a CancelledError in an exception group."""
    raise BaseExceptionGroup("odd", [asyncio.CancelledError()])


@odd(FINISHED)
async def timeout_inside(task: Task, team: Team) -> None:
    """Cuts a call by a time limit of its own, then continues."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await first(team).act(task.prompt)
    await answer(task, team)


# Workflows that misuse calls, rewards, tags and figures.


@odd(FINISHED)
async def no_call(task: Task, team: Team) -> None:
    """Makes no call."""


@odd(FINISHED)
async def no_call_but_rewards(task: Task, team: Team) -> None:
    """Makes no call, but gives a reward and a figure."""
    team.reward(1.0)
    team.report(success=1.0)


@odd(FAILED, "got no reward")
async def no_reward(task: Task, team: Team) -> None:
    """Makes a call and gives it no reward."""
    await first(team).act(task.prompt)


@odd(FAILED, "rewards of one part must add up to")
async def endless_reward(task: Task, team: Team) -> None:
    """Gives finite rewards whose sum is infinite."""
    await answer(task, team)
    for _ in range(2):
        team.reward(1.7e308)


@odd(FAILED)
async def reward_is_nan(task: Task, team: Team) -> None:
    """Gives NaN as a reward, such as 0 / 0 in numpy."""
    (await first(team).act(task.prompt)).reward(float("nan"))


@odd(FAILED, "a reward must be a finite number, got '1'")
async def reward_is_text(task: Task, team: Team) -> None:
    """Gives a text as a reward, such as a score that a judge wrote."""
    (await first(team).act(task.prompt)).reward("1")  # type: ignore[arg-type]


@odd(FAILED, "a reward must be a finite number, got 1000")
async def reward_is_huge(task: Task, team: Team) -> None:
    """Gives an integer as a reward that no float can hold."""
    (await first(team).act(task.prompt)).reward(10**400)


@odd(FAILED, "the tag 'score' must be a finite number, got nan")
async def tag_is_nan(task: Task, team: Team) -> None:
    """Sets a tag that JSON cannot express."""
    (await first(team).act(task.prompt, score=float("nan"))).reward(1.0)


@odd(FAILED, "half a surrogate pair")
async def tag_is_half_a_letter(task: Task, team: Team) -> None:
    """Sets a tag that UTF-8 cannot encode."""
    (await first(team).act(task.prompt, anchor="\ud83d")).reward(1.0)


@odd(FAILED, "at most 64 bits")
async def tag_is_huge(task: Task, team: Team) -> None:
    """Sets a tag whose digits Python refuses to write."""
    (await first(team).act(task.prompt, count=10**5000)).reward(1.0)


@odd(FAILED, "must be a finite number")
async def figure_is_infinite(task: Task, team: Team) -> None:
    """Reports an infinite figure."""
    await answer(task, team)
    team.report(success=float("inf"))


@odd(FAILED, "the metric 'success' must be a finite number, got 'high'")
async def figure_is_text(task: Task, team: Team) -> None:
    """Reports a text."""
    await answer(task, team)
    team.report(success="high")  # type: ignore[arg-type]


@odd(FAILED, "no name that UTF-8 can encode")
async def figure_without_name(task: Task, team: Team) -> None:
    """Reports a figure whose name UTF-8 cannot encode."""
    await answer(task, team)
    team.report(**{"\ud83d": 1.0})


@odd(FAILED, "was given NoneType; give it a text")
async def observation_is_no_text(task: Task, team: Team) -> None:
    """Gives an agent None as its observation."""
    await first(team).act(None)  # type: ignore[arg-type]


@odd(FAILED, "was given Reply; give it its `.text`")
async def observation_is_a_reply(task: Task, team: Team) -> None:
    """Gives an agent another one's reply, not the text of it."""
    await first(team).act(await first(team).act(task.prompt))  # type: ignore[arg-type]


@odd(FAILED)
async def observation_is_half_a_letter(task: Task, team: Team) -> None:
    """Gives an agent an observation that no tokenizer takes."""
    await first(team).act("\ud83d")


@odd(FAILED, "broke its team")
async def breaks_its_team(task: Task, team: Team) -> None:
    """Overwrites a private attribute of its team."""
    await answer(task, team)
    team._ledger = None  # type: ignore[assignment]


@odd(FINISHED)
async def many_acts(task: Task, team: Team) -> None:
    """Starts fifty calls together."""
    await asyncio.gather(*(first(team).act(f"{number}") for number in range(50)))
    team.reward(1.0)


# Workflows that end late, or never.


@odd(TIMED_OUT, "took longer than rollout.episode_timeout_s")
async def endless(task: Task, team: Team) -> None:
    """Waits for a future that nobody completes."""
    await first(team).act(task.prompt)
    await asyncio.get_running_loop().create_future()


@odd(TIMED_OUT, "took longer than rollout.episode_timeout_s")
async def finishes_late(task: Task, team: Team) -> None:
    """Ends normally, after its time is over."""
    await answer(task, team)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(LONG_S)


@odd(TIMED_OUT, "given up")
async def swallows_cancellation(task: Task, team: Team) -> None:
    """Swallows every cancellation."""
    await first(team).act(task.prompt)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG_S)


@odd(TIMED_OUT, "given up")
async def swallows_everything(task: Task, team: Team) -> None:
    """Swallows every exception, and makes calls without end."""
    while True:
        with contextlib.suppress(BaseException):
            await first(team).act(task.prompt)


@odd(TIMED_OUT, "given up")
async def swallows_in_parallel(task: Task, team: Team) -> None:
    """Swallows every cancellation, in tasks that it waits for."""
    await asyncio.gather(*(swallows_cancellation(task, team) for _ in range(3)))


@odd(TIMED_OUT, "given up")
async def cleans_up_for_ever(task: Task, team: Team) -> None:
    """Waits in a `finally` block, as for a server."""
    try:
        await asyncio.sleep(LONG_S)
    finally:
        await asyncio.sleep(LONG_S)


@odd(TIMED_OUT, "given up", virtual=False)
async def spins(task: Task, team: Team) -> None:
    """Swallows every exception, and never waits."""
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(0)


# Workflows that leave something behind.


@odd(FINISHED)
async def leaves_a_call(task: Task, team: Team) -> None:
    """Leaves a call in progress that nobody awaits."""
    await answer(task, team)
    _left(first(team).act(task.prompt))
    await asyncio.sleep(0)


@odd(FINISHED)
async def leaves_a_caller(task: Task, team: Team) -> None:
    """Leaves a task that swallows every exception and makes calls without end."""
    await answer(task, team)
    _left(swallows_everything(task, team))


@odd(FINISHED)
async def leaves_a_swallower(task: Task, team: Team) -> None:
    """Leaves a task that swallows every cancellation."""
    await answer(task, team)
    _left(swallows_cancellation(task, team))


@odd(FINISHED)
async def leaves_a_failure(task: Task, team: Team) -> None:
    """Leaves a task that calls `sys.exit`, and that nobody awaits."""

    async def leave() -> None:
        sys.exit("left behind")

    _left(leave())
    await answer(task, team)


@odd(FINISHED)
async def leaves_an_argument(task: Task, team: Team) -> None:
    """Leaves a task that gives rewards when the episode is over."""

    async def late() -> None:
        await asyncio.sleep(0.5)
        team.reward(1e6)
        team.report(success=-1.0)

    await answer(task, team)
    _left(late())


@odd(FINISHED, virtual=False)
async def leaves_a_thread(task: Task, team: Team) -> None:
    """Leaves a thread that waits without end, like a request without a time limit."""
    await answer(task, team)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.to_thread(threading.Event().wait)


@odd(TIMED_OUT, "took longer than rollout.episode_timeout_s", virtual=False)
async def waits_for_a_thread(task: Task, team: Team) -> None:
    """Awaits a thread that waits without end."""
    await asyncio.get_running_loop().run_in_executor(None, functools.partial(threading.Event().wait))


_LEFT: set["asyncio.Task[object]"] = set()


def _left(awaited: Awaitable[object]) -> None:
    """Starts a task that nobody awaits. `_LEFT` keeps it, as a user would, or it would be garbage collected."""
    task = asyncio.ensure_future(awaited)
    _LEFT.add(task)
    task.add_done_callback(_forget)


def _forget(task: "asyncio.Task[object]") -> None:
    _LEFT.discard(task)
    if not task.cancelled():
        task.exception()  # Reading the exception keeps asyncio from printing that nobody did.
