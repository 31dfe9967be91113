"""One episode: what the workflow does becomes a record, whatever it is."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl.errors import EpisodeError, StoreError
from flexmarl.events.event import Events
from flexmarl.events.group_events import EpisodeFailed
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.notices import EpisodeBroke, EpisodeWaits
from flexmarl.experience.turn_rows import turn_from_row
from flexmarl.records import EpisodeStatus, Failure, Purpose
from flexmarl.rollout.player import Stop
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.agents import check_turns
from tests.unit.rollout.plays import GROUP, new_store, now, player, rows

pytestmark = pytest.mark.usefixtures("played_everywhere")


async def solve_and_verify(task, team):
    answer = await team.solver.act(task.prompt)
    verdict = await team.verifier.act(answer.text)
    team.solver.reward(task.score(answer.text))
    verdict.reward(0.5)
    team.report(success=task.score(answer.text))


def test_a_finished_episode_has_its_turns_rewards_metrics_and_duration():
    async def scenario():
        store = new_store()
        one, _ = player(solve_and_verify, store=store)
        episode = await one.play(GROUP, 3)
        assert (episode.status, episode.reason, episode.episode) == (EpisodeStatus.FINISHED, "", "g0e3a0")
        assert (dict(episode.metrics), episode.duration_s) == ({"success": 1.0}, 2.0)
        assert dict(episode.rewards) == {"sum-1_0_g0e3a0": 1.0, "sum-1_1_g0e3a0": 0.5}
        turns = [turn_from_row(row) for row in await store.get([turn.sample_id for turn in episode.turns])]
        check_turns(turns)
        assert episode.turns == tuple(turn.without_tokens() for turn in turns), "its tokens are in the store alone"
        assert await rows(store) == {
            "sum-1_0_g0e3a0": ("open", 1.0, True),
            "sum-1_1_g0e3a0": ("open", 0.5, True),
        }

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("group", "greedy", "purpose"),
    [
        (GROUP, False, Purpose.TRAINING),
        (GROUP, True, Purpose.GREEDY),
        (replace(GROUP, purpose=Purpose.EVALUATION), False, Purpose.EVALUATION),
    ],
)
def test_the_team_and_every_request_know_why_the_episode_is_played(group, greedy, purpose):
    told = []

    async def look(task, team):
        told.append(team.context.purpose)
        await solve_and_verify(task, team)

    async def scenario():
        one, model = player(look, store=new_store())
        await one.play(group, 0, greedy=greedy)
        told.extend(request.purpose for request in model.requests)

    run_virtual(scenario())
    assert set(told) == {purpose}


async def broken(task, team):
    await team.solver.act(task.prompt)
    raise KeyError("answer")


async def broken_in_a_group(task, team):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(team.solver.act(task.prompt))
        tasks.create_task(broken(task, team))


async def forgetful(task, team):
    answer = await team.solver.act(task.prompt)
    await team.verifier.act(answer.text)
    team.solver.reward(1.0)


async def hasty(task, team):
    reply = team.solver.act(task.prompt)
    try:
        reply.reward(1.0)  # It is not there yet.
    finally:
        reply.close()


async def unawaited(task, team):
    team.verifier.act(task.prompt)
    (await team.solver.act(task.prompt)).reward(1.0)


async def alone_unawaited(task, team):
    made = team.solver.act(task.prompt)
    team.solver.reward(float(made is not None))


async def made_and_cancelled(task, team):
    """An act that was made and not run, but was not forgotten: a task that had it was cancelled."""
    asyncio.create_task(team.verifier.act(task.prompt)).cancel()
    (await team.solver.act(task.prompt)).reward(1.0)


async def endless(task, team):
    await team.solver.act(task.prompt)
    await asyncio.sleep(1e9)


async def not_a_number(task, team):
    (await team.solver.act(task.prompt)).reward(float("nan"))


async def too_much(task, team):
    answer = await team.solver.act(task.prompt)
    answer.reward(0.75e6)
    answer.reward(0.5e6)


async def far_too_much(task, team):
    await team.solver.act(task.prompt)
    team.reward(-1e300, part="style")


@pytest.mark.parametrize(
    ("workflow", "status", "reason"),
    [
        (
            too_much,
            EpisodeStatus.FAILED,
            "rewards of one part must add up to 1e+06 at most, either sign, got 500000.0 for 'outcome', 1250000.0 in",
        ),
        (
            far_too_much,
            EpisodeStatus.FAILED,
            "rewards of one part must add up to 1e+06 at most, either sign, got -1e+300",
        ),
        (broken, EpisodeStatus.FAILED, "workflow on task sum-1: KeyError: 'answer'"),
        (broken_in_a_group, EpisodeStatus.FAILED, "workflow on task sum-1: KeyError: 'answer'"),
        (forgetful, EpisodeStatus.FAILED, "agent 'verifier' got no reward for call sum-1_1_g0e0a0"),
        (endless, EpisodeStatus.TIMED_OUT, "took longer than rollout.episode_timeout_s=100"),
        (not_a_number, EpisodeStatus.FAILED, "a reward must be a finite number, got nan"),
    ],
)
def test_a_workflow_that_goes_wrong_is_a_record_with_its_reason(workflow, status, reason):
    async def scenario():
        store = new_store()
        episode = await player(workflow, store=store)[0].play(GROUP, 0)
        assert (episode.status, episode.finished) == (status, False)
        assert episode.reason.startswith(reason)
        found = await rows(store)
        assert found
        assert {(state, reward) for state, reward, _ in found.values()} == {("failed", None)}

    run_virtual(scenario())


def line_of(text: str) -> int:
    """Number of the line of this file that holds the text first."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


@pytest.mark.parametrize(
    ("workflow", "kind", "at", "text"),
    [
        (broken, "KeyError", 'raise KeyError("answer")', "'answer'"),
        (broken_in_a_group, "KeyError", 'raise KeyError("answer")', "'answer'"),
        (forgetful, "unrewarded", "", "agent 'verifier' got no reward for a call"),
        (
            unawaited,
            "never_awaited",
            "    team.verifier.act(task.prompt)",
            "the call `team.verifier.act(task.prompt)` was made and never awaited, so it did not run; write `await` "
            "before it",
        ),
        (
            alone_unawaited,
            "never_awaited",
            "made = team.solver.act(task.prompt)",
            "the call `made = team.solver.act(task.prompt)` was made and never awaited, so it did not run; write "
            "`await` before it",
        ),
        (endless, "timed_out", "await asyncio.sleep(1e9)", "took longer than rollout.episode_timeout_s=100"),
        (not_a_number, "EpisodeError", 'reward(float("nan"))', "a reward must be a finite number, got nan"),
        (
            hasty,
            "AttributeError",
            "It is not there yet",
            "'coroutine' object has no attribute 'reward': write `await` before the call that made it",
        ),
    ],
)
def test_a_failure_names_its_kind_and_the_line_of_the_users_code(workflow, kind, at, text):
    async def scenario():
        events, broke = RememberedEvents(now), []
        events.listen(EpisodeBroke, broke.append)
        episode = await player(workflow, events=events)[0].play(GROUP, 0)
        place = at and f"test_player.py:{line_of(at)}"
        assert episode.failure == Failure(kind=kind, text=text, place=place)
        (failed,) = events.of(EpisodeFailed)
        assert (failed.kind, failed.place, failed.text) == (kind, place, text)
        assert (failed.because, failed.purpose) == (episode.reason, Purpose.TRAINING)
        assert ("write `await`" in episode.reason) == (workflow in (hasty, unawaited, alone_unawaited))
        (one,) = broke
        assert (one.task, one.failure) == ("sum-1", episode.failure)
        assert (one.error is None) == (kind in ("unrewarded", "timed_out", "never_awaited"))

    run_virtual(scenario())


def test_an_act_that_was_cancelled_before_it_began_is_not_forgotten():
    async def scenario():
        episode = await player(made_and_cancelled)[0].play(GROUP, 0)
        assert (episode.finished, [turn.agent for turn in episode.turns]) == (True, ["solver"])

    run_virtual(scenario())


def test_what_an_error_was_raised_from_names_the_line():
    async def wrapped(task, team):
        try:
            await broken(task, team)
        except KeyError as error:
            raise ValueError("no answer") from error

    async def scenario():
        episode = await player(wrapped)[0].play(GROUP, 0)
        raised_at = f"test_player.py:{line_of('raise KeyError')}"
        assert episode.failure == Failure(kind="ValueError", text="no answer", place=raised_at)

    run_virtual(scenario())


def test_an_episode_that_was_stopped_is_in_no_event():
    async def scenario():
        events, stop = RememberedEvents(now), Stop()
        asyncio.get_running_loop().call_later(0.5, stop.now, "too slow")
        episode = await player(endless, events=events)[0].play(GROUP, 0, stop=stop)
        assert episode.failure is not None
        assert (episode.failure.kind, episode.failure.text, events.all) == ("stopped", "too slow", [])

    run_virtual(scenario())


def test_a_call_that_fails_fails_the_episode_and_is_no_turn():
    async def scenario():
        store = new_store()
        script = lambda prompt, request: "!no memory left" if "7" in prompt[-20:] else "7"  # noqa: E731
        episode = await player(solve_and_verify, script, store=store)[0].play(GROUP, 0)
        assert episode.status is EpisodeStatus.FAILED
        assert "call sum-1_1_g0e0a0 of agent 'verifier' failed: no memory left" in episode.reason
        assert [turn.agent for turn in episode.turns] == ["solver"]
        assert await rows(store) == {
            "sum-1_0_g0e0a0": ("failed", None, True),
            "sum-1_1_g0e0a0": ("failed", None, False),
        }

    run_virtual(scenario())


def test_a_frozen_agent_needs_no_reward():
    async def scenario():
        episode = await player(forgetful, frozen=True)[0].play(GROUP, 0)
        assert episode.finished
        assert list(episode.rewards.values()) == [1.0, None]

    run_virtual(scenario())


def test_the_time_limit_counts_from_the_start_of_the_episode():
    async def scenario():
        await asyncio.sleep(50)
        episode = await player(endless, timeout_s=7.5)[0].play(GROUP, 0)
        assert (episode.duration_s, now()) == (7.5, 57.5)

    run_virtual(scenario())


def test_a_workflow_may_set_time_limits_of_its_own():
    async def impatient(task, team):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await team.solver.act(task.prompt)
        (await team.verifier.act("again")).reward(1.0)

    async def scenario():
        store = new_store()
        episode = await player(impatient, store=store)[0].play(GROUP, 0)
        assert episode.finished
        assert await rows(store) == {
            "sum-1_0_g0e0a0": ("failed", None, False),
            "sum-1_1_g0e0a0": ("open", 1.0, True),
        }

    run_virtual(scenario())


def test_cancellation_passes_through():
    async def scenario():
        playing = asyncio.create_task(player(endless)[0].play(GROUP, 0))
        await asyncio.sleep(5)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    run_virtual(scenario())


@pytest.mark.parametrize("workflow", [solve_and_verify, broken_in_a_group])
def test_the_loss_of_the_store_passes_through(workflow):
    async def scenario():
        store = new_store()
        await store.close()
        with pytest.raises(StoreError, match="the experience store is closed"):
            await player(workflow, store=store)[0].play(GROUP, 0)

    run_virtual(scenario())


def test_evaluation_records_nowhere_and_replaces_every_agents_temperature():
    async def scenario():
        one, model = player(solve_and_verify, temperature=0.25)
        assert (await one.play(GROUP, 0)).finished
        assert [request.sampling.temperature for request in model.requests] == [0.25, 0.25]

    run_virtual(scenario())


def test_equal_episodes_make_equal_calls_and_others_do_not():
    async def scenario():
        one, model = player(solve_and_verify)
        for index in (0, 0, 1):
            await one.play(GROUP, index)
        first, again, other = (model.requests[i : i + 2] for i in (0, 2, 4))
        assert [r.seed for r in first] == [r.seed for r in again]
        assert not {r.seed for r in first} & {r.seed for r in other}

    run_virtual(scenario())


def test_a_call_that_a_workflow_left_behind_opens_no_row_after_the_episode():
    errors = []

    async def left_behind(team):
        await asyncio.sleep(10)
        try:
            await team.verifier.act("still there?")
        except EpisodeError as error:
            errors.append(str(error))

    left = []

    async def careless(task, team):
        left.append(asyncio.create_task(left_behind(team)))
        (await team.solver.act(task.prompt)).reward(1.0)

    async def scenario():
        store = new_store()
        episode = await player(careless, store=store)[0].play(GROUP, 0)
        await asyncio.gather(*left)
        assert episode.finished
        assert list(await rows(store)) == ["sum-1_0_g0e0a0"]
        assert errors == ["call sum-1_1_g0e0a0 came after the end of its episode; await every act in the workflow"]

    run_virtual(scenario())


@pytest.mark.parametrize(("delay_s", "told"), [(1.0, 2), (200.0, 0)])
def test_it_is_told_where_a_workflow_waits_that_has_no_call_under_way(delay_s, told):
    """A workflow that waits for 130 s: after a call of one second; or for a call that takes as long."""

    async def waiting(task, team):
        answer = await team.solver.act(task.prompt)
        if delay_s == 1.0:
            await asyncio.sleep(130)
        answer.reward(1.0)

    async def scenario():
        events, waits = Events(now), []
        events.listen(EpisodeWaits, waits.append)
        await player(waiting, delay_s=lambda request: delay_s, timeout_s=300, events=events)[0].play(GROUP, 0)
        place = f"test_player.py:{line_of('await asyncio.sleep(130)')}"
        assert [(one.task, one.place, one.timeout_s) for one in waits] == [("sum-1", place, 300)] * told
        assert [round(one.seconds) for one in waits] == [89, 119][:told]

    run_virtual(scenario())
