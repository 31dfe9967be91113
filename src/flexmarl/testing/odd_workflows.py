"""Workflows that misbehave, one per kind of oddness, each in 1 of 7 episodes; the others answer and are rewarded.

    run = ScriptedRun(odd_workflow("sys_exit"), steps=2, batch={"groups": 4, "episodes": 4}).play()

Whatever a workflow does, its run goes on to its end, every group ends, and the odd episode alone is lost.
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
"""One of so many episodes is odd."""
LONG_S = 1e6
Play = Callable[[Task, Team], Any]


@dataclass(frozen=True, slots=True)
class Oddity:
    """One kind of oddness."""

    play: Play
    ends: EpisodeStatus
    """What its episode comes to."""
    because: str = ""
    """Words of its reason."""
    virtual: bool = True
    """False: it needs threads, or never lets time pass, and so cannot be played in virtual time."""


ODDITIES: dict[str, Oddity] = {}
"""By name."""


def odd(ends: EpisodeStatus, because: str = "", *, virtual: bool = True) -> Callable[[Play], Play]:
    """Decorator that enters a workflow into the table, by its name."""

    def enter(play: Play) -> Play:
        ODDITIES[play.__name__] = Oddity(play, ends, because, virtual)
        return play

    return enter


def odd_workflow(*kinds: str, episodes: int = 4) -> Workflow:
    """A workflow of which every 7th episode is odd, of these kinds in turn; `episodes` is the size of a group."""

    async def play(task: Task, team: Team) -> None:
        kind = kind_of(team.context.trajectory_id, kinds, episodes)
        if kind is None:
            await answer(task, team)
        else:
            await ODDITIES[kind].play(task, team)

    return play


def kind_of(trajectory_id: str, kinds: Sequence[str], episodes: int) -> str | None:
    """The oddness of an episode; None if it plays well. One that is played again is as odd as it was."""
    group, index, _ = split_trajectory_id(trajectory_id)
    turn, rest = divmod(group * episodes + index, EVERY)
    return None if rest else kinds[turn % len(kinds)]


async def answer(task: Task, team: Team) -> None:
    """What a workflow should do: every agent answers, and is rewarded."""
    for seat in team:
        (await seat.act(task.prompt)).reward(team.rng.random())


def first(team: Team) -> Seat:
    """The seat that speaks first."""
    return next(iter(team))


class OddBaseException(BaseException):
    """What `except Exception` does not catch."""


class Wordless(Exception):
    """It has no text."""

    def __str__(self) -> str:
        raise SystemExit("no text")


# What it raises.


@odd(FAILED, "ValueError: odd")
async def raises(task: Task, team: Team) -> None:
    """An ordinary error, after an answer."""
    await answer(task, team)
    raise ValueError("odd")


@odd(FAILED, "OddBaseException: odd")
async def base_exception(task: Task, team: Team) -> None:
    """A BaseException of its own."""
    raise OddBaseException("odd")


@odd(FAILED, "sys.exit('odd')")
async def sys_exit(task: Task, team: Team) -> None:
    """A script that was made a workflow."""
    await first(team).act(task.prompt)
    sys.exit("odd")


@odd(FAILED, "sys.exit(3)")
async def sys_exit_in_a_task(task: Task, team: Team) -> None:
    """The same, in a task of a TaskGroup."""

    async def leave() -> None:
        sys.exit(3)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(first(team).act(task.prompt))
        tasks.create_task(leave())


@odd(FAILED, "GeneratorExit")
async def generator_exit(task: Task, team: Team) -> None:
    """What closes a coroutine."""
    raise GeneratorExit("odd")


@odd(FAILED, "StopIteration")
async def stop_iteration(task: Task, team: Team) -> None:
    """`next` of nothing."""
    next(iter(()))


@odd(FAILED, "TimeoutError: odd")
async def timeout_error(task: Task, team: Team) -> None:
    """One of its own: the episode's time is not over."""
    raise TimeoutError("odd")


@odd(FAILED, "__str__ raised SystemExit")
async def error_without_text(task: Task, team: Team) -> None:
    """An exception whose text is an exception."""
    raise Wordless


@odd(FAILED, "\\ud83d\\x00\\x1b[2J")
async def unwritable_error(task: Task, team: Team) -> None:
    """A text that no file, database or terminal should be given."""
    await first(team).act(task.prompt)
    raise RuntimeError("\ud83d\0\x1b[2J")


@odd(FAILED, "characters)")
async def huge_error(task: Task, team: Team) -> None:
    """The whole answer of a server, say."""
    await first(team).act(task.prompt)
    raise RuntimeError("x" * 10_000_000)


@odd(FAILED, "ValueError: odd")
async def deep_group(task: Task, team: Team) -> None:
    """Exception groups in exception groups, deeper than Python recurses."""
    error: Exception = ValueError("odd")
    for _ in range(3000):
        nested: list[Exception] = [error]
        error = ExceptionGroup("", nested)
    raise error


@odd(FAILED, "RecursionError")
async def recursion(task: Task, team: Team) -> None:
    """A function that calls itself."""

    def again() -> None:
        again()

    again()


@odd(FAILED, "its own")
async def somebody_elses_error(task: Task, team: Team) -> None:
    """An error of ours that would end the run, if the store had raised it."""
    raise StoreError("its own")


@odd(FAILED, "asyncio.run() cannot be called")
async def nested_loop(task: Task, team: Team) -> None:
    """Code that was written for a script."""
    waiting = asyncio.sleep(0)
    try:
        asyncio.run(waiting)
    finally:
        waiting.close()


@odd(FAILED, "TypeError")
def not_awaitable(task: Task, team: Team) -> None:
    """The `async` was forgotten."""
    team.reward(1.0)


# What it cancels.


@odd(FAILED, "a CancelledError left it")
async def cancelled_error(task: Task, team: Team) -> None:
    """Raised by hand."""
    await first(team).act(task.prompt)
    raise asyncio.CancelledError


@odd(FAILED, "a CancelledError left it")
async def cancels_itself(task: Task, team: Team) -> None:
    """Its own task."""
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await first(team).act(task.prompt)


@odd(FAILED, "a CancelledError left it")
async def awaits_what_it_cancelled(task: Task, team: Team) -> None:
    """The usual way to meet one."""
    acting = asyncio.create_task(first(team).act(task.prompt))
    await asyncio.sleep(0.01)
    acting.cancel()
    await acting


@odd(FAILED, "a CancelledError left it")
async def shared_task_is_cancelled(task: Task, team: Team) -> None:
    """Another episode's time limit cancels a task that several await."""
    shared = asyncio.create_task(asyncio.sleep(LONG_S))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(shared, 0.01)
    await shared


@odd(FAILED, "CancelledError")
async def cancelled_in_a_group(task: Task, team: Team) -> None:
    """A CancelledError in an exception group."""
    raise BaseExceptionGroup("odd", [asyncio.CancelledError()])


@odd(FINISHED)
async def timeout_inside(task: Task, team: Team) -> None:
    """A time limit of its own cuts a call; then it goes on."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await first(team).act(task.prompt)
    await answer(task, team)


# What it makes of calls, rewards, tags and figures.


@odd(FINISHED)
async def no_call(task: Task, team: Team) -> None:
    """It ends well and has asked nobody."""


@odd(FINISHED)
async def no_call_but_rewards(task: Task, team: Team) -> None:
    """The same, with rewards for nothing."""
    team.reward(1.0)
    team.report(success=1.0)


@odd(FAILED, "got no reward")
async def no_reward(task: Task, team: Team) -> None:
    """A call that nobody judged."""
    await first(team).act(task.prompt)


@odd(FAILED, "rewards of one part must add up to")
async def endless_reward(task: Task, team: Team) -> None:
    """Finite rewards whose sum is not."""
    await answer(task, team)
    for _ in range(2):
        team.reward(1.7e308)


@odd(FAILED)
async def reward_is_nan(task: Task, team: Team) -> None:
    """0 / 0 of numpy's."""
    (await first(team).act(task.prompt)).reward(float("nan"))


@odd(FAILED)
async def reward_is_text(task: Task, team: Team) -> None:
    """A score as a judge wrote it."""
    (await first(team).act(task.prompt)).reward("1")  # type: ignore[arg-type]


@odd(FAILED)
async def reward_is_huge(task: Task, team: Team) -> None:
    """An integer that no float holds."""
    (await first(team).act(task.prompt)).reward(10**400)


@odd(FAILED, "the tag 'score' must be a finite number, got nan")
async def tag_is_nan(task: Task, team: Team) -> None:
    """A tag that JSON has no word for."""
    (await first(team).act(task.prompt, score=float("nan"))).reward(1.0)


@odd(FAILED, "half a surrogate pair")
async def tag_is_half_a_letter(task: Task, team: Team) -> None:
    """A tag that UTF-8 has no bytes for."""
    (await first(team).act(task.prompt, anchor="\ud83d")).reward(1.0)


@odd(FAILED, "at most 64 bits")
async def tag_is_huge(task: Task, team: Team) -> None:
    """A tag whose digits Python refuses to write."""
    (await first(team).act(task.prompt, count=10**5000)).reward(1.0)


@odd(FAILED, "must be a finite number")
async def figure_is_infinite(task: Task, team: Team) -> None:
    """A figure that is none."""
    await answer(task, team)
    team.report(success=float("inf"))


@odd(FAILED, "no name that UTF-8 can encode")
async def figure_without_name(task: Task, team: Team) -> None:
    """A name that cannot be written."""
    await answer(task, team)
    team.report(**{"\ud83d": 1.0})


@odd(FAILED)
async def observation_is_no_text(task: Task, team: Team) -> None:
    """None, where an agent is to read."""
    await first(team).act(None)  # type: ignore[arg-type]


@odd(FAILED)
async def observation_is_half_a_letter(task: Task, team: Team) -> None:
    """What no tokenizer takes."""
    await first(team).act("\ud83d")


@odd(FAILED, "broke its team")
async def breaks_its_team(task: Task, team: Team) -> None:
    """It puts something of its own in the place of what is ours."""
    await answer(task, team)
    team._ledger = None  # type: ignore[assignment]


@odd(FINISHED)
async def many_acts(task: Task, team: Team) -> None:
    """Fifty calls started together."""
    await asyncio.gather(*(first(team).act(f"{number}") for number in range(50)))
    team.reward(1.0)


# When it ends.


@odd(TIMED_OUT, "took longer than rollout.episode_timeout_s")
async def endless(task: Task, team: Team) -> None:
    """It waits for what never comes."""
    await first(team).act(task.prompt)
    await asyncio.get_running_loop().create_future()


@odd(TIMED_OUT, "took longer than rollout.episode_timeout_s")
async def finishes_late(task: Task, team: Team) -> None:
    """Its time is over, and it ends as if it were not."""
    await answer(task, team)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(LONG_S)


@odd(TIMED_OUT, "given up")
async def swallows_cancellation(task: Task, team: Team) -> None:
    """It will not be told to end."""
    await first(team).act(task.prompt)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(LONG_S)


@odd(TIMED_OUT, "given up")
async def swallows_everything(task: Task, team: Team) -> None:
    """The same, with a call again and again."""
    while True:
        with contextlib.suppress(BaseException):
            await first(team).act(task.prompt)


@odd(TIMED_OUT, "given up")
async def swallows_in_parallel(task: Task, team: Team) -> None:
    """The same, in tasks that it waits for."""
    await asyncio.gather(*(swallows_cancellation(task, team) for _ in range(3)))


@odd(TIMED_OUT, "given up")
async def cleans_up_for_ever(task: Task, team: Team) -> None:
    """A `finally` block that waits for a server."""
    try:
        await asyncio.sleep(LONG_S)
    finally:
        await asyncio.sleep(LONG_S)


@odd(TIMED_OUT, "given up", virtual=False)
async def spins(task: Task, team: Team) -> None:
    """The same without a pause."""
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(0)


# What it leaves behind.


@odd(FINISHED)
async def leaves_a_call(task: Task, team: Team) -> None:
    """A call that nobody awaits is under way when the episode ends."""
    await answer(task, team)
    _left(first(team).act(task.prompt))
    await asyncio.sleep(0)


@odd(FINISHED)
async def leaves_a_caller(task: Task, team: Team) -> None:
    """A task that calls for ever, whatever it is told."""
    await answer(task, team)
    _left(swallows_everything(task, team))


@odd(FINISHED)
async def leaves_a_swallower(task: Task, team: Team) -> None:
    """A task that will not be told to end."""
    await answer(task, team)
    _left(swallows_cancellation(task, team))


@odd(FINISHED)
async def leaves_a_failure(task: Task, team: Team) -> None:
    """A task whose sys.exit() nobody awaits."""

    async def leave() -> None:
        sys.exit("left behind")

    _left(leave())
    await answer(task, team)


@odd(FINISHED)
async def leaves_an_argument(task: Task, team: Team) -> None:
    """Rewards that come when the episode is over."""

    async def late() -> None:
        await asyncio.sleep(0.5)
        team.reward(1e6)
        team.report(success=-1.0)

    await answer(task, team)
    _left(late())


@odd(FINISHED, virtual=False)
async def leaves_a_thread(task: Task, team: Team) -> None:
    """A thread that waits for ever, as a request without a time limit does."""
    await answer(task, team)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await asyncio.to_thread(threading.Event().wait)


@odd(TIMED_OUT, "took longer than rollout.episode_timeout_s", virtual=False)
async def waits_for_a_thread(task: Task, team: Team) -> None:
    """The same, awaited without a limit."""
    await asyncio.get_running_loop().run_in_executor(None, functools.partial(threading.Event().wait))


_LEFT: set["asyncio.Task[object]"] = set()


def _left(awaited: Awaitable[object]) -> None:
    """Begins a task and forgets it; kept here, as a user would, lest it be collected."""
    task = asyncio.ensure_future(awaited)
    _LEFT.add(task)
    task.add_done_callback(_forget)


def _forget(task: "asyncio.Task[object]") -> None:
    _LEFT.discard(task)
    if not task.cancelled():
        task.exception()  # Nobody else will ask: asyncio would say so on stderr.
