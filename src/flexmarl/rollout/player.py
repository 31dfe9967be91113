"""Runs one episode: the workflow on one task, with a time limit, into a record that never raises.

consumes    a group and the index of the episode in it
waits for   the workflow, and through it for engines and tools
produces    an Episode: finished, failed or timed out, failed ones with a reason
unblocked by the end of the workflow, the time limit, or a stop of its group
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from flexmarl.agents import EpisodeContext, Generate, NoRecorder, Team, TeamSpec
from flexmarl.agents.causality import traced
from flexmarl.errors import EpisodeError, FlexmarlError, StoreError, boundary
from flexmarl.experience.interface import ExperienceStore
from flexmarl.records import (
    Episode,
    EpisodeStatus,
    Generation,
    GenerationRequest,
    GroupRecord,
    PolicyName,
    RowState,
    make_trajectory_id,
)
from flexmarl.rollout.recorder import StoreRecorder
from flexmarl.rollout.time_limit import TimeLimit

Holds = Callable[[PolicyName], Awaitable[object] | None]
"""What a call of a policy has to wait for before it is sent; None: nothing."""


class Stop:
    """Ends the episodes of one group before their time: to each of them it is as if its time limit had come."""

    def __init__(self) -> None:
        self.because = ""
        """Why it was stopped; "": it was not."""
        self._limits: dict[asyncio.Timeout, None] = {}
        """In the order in which they came: a set's order would differ from run to run."""

    def now(self, because: str) -> None:
        """Stops what runs, and what would begin later."""
        self.because = because
        for limit in self._limits:
            self._expire(limit)

    @contextmanager
    def ends(self, limit: asyncio.Timeout) -> Iterator[None]:
        """For as long as the block lasts, a stop ends the timeout that is around it."""
        self._limits[limit] = None
        if self.because:
            self._expire(limit)
        try:
            yield
        finally:
            del self._limits[limit]

    def _expire(self, limit: asyncio.Timeout) -> None:
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())


class Player:
    """Plays episodes of one team; holds no state between them."""

    def __init__(
        self,
        *,
        team: TeamSpec,
        generate: Generate,
        run_seed: int,
        timeout_s: float,
        store: ExperienceStore | None = None,
        temperature: float | None = None,
        holds: Holds = lambda _: None,
    ) -> None:
        """`store` None records nowhere; `temperature` replaces the agents' own. Evaluation uses both.

        An episode's time limit stands still while a call of it is held.
        """
        self._team = team
        self._generate = generate
        self._run_seed = run_seed
        self._timeout_s = timeout_s
        self._store = store
        self._holds = holds
        self._sampling = {} if temperature is None else {"temperature": temperature}

    async def play(
        self,
        group: GroupRecord,
        index: int,
        *,
        stop: Stop | None = None,
        generate: Generate | None = None,
        greedy: bool = False,
    ) -> Episode:
        """Plays episode `index` of the group. Only the loss of the store, or cancellation, gets out.

        `generate` may stand between its calls and the engines. The rows of an episode that `stop` ends are EXPIRED;
        those of a `greedy` one, which is played at temperature 0 and tagged so, are FILTERED at its end.
        """
        stop = stop or Stop()
        recorder = StoreRecorder(self._store, tuple(self._team.agents)) if self._store is not None else None
        limit = TimeLimit(self._timeout_s)
        context = EpisodeContext(
            task=group.task,
            group=group.group,
            trajectory_id=make_trajectory_id(group.group, index, group.attempt),
            run_seed=self._run_seed,
            generate=self._held(generate or self._generate, limit),
            recorder=recorder or NoRecorder(),
            sampling={**self._sampling, "temperature": 0.0} if greedy else self._sampling,
            tags={"greedy": True} if greedy else {},
            trains=recorder is not None and not greedy,
            environment=self._team.environment,
        )
        team = self._team.seat(context)
        clock = asyncio.get_running_loop().time
        started = clock()
        status, reason = await self._run(team, context, stop, limit)
        episode = Episode(
            episode=context.episode,
            group=group.group,
            task=group.task.input_id,
            status=status,
            reason=reason,
            turns=team.turns,
            rewards=team.rewards(),
            call_rewards=team.call_rewards(),
            parts=team.parts(),
            signals=team.signals(),
            metrics=team.metrics,
            duration_s=clock() - started,
        )
        if recorder is not None:
            await recorder.finish(
                episode,
                ends=RowState.EXPIRED if stop.because else RowState.FAILED,
                untrained="the greedy play: others are compared with it" if greedy else "",
            )
        return episode

    @property
    def generate(self) -> Generate:
        """What the calls of its episodes go through."""
        return self._generate

    def _held(self, generate: Generate, limit: TimeLimit) -> Generate:
        async def send(request: GenerationRequest) -> Generation:
            held = self._holds(request.policy)
            if held is not None:
                with limit.stands_still():
                    await held
            return await generate(request)

        return send

    async def _run(
        self, team: Team, context: EpisodeContext, stop: Stop, limit: TimeLimit
    ) -> tuple[EpisodeStatus, str]:
        try:
            async with limit.timeout:
                doing = f"workflow on task {context.task.input_id}"
                with stop.ends(limit.timeout), boundary(EpisodeError, doing), traced():
                    await self._team.run(context.task, team)
        except TimeoutError:
            return (
                EpisodeStatus.TIMED_OUT,
                stop.because or f"took longer than rollout.episode_timeout_s={self._timeout_s:g}",
            )
        except StoreError:
            raise
        except FlexmarlError as error:
            return EpisodeStatus.FAILED, str(error)
        return self._judge(team)

    def _judge(self, team: Team) -> tuple[EpisodeStatus, str]:
        """A turn of a trained policy without a reward cannot be trained on, and 0.0 would be a lie."""
        rewards = team.rewards()
        for turn in team.turns:
            if turn.policy in self._team.trained and rewards[turn.sample_id] is None:
                return EpisodeStatus.FAILED, (
                    f"agent '{turn.agent}' got no reward for call {turn.sample_id}; the workflow must call "
                    f"`team.{turn.agent}.reward(x)` or `reply.reward(x)` before it returns"
                )
        return EpisodeStatus.FINISHED, ""
