"""Runs the doors of a gateway: opens one for each episode that asks, and finds it by its key, or by its episode.

consumes     episodes that open their doors
waits for    nothing
produces     doors; the account of each when it is shut
unblocked by the end of the episode's block
"""

import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from flexmarl.agents.caller import AgentSpec
from flexmarl.agents.context import EpisodeContext
from flexmarl.agents.doors import Door
from flexmarl.agents.episode_log import Ledger
from flexmarl.events.event import Events
from flexmarl.events.group_events import EpisodeAccount
from flexmarl.gateway.account import Account
from flexmarl.gateway.dialects.base import Refused
from flexmarl.gateway.episode_door import EpisodeDoor, Runner, episode_ended
from flexmarl.gateway.settings import GatewaySettings
from flexmarl.records import AgentName, EpisodeId, PolicyName

REMEMBERED_KEYS = 4096
"""Keys of ended episodes that are answered with 410 instead of 401."""


def new_key() -> str:
    """128 random bits."""
    return secrets.token_hex(16)


class Driver(Protocol):
    """Begins and ends the episodes of a gateway that no run plays."""

    @property
    def admin_key(self) -> str:
        """The key for all of its episodes."""
        ...

    async def begin(self, task: Mapping[str, Any] | int | None) -> Mapping[str, Any]:
        """Begins an episode on a task of one's own, a training task by its position, or the next one.

        Returns its addresses, keys and task. Raises Refused.
        """
        ...

    async def end(self, episode: EpisodeId) -> None:
        """Ends an episode, if it is open. It is over when this returns."""
        ...

    def ending(self, episode: EpisodeId) -> Mapping[str, Any]:
        """How an episode ended; empty if it has not."""
        ...


class Sessions:
    """All doors of a gateway, by key. It opens them for the episodes of its process."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        url: str,
        limits: Mapping[PolicyName, int],
        events: Events | None = None,
        runners: Mapping[str, Runner] | None = None,
        new_key: Callable[[], str] = new_key,
        kind: type[EpisodeDoor] = EpisodeDoor,
    ) -> None:
        """`url`: where the gateway listens. `limits`: most tokens of prompt and reply together, by policy.

        `runners`: runs agents, by their kind.
        """
        self.settings, self.url = settings, url
        self._limits, self._events, self._runners, self._new_key = limits, events, runners or {}, new_key
        self._kind = kind
        self.driver: Driver | None = None
        """Begins episodes that are asked for over HTTP; None: a run plays them."""
        self._doors: dict[str, EpisodeDoor] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED_KEYS)
        self._episodes: dict[EpisodeId, EpisodeDoor] = {}
        self._shut: dict[EpisodeId, tuple[str, dict[str, Any]]] = {}
        """Reward key and account of episodes that have ended, as many as keys are remembered."""

    @asynccontextmanager
    async def open(
        self, agents: Mapping[AgentName, AgentSpec], context: EpisodeContext, ledger: Ledger
    ) -> AsyncIterator[Door]:
        """Opens a door for an episode."""
        door = self._kind(
            self.settings,
            agents,
            context,
            ledger,
            key=self._new_key(),
            url=self.url,
            limits=self._limits,
            runners=self._runners,
            reward_key=self._new_key(),
        )
        door.closed = partial(self._account_closed, door, context)
        self._doors[door.key] = self._episodes[context.episode] = door
        try:
            async with door.opened():
                yield door
        finally:
            del self._doors[door.key]
            if self._episodes.get(context.episode) is door:
                del self._episodes[context.episode]
            self._ended.append(door.key)
            self._remember(door, context)

    def _account_closed(self, door: EpisodeDoor, context: EpisodeContext) -> None:
        self._remember(door, context)
        if self._events is not None:
            self._events.emit(account_event(door.account, context))

    def _remember(self, door: EpisodeDoor, context: EpisodeContext) -> None:
        self._shut[context.episode] = door.reward_key, door.shown()
        while len(self._shut) > REMEMBERED_KEYS:
            del self._shut[next(iter(self._shut))]

    def door(self, key: str) -> EpisodeDoor:
        """The open door of a key. Raises Refused with 410 for one that was shut, with 401 for any other."""
        if door := self._doors.get(key):
            return door
        if key in self._ended:
            raise episode_ended()
        raise Refused("there is no episode of this key", status=401, code="unknown_key")

    def episode(self, episode: EpisodeId) -> EpisodeDoor:
        """The open door of an episode. Raises Refused with 410 if it is shut, or never was open."""
        if episode not in self._episodes:
            raise episode_ended()
        return self._episodes[episode]

    def reward_key(self, episode: EpisodeId) -> str:
        """The reward key of an episode whose door is open or was; empty if there is none."""
        if door := self._episodes.get(episode):
            return door.reward_key
        return self._shut[episode][0] if episode in self._shut else ""

    def shown(self, episode: EpisodeId) -> dict[str, Any]:
        """The account of an episode's last door as JSON. Raises Refused with 410 if it has never been open."""
        if episode in self._shut and episode not in self._episodes:
            return self._shut[episode][1]
        return self.episode(episode).shown()


def account_event(account: Account, context: EpisodeContext) -> EpisodeAccount:
    """The event of an episode's account."""
    return EpisodeAccount(
        group=context.group,
        episode=context.episode,
        calls=len(account.rows),
        sampled=sum(account.sampled.values()),
        delivered=account.tokens("delivered"),
        undelivered=account.undelivered,
        failed=account.failed,
        continuity=dict(account.continuity),
        why=dict(account.why),
        retokenised=account.retokenised,
        asks=dict(account.asks),
        purpose=context.purpose,
    )
