"""The greedy play of a group: a baseline that is played beside the episodes and is none of them."""

import asyncio

import pytest

from flexmarl.agents import Team
from flexmarl.errors import EpisodeError
from flexmarl.events.journal import RememberedEvents
from flexmarl.records import (
    EpisodeStatus,
    GenerationRequest,
    GroupRecord,
    GroupState,
    PolicyName,
    Purpose,
    SampleId,
    Task,
)
from flexmarl.rollout.admission import Admission, AdmissionLaw
from flexmarl.rollout.rollout import Rollout
from flexmarl.rollout.settings import RolloutSettings
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.rollout.plays import GROUP, TASK, new_store, now, player, rows

pytestmark = pytest.mark.usefixtures("played_everywhere")

GREEDY = "the greedy play: others are compared with it"


async def solve(task: Task, team: Team) -> None:
    answer = await team.solver.act(task.prompt)
    answer.reward(task.score(answer.text))


def rolled_out(workflow=solve, script=lambda prompt, request: "7", *, greedy_s=1.0, stop_at=None, **settings):
    """(the group as it was emitted, finished episodes emitted before it, requests, admission, seconds)."""
    delay_s = lambda request: 1.0 if request.sampling.temperature else greedy_s  # noqa: E731
    one, model = player(workflow, script, delay_s=delay_s, timeout_s=200.0)
    admission = Admission(AdmissionLaw(groups=1, lag=0, window=1))
    groups: list[GroupRecord] = []
    early: list[str] = []

    async def feed():
        yield GroupRecord(group=admission.admit(), task=TASK, step=0)

    async def emit(group):
        groups.append(group)

    async def emit_episode(group, episode):
        early.append(episode.episode)

    async def run():
        rollout = Rollout(
            player=one,
            admission=admission,
            settings=RolloutSettings(**settings),
            episodes=2,
            events=RememberedEvents(now),
            policies=(PolicyName("solver"), PolicyName("verifier")),
            greedy=True,
        )
        if stop_at:
            asyncio.get_running_loop().call_later(stop_at, rollout.stop, GROUP.group, "it was late")
        await rollout.play(feed(), emit, emit_episode)
        return now()

    took = run_virtual(run())
    return groups[0], early, model.requests, admission, took


def test_it_is_played_at_temperature_0_and_its_turns_say_so() -> None:
    group, _, requests, _, _ = rolled_out()
    assert group.greedy is not None
    assert group.greedy.finished
    temperatures = {request.request_id: request.sampling.temperature for request in requests}
    assert temperatures == {"sum-1_0_g0e0a0": 1.0, "sum-1_0_g0e1a0": 1.0, "sum-1_0_g0e2a0": 0.0}
    assert [turn.purpose for turn in group.greedy.turns] == [Purpose.GREEDY]
    assert {turn.purpose for episode in group.episodes for turn in episode.turns} == {Purpose.TRAINING}


@pytest.mark.parametrize("order", ["free", "lockstep"])
def test_it_is_none_of_the_episodes(order: str) -> None:
    group, early, _, admission, took = rolled_out(order=order)
    assert [episode.episode for episode in group.episodes] == sorted(early) == ["g0e0a0", "g0e1a0"]
    assert group.finished == group.episodes
    assert group.plays == (*group.episodes, group.greedy)
    assert admission.state(group.group) is GroupState.DONE
    assert took == 1.0


def test_in_lockstep_no_round_waits_for_it() -> None:
    answered: dict[str, float] = {}

    def note(prompt: str, request: GenerationRequest) -> str:
        answered[request.request_id] = now()
        return "7"

    async def twice(task: Task, team: Team) -> None:
        await team.solver.act(task.prompt)
        await team.verifier.act(task.prompt)
        team.reward(1.0)

    rolled_out(twice, note, greedy_s=50.0, order="lockstep")
    assert answered["sum-1_1_g0e0a0"] == answered["sum-1_1_g0e1a0"] == 2.0
    assert answered["sum-1_1_g0e2a0"] == 100.0


def test_it_takes_a_trajectory_slot_like_any_other() -> None:
    assert rolled_out(intra_query=3)[-1] == 1.0
    assert rolled_out(intra_query=2)[-1] == 2.0


def test_its_rows_have_their_reward_and_are_filtered_at_its_end() -> None:
    async def scenario() -> None:
        store = new_store()
        await player(solve, store=store)[0].play(GROUP, 2, greedy=True)
        assert await rows(store) == {"sum-1_0_g0e2a0": ("filtered", 1.0, True)}
        (row,) = await store.get([SampleId("sum-1_0_g0e2a0")])
        assert row.reason == GREEDY

    run_virtual(scenario())


def test_its_rows_fail_if_it_fails() -> None:
    async def broken(task: Task, team: Team) -> None:
        await team.solver.act(task.prompt)
        raise EpisodeError("the environment is gone")

    async def scenario() -> None:
        store = new_store()
        episode = await player(broken, store=store)[0].play(GROUP, 2, greedy=True)
        assert episode.status is EpisodeStatus.FAILED
        assert await rows(store) == {"sum-1_0_g0e2a0": ("failed", None, True)}

    run_virtual(scenario())


def test_a_group_of_which_it_alone_finished_is_played_again() -> None:
    async def only_greedy(task: Task, team: Team) -> None:
        answer = await team.solver.act(task.prompt)
        if "7" not in answer.text:
            raise EpisodeError("no answer")
        answer.reward(1.0)

    script = lambda prompt, request: "7" if request.sampling.temperature == 0 else "no"  # noqa: E731
    group, _, requests, admission, _ = rolled_out(only_greedy, script, group_retries=1)
    assert admission.ended == {GroupState.FAILED: 1}
    assert group.finished == ()
    assert [request.request_id for request in requests if request.sampling.temperature == 0] == [
        "sum-1_0_g0e2a0",
        "sum-1_0_g0e2a1",
    ]


def test_a_workflow_that_tags_a_turn_as_greedy_makes_no_greedy_play_of_it() -> None:
    async def cheat(task: Task, team: Team) -> None:
        (await team.solver.act(task.prompt, greedy=True, purpose="greedy")).reward(1.0)

    (turn,) = run_virtual(player(cheat)[0].play(GROUP, 0)).turns
    assert (turn.purpose, turn.tags) == (Purpose.TRAINING, {"greedy": True, "purpose": "greedy"})


def test_it_ends_when_its_group_is_stopped() -> None:
    group, _, _, _, took = rolled_out(greedy_s=50.0, stop_at=10.0)
    assert group.greedy is not None
    assert (group.greedy.status, group.greedy.reason, took) == (EpisodeStatus.TIMED_OUT, "it was late", 10.0)
    assert len(group.finished) == 2
