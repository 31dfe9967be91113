"""Runs the doors of a gateway: opens one for each episode that asks, and finds it by its key.

consumes     episodes that open their doors
waits for    nothing
produces     doors; the account of each when it is shut
unblocked by the end of the episode's block
"""

import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from flexmarl.agents.caller import AgentSpec
from flexmarl.agents.context import EpisodeContext
from flexmarl.agents.doors import Door
from flexmarl.agents.episode_log import Ledger
from flexmarl.events.event import Events
from flexmarl.events.group_events import EpisodeAccount
from flexmarl.gateway.account import Account
from flexmarl.gateway.dialects.base import Refused
from flexmarl.gateway.episode_door import EpisodeDoor, Programs, episode_ended
from flexmarl.gateway.settings import GatewaySettings
from flexmarl.records import AgentName, PolicyName

REMEMBERED_KEYS = 4096
"""Keys of ended episodes that are answered with 410 instead of 401."""


def new_key() -> str:
    """128 random bits."""
    return secrets.token_hex(16)


class Sessions:
    """All doors of a gateway, by key. It opens them for the episodes of its process."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        url: str,
        limits: Mapping[PolicyName, int],
        events: Events | None = None,
        programs: Programs | None = None,
        new_key: Callable[[], str] = new_key,
        kind: type[EpisodeDoor] = EpisodeDoor,
    ) -> None:
        """`url`: where the gateway listens. `limits`: most tokens of prompt and reply together, by policy."""
        self.settings, self.url = settings, url
        self._limits, self._events, self._programs, self._new_key = limits, events, programs, new_key
        self._kind = kind
        self._doors: dict[str, EpisodeDoor] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED_KEYS)

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
            programs=self._programs,
        )
        self._doors[door.key] = door
        try:
            async with door.opened():
                yield door
        finally:
            del self._doors[door.key]
            self._ended.append(door.key)
            if self._events is not None:
                self._events.emit(account_event(door.account, context))

    def door(self, key: str) -> EpisodeDoor:
        """The open door of a key. Raises Refused with 410 for one that was shut, with 401 for any other."""
        if door := self._doors.get(key):
            return door
        if key in self._ended:
            raise episode_ended()
        raise Refused("there is no episode of this key", status=401, code="unknown_key")


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
