"""Groups side by side, episodes side by side, each bounded; asserted on virtual times."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import StoreError
from flexmarl.events.group_events import EpisodeFailed, EpisodeFinished, GroupRetried
from flexmarl.events.journal import RememberedEvents
from flexmarl.records import Episode, EpisodeId, EpisodeStatus, GroupId, GroupRecord, GroupState
from flexmarl.rollout.admission import Admission, AdmissionLaw
from flexmarl.rollout.rollout import Rollout
from flexmarl.rollout.settings import RolloutSettings
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.rollout.plays import TASK, now


class TimedPlayer:
    """Every episode takes a second, or what `lasts` says; `fails` says which ones fail."""

    def __init__(self, *, lasts=lambda group, index: 1.0, fails=lambda group, index: False):
        self.lasts, self.fails = lasts, fails
        self.playing: dict[int, int] = {}
        self.most_groups = self.most_episodes = 0
        self.played: list[str] = []

    async def play(self, group, index, **rest):
        self.playing[group.group] = self.playing.get(group.group, 0) + 1
        self.most_groups = max(self.most_groups, len(self.playing))
        self.most_episodes = max(self.most_episodes, *self.playing.values())
        await asyncio.sleep(self.lasts(group, index))
        self.playing[group.group] -= 1
        if not self.playing[group.group]:
            del self.playing[group.group]
        name = f"g{group.group}e{index}a{group.attempt}"
        self.played.append(name)
        failed = self.fails(group, index)
        return Episode(
            episode=EpisodeId(name),
            group=group.group,
            task=group.task.input_id,
            status=EpisodeStatus.FAILED if failed else EpisodeStatus.FINISHED,
            reason=f"{name} broke" if failed else "",
        )


class Stage:
    """A rollout of `groups` groups, and what came out of it."""

    def __init__(self, player, *, groups=4, episodes=2, emit_s=0.0, **sizes):
        self.admission = Admission(AdmissionLaw(groups=groups, lag=0, window=1))
        self.events = RememberedEvents(now)
        self.player, self.groups, self.emit_s = player, groups, emit_s
        self.emitted: list[tuple[float, GroupRecord]] = []
        self.admitted_at: list[float] = []
        self.rollout = Rollout(
            player=player,
            admission=self.admission,
            settings=RolloutSettings(**sizes),
            episodes=episodes,
            events=self.events,
        )

    async def feed(self) -> AsyncIterator[GroupRecord]:
        for _ in range(self.groups):
            self.admitted_at.append(now())
            yield GroupRecord(group=self.admission.admit(), task=TASK, step=0)

    async def emit(self, group: GroupRecord) -> None:
        await asyncio.sleep(self.emit_s)
        self.emitted.append((now(), group))

    def play(self) -> float:
        async def run():
            await self.rollout.play(self.feed(), self.emit)
            return now()

        return run_virtual(run())


@given(
    groups=st.integers(1, 7), episodes=st.integers(1, 7), inter_query=st.integers(1, 8), intra_query=st.integers(1, 8)
)
@settings(max_examples=40, deadline=None)
def test_as_many_episodes_play_at_once_as_are_allowed_and_no_more(groups, episodes, inter_query, intra_query):
    player = TimedPlayer()
    stage = Stage(player, groups=groups, episodes=episodes, inter_query=inter_query, intra_query=intra_query)
    assert stage.play() == math.ceil(groups / inter_query) * math.ceil(episodes / intra_query)
    assert player.most_groups == min(groups, inter_query)
    assert player.most_episodes == min(episodes, intra_query)
    assert sorted(player.played) == sorted(f"g{g}e{e}a0" for g in range(groups) for e in range(episodes))


def test_groups_come_out_in_the_order_they_finish_with_their_episodes_in_order():
    player = TimedPlayer(lasts=lambda group, index: 10.0 - 2 * group.group - index)
    stage = Stage(player, groups=3, episodes=2)
    assert stage.play() == 10.0
    assert [(at, group.group) for at, group in stage.emitted] == [(6.0, 2), (8.0, 1), (10.0, 0)]
    for _, group in stage.emitted:
        assert [episode.episode for episode in group.episodes] == [f"g{group.group}e{i}a0" for i in range(2)]
        assert stage.admission.state(group.group) is GroupState.DONE


def test_who_takes_groups_slowly_slows_new_groups_down():
    stage = Stage(TimedPlayer(), groups=4, episodes=1, inter_query=1, emit_s=9.0)
    assert stage.play() == 40.0
    assert [at for at, _ in stage.emitted] == [10.0, 20.0, 30.0, 40.0]
    assert stage.admitted_at == [0.0, 0.0, 10.0, 20.0]  # one waits for the slot; none is admitted behind it


def test_a_group_with_one_finished_episode_is_done():
    stage = Stage(TimedPlayer(fails=lambda group, index: index != 1), groups=1, episodes=3)
    stage.play()
    ((_, group),) = stage.emitted
    assert [episode.finished for episode in group.episodes] == [False, True, False]
    told = [(event.name, event.episode) for event in stage.events.all]
    assert told == [("episode_finished", "g0e1a0")], "the player emits a failed one"


def test_a_group_without_a_finished_episode_is_played_again_under_its_id():
    stage = Stage(TimedPlayer(fails=lambda group, index: group.attempt == 0), groups=1, episodes=2, group_retries=1)
    assert stage.play() == 2.0
    ((_, group),) = stage.emitted
    assert (group.group, group.attempt) == (0, 1)
    assert stage.player.played == ["g0e0a0", "g0e1a0", "g0e0a1", "g0e1a1"]
    (event,) = stage.events.of(GroupRetried)
    assert event.because == "attempt 1 of 2 had no finished episode; the last reason: g0e1a0 broke"


def test_a_group_that_fails_every_time_ends_as_failed_and_is_handed_on():
    stage = Stage(TimedPlayer(fails=lambda group, index: group.group == 1), groups=2, episodes=1, group_retries=2)
    assert stage.play() == 3.0
    assert [(group.group, group.attempt, len(group.finished)) for _, group in stage.emitted] == [(0, 0, 1), (1, 2, 0)]
    assert stage.admission.active == (0,)
    assert stage.admission.ended == {GroupState.FAILED: 1}
    ends = [event.name for event in stage.events.all if not isinstance(event, EpisodeFailed | EpisodeFinished)]
    assert ends == ["group_retried", "group_retried", "group_failed"]
    assert stage.events.all[-1].because == ("none of 3 attempts had a finished episode; the last reason: g1e0a2 broke")


def test_a_retry_waits_for_nobody():
    """The group keeps its query slot: behind it others would wait for a group that has to start again at the tail."""
    stage = Stage(
        TimedPlayer(fails=lambda group, index: group.group == 0 and group.attempt == 0),
        groups=3,
        episodes=1,
        inter_query=1,
    )
    stage.play()
    assert [(at, group.group) for at, group in stage.emitted] == [(2.0, 0), (3.0, 1), (4.0, 2)]


def test_an_error_of_one_group_ends_the_others():
    class Broken(TimedPlayer):
        async def play(self, group, index, **rest):
            if group.group == 1:
                await asyncio.sleep(0.5)
                raise StoreError("disk full")
            return await super().play(group, index, **rest)

    stage = Stage(Broken(lasts=lambda group, index: 1e6))
    with pytest.raises(ExceptionGroup) as raised:
        stage.play()
    assert raised.group_contains(StoreError, match="disk full")
    assert stage.emitted == []


def test_an_episode_that_ends_while_its_group_is_stopped_is_finished_in_all_places():
    """Its workflow had returned when the stop came, and it counts as played: so the journal has its end, too."""
    stage = Stage(TimedPlayer(lasts=lambda group, index: 1.0 + index), groups=1, episodes=2)

    async def run():
        playing = asyncio.create_task(stage.rollout.play(stage.feed(), stage.emit))
        await asyncio.sleep(1.5)
        assert stage.rollout.stop(GroupId(0), "the run's last step was done")
        await playing

    run_virtual(run())
    ((_, group),) = stage.emitted
    finished = [episode.episode for episode in group.episodes if episode.finished]
    assert len(finished) == 2
    assert [one.episode for one in stage.events.of(EpisodeFinished)] == finished
