"""Decides whether a request is new, and what became of each reply: delivered, on its way, or lost with its client.

| same body from this seat before? | is a retry | the earlier reply                        | then                   |
|----------------------------------|------------|------------------------------------------|------------------------|
| no                               |            |                                          | a new call             |
| yes                              | yes        | finished, delivered or not               | that reply again       |
| yes                              | any        | is sampled, and its client is gone       | the client joins it    |
| yes                              | no         | finished, never delivered                | that reply, once       |
| yes                              | no         | delivered, or sampled for one who waits  | a new call, other seed |

A reply is delivered when its last frame was handed to the transport and no disconnect had been seen. A request whose
client is gone is given up, unless another one joins it in time; asked again after that, it is a new call.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple


class ReplyState(StrEnum):
    """The state of a request's replies."""

    SAMPLING = "sampling"
    FINISHED = "finished"
    GIVEN_UP = "given up"
    """Its clients were gone before it was finished."""
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and its replies."""

    number: int
    key: str
    """Equal for equal bodies from one seat."""
    state: ReplyState = ReplyState.SAMPLING
    clients: int = 1
    """Clients that wait for it, or read it."""
    delivered: bool = False
    repeated: bool = False
    """True if it was given again to a client that did not say that it retries."""
    characters: int = 0
    """The most characters of it that were sent to one client."""


class Reception(NamedTuple):
    """The decision about a request."""

    exchange: Exchange
    how: Literal["new", "joins", "again"]
    because: str


class Deliveries:
    """The requests of one episode, of all its seats."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self._by_key: defaultdict[str, list[Exchange]] = defaultdict(list)

    def asked(self, key: str, *, retries: bool) -> Reception:
        """Decides what a request is, and counts its client."""
        earlier = self._by_key[key]
        gone = [one for one in earlier if one.state is ReplyState.SAMPLING and not one.clients]
        if gone:
            return self._given(gone[0], "joins", "it is sampled, and its client is gone")
        finished = [one for one in earlier if one.state is ReplyState.FINISHED]
        lost = [one for one in finished if not one.delivered and not one.clients]
        if retries and finished:
            return self._given((lost or finished)[-1], "again", "the client retries")
        waiting = [one for one in lost if not one.repeated]
        if waiting:
            waiting[0].repeated = True
            return self._given(waiting[0], "again", "it was never delivered")
        exchange = Exchange(len(self.exchanges), key)
        self.exchanges.append(exchange)
        earlier.append(exchange)
        return Reception(exchange, "new", "a parallel sample" if len(earlier) > 1 else "not asked before")

    def finished(self, exchange: Exchange) -> None:
        """Notes that all replies are sampled and stored."""
        exchange.state = ReplyState.FINISHED

    def failed(self, exchange: Exchange) -> None:
        """Notes that a reply could not be sampled."""
        exchange.state = ReplyState.FAILED

    def given_up(self, exchange: Exchange) -> None:
        """Notes that nobody waits for it any more."""
        exchange.state = ReplyState.GIVEN_UP

    def delivered(self, exchange: Exchange) -> bool:
        """Notes that a client has got all of it; returns True at the first time."""
        first, exchange.delivered = not exchange.delivered, True
        return first

    def left(self, exchange: Exchange, characters: int = 0) -> bool:
        """Notes that a client has gone, after so many characters; returns True if they are sampled for nobody."""
        exchange.clients -= 1
        exchange.characters = max(exchange.characters, characters)
        return not exchange.clients and exchange.state is ReplyState.SAMPLING

    def _given(self, exchange: Exchange, how: Literal["joins", "again"], because: str) -> Reception:
        exchange.clients += 1
        return Reception(exchange, how, because)
