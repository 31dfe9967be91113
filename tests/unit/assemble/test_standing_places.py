"""Ranks that are started anew: on their node if they can, on another one if not, and no more often than that helps."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from flexmarl.assemble.standing import StandingPlace
from flexmarl.assemble.world import Processes
from flexmarl.cluster.interface import ResidentKind, ResidentPlace, ResidentSpec
from flexmarl.errors import ConfigError, TrainingError, WorkerError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import ProcessStarted
from flexmarl.records import WorkerId
from flexmarl.training.group import Rank

RANK = WorkerId.rank(0, 0)


class Cluster:
    """Nodes that have room, and errors of the next starts."""

    def __init__(self, nodes: set[str], *errors: Exception | None) -> None:
        self.events, self._nodes, self._errors = RememberedEvents(), nodes, list(errors)
        self.asked: list[str | None] = []

    def has_room(self, specs: list[ResidentSpec[Any]]) -> bool:
        return all(spec.node in self._nodes for spec in specs)

    async def spawn(self, specs: list[ResidentSpec[Any]]) -> list[Any]:
        (spec,) = specs
        self.asked.append(spec.node)
        if self._errors and (error := self._errors.pop(0)):
            raise error
        return [resident(spec.node or min(self._nodes))]


def resident(node: str) -> Any:
    async def stop() -> None:
        pass

    return SimpleNamespace(name=RANK, place=ResidentPlace(node=node, pid=7), remote=None, stop=stop)


def renewed(cluster: Cluster) -> list[str]:
    """The nodes on which ranks were started in place of one on `left`."""

    def specs() -> list[ResidentSpec[Rank]]:
        return [ResidentSpec(name=RANK, kind=ResidentKind.RANK, contract=Rank, make=lambda: Any)]

    place = StandingPlace(specs, Processes({RANK: ResidentPlace(node="left", pid=6)}))
    place.stand(cluster, [resident("left")])  # pyright: ignore[reportArgumentType]
    asyncio.run(place.renew("it died"))
    return [event.node for event in cluster.events.of(ProcessStarted)]


def test_they_stay_on_their_node_where_the_blocks_are() -> None:
    cluster = Cluster({"left", "ahead"})
    assert renewed(cluster) == ["left"]


def test_they_go_to_another_node_if_theirs_is_lost() -> None:
    assert renewed(Cluster({"right"})) == ["right"]


@pytest.mark.parametrize("error", [WorkerError("node 'left' is lost"), ConfigError("no room on left")])
def test_they_go_to_another_node_if_theirs_turns_out_to_be_lost(error: Exception) -> None:
    cluster = Cluster({"left", "right"}, error)
    assert renewed(cluster) == ["left"], "the first that has room"
    assert cluster.asked == ["left", None]


@pytest.mark.parametrize(
    ("errors", "starts"),
    [([WorkerError("lost again")] * 5, 3), ([WorkerError("lost"), ConfigError("no room for 1 more")], 2)],
)
def test_it_ends_with_the_last_reason_and_says_how_to_go_on(errors: list[Exception], starts: int) -> None:
    cluster = Cluster({"left", "right"}, *errors)
    with pytest.raises(TrainingError, match=r"(lost again|no room for 1 more); go on from the last checkpoint"):
        renewed(cluster)
    assert len(cluster.asked) == starts
