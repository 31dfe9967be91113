"""Whole runs on three Ray nodes: the bits of one node, also if a node with engines is lost at a bad moment."""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.cluster.backends.mooncake import engine_class
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.events.group_events import EpisodeLost
from flexmarl.events.run_events import NodeLost, ObjectFetched, ProcessStarted, WorkerLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import InstanceReplaced
from flexmarl.records import WorkerId
from tests.ray.child_run import Child, Left, assert_same
from tests.ray.conftest import Nodes

pytestmark = pytest.mark.ray

STEPS, GROUPS = 5, 4
OVERRIDES = [
    *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", f"batch={{groups: {GROUPS}, episodes: 4}}"),
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 12}}",
    "policies.two={model: model, instances: 2, engine: {type: embedded, slots: 16, max_len: 64}, "
    "training: {micro_batch: 8, optimizer: {learning_rate: 3e-3}}}",
]
SPREAD = "cluster.pools={rollout: {nodes: [left, right]}, training: {nodes: [right]}}"
"""Nothing but the store's service is on the controller's node."""


@pytest.fixture(scope="module")
def undisturbed(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """The same run in one process."""
    out = tmp_path_factory.mktemp("inline")
    run = assemble_run(load_run(small_run, [*OVERRIDES, f"out={out}"]))
    run.train(Console(quiet=True))
    return Left(run.folder)


class Spread:
    """A run on three nodes, in a process of its own."""

    def __init__(self, config: Path, nodes: Nodes, folder: Path, temp: Path, *more: str) -> None:
        self._folder = folder
        where = ["cluster.backend=ray", f"cluster.address={nodes.address}", "cluster.node_timeout_s=6", SPREAD]
        self.child = Child("train", config, *OVERRIDES, *where, *more, f"out={folder}", cwd=folder, temp=temp)

    @property
    def run(self) -> Left:
        (path,) = self._folder.glob("sums-*")
        return Left(path)

    def wait_for(self, event: str, times: int) -> None:
        """Until the event was so often in the journal."""
        assert self.child.wait_for(lambda: self._count(event) >= times), self.child.stderr

    def wait_until_still(self, seconds: float) -> None:
        """Until for so long only the queues were counted: the run waits for someone who does not answer."""
        last = (-1, time.monotonic())

        def still() -> bool:
            nonlocal last
            if (written := self._count("") - self._count("queues")) != last[0]:
                last = written, time.monotonic()
            return time.monotonic() - last[1] > seconds

        assert self.child.wait_for(still), self.child.stderr

    def finish(self) -> Left:
        assert self.child.wait() == 0, self.child.stderr
        return self.run

    def _count(self, event: str) -> int:
        journals = [RunFolder(path).journal for path in self._folder.glob("sums-*")]
        return sum(path.read_text().count(f'"event":"{event}') for path in journals if path.exists())


@pytest.fixture
def begin(small_run: Path, tmp_path: Path, short_root: Path) -> Iterator[list[Spread]]:
    """Runs that a test has begun; what is left of them is ended."""
    begun: list[Spread] = []
    yield begun
    for spread in begun:
        spread.child.close()


def mooncake_is_missing() -> str:
    try:
        engine_class()
    except ConfigError as lacking:
        return str(lacking)
    return ""


WITH_MOONCAKE = pytest.mark.skipif(bool(mooncake_is_missing()), reason="not installed")


@pytest.mark.parametrize(
    "how",
    [
        "cluster.transport=ray",
        "objects.memory_gib=0",
        pytest.param("cluster.transport=mooncake", marks=WITH_MOONCAKE),
    ],
)
def test_a_team_on_three_nodes_ends_with_the_bits_of_one_process(
    how: str,
    undisturbed: Left,
    small_run: Path,
    shared_nodes: Nodes,
    tmp_path: Path,
    short_root: Path,
    begin: list[Spread],
) -> None:
    begin.append(Spread(small_run, shared_nodes, tmp_path, short_root, how))
    run = begin[0].finish()
    assert_same(undisturbed, run, steps=STEPS)
    places = {name: process["node"] for name, process in run.summary["processes"].items()}
    assert {places[name] for name in ("trainer/one", "trainer/two")} == {"right"}
    assert {places[f"engine/two/{number}"] for number in range(2)} == {"left", "right"}
    assert places["store/0"] == "head"
    fetched = [one.object for one in run.events(ObjectFetched) if one.node == "left"]
    assert {f"weights/two/{version}" for version in range(STEPS + 1)} <= {*fetched}
    assert len({*fetched}) == len(fetched), "once for each version"


@pytest.mark.parametrize(("event", "times"), [("call", 40), ("updated", 4)], ids=["mid-rollout", "mid-publication"])
def test_a_node_with_engines_is_lost_and_the_run_ends_with_the_same_bits(
    event: str,
    times: int,
    undisturbed: Left,
    small_run: Path,
    nodes: Nodes,
    tmp_path: Path,
    short_root: Path,
    begin: list[Spread],
) -> None:
    begin.append(Spread(small_run, nodes, tmp_path, short_root))
    begin[0].wait_for(event, times)
    nodes.kill("left")
    run = begin[0].finish()
    assert_same(undisturbed, run, steps=STEPS)
    assert [lost.node for lost in run.events(NodeLost)] == ["left"]
    assert {lost.node for lost in run.events(WorkerLost)} == {"left"}
    assert run.events(InstanceReplaced), "witness: an engine was on the node"
    afterwards = itertools.dropwhile(lambda event: not isinstance(event, NodeLost), run.journal)
    restarted = [event for event in afterwards if isinstance(event, ProcessStarted)]
    assert {(event.process.kind, event.node) for event in restarted} == {("engine", "right")}


def test_rollout_workers_on_other_nodes_are_killed_and_the_run_ends_with_the_same_bits(
    undisturbed: Left, small_run: Path, nodes: Nodes, tmp_path: Path, short_root: Path, begin: list[Spread]
) -> None:
    """A process that was asked for episodes, then a node: their episodes are played again from their first call."""
    begin.append(Spread(small_run, nodes, tmp_path, short_root, "rollout.workers=2"))
    begin[0].wait_for("call", 40)
    workers = {event.process: event for event in begin[0].run.events(ProcessStarted) if event.process.kind == "rollout"}
    assert {name: event.node for name, event in workers.items()} == {"rollout/0": "left", "rollout/1": "right"}
    left, right = (workers[WorkerId("rollout", number=number)].pid for number in range(2))
    os.kill(right, signal.SIGSTOP)  # Stopped first, so that it certainly owes episodes when it is killed.
    begin[0].wait_until_still(seconds=5)
    os.kill(right, signal.SIGKILL)
    begin[0].wait_for("updated", 4)
    os.kill(left, signal.SIGSTOP)
    begin[0].wait_until_still(seconds=5)
    nodes.kill("left")
    with suppress(ProcessLookupError):
        os.kill(left, signal.SIGKILL)
    run = begin[0].finish()
    assert_same(undisturbed, run, steps=STEPS)
    reasons = {replayed.because.split(":")[0] for replayed in run.events(EpisodeLost)}
    assert reasons == {"rollout/0", "rollout/1"}, "witness: both were playing"
    assert reasons <= {event.process for event in run.events(WorkerLost)}
