"""Training processes on nodes of a cluster: they go on when their node is lost, and end with the same bits."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexmarl.events.run_events import NodeLost, ProcessStarted, WorkerLost
from flexmarl.events.training_events import Swapped
from flexmarl.records import WorkerId
from tests.ray.child_run import Child, Left, assert_same, count_journalled
from tests.ray.conftest import OTHERS, Nodes

pytestmark = pytest.mark.ray

STEPS = 4
SMALL = [
    *("deterministic=true", "cluster.threads=1", "cluster.backend=ray", f"steps={STEPS}", "evaluate.tasks=0"),
    *("batch={groups: 3, episodes: 4}", "checkpoint={every: 2, keep: 9}"),
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 12}}",
]
POLICY = "{model: model, training: {micro_batch: 6, optimizer: {learning_rate: 3e-3}"
KINDS = {
    "ranks": [f"policies.{name}={POLICY}, ranks: 2}}}}" for name in ("one", "two")],
    "turns": [*(f"policies.{name}={POLICY}}}}}" for name in ("one", "two")), "process_groups.at_once=1"],
}
"""Two policies, each with a place of two ranks; or both in turn on a place of one."""
ON_NODES = [
    *("cluster.node_timeout_s=5", "cluster.pools={rollout: {nodes: [head]}, training: {nodes: [left, right]}}"),
    "process_groups.keep_updated=true",
]
COPIES = "process_groups.copies=2"


@pytest.fixture(scope="module")
def undisturbed(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Left]:
    """The same run on this machine alone, of a kind."""
    found: dict[str, Left] = {}

    def play(kind: str) -> Left:
        if kind not in found:
            out = tmp_path_factory.mktemp(kind)
            with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as temp:
                child = Child("train", small_run, *SMALL, *KINDS[kind], f"out={out}", cwd=out, temp=Path(temp))
                assert child.wait() == 0, child.stderr
                child.close()
            found[kind] = run_in(out)
        return found[kind]

    return play


def run_in(out: Path) -> Left:
    (path,) = out.glob("sums-*")
    return Left(path)


Begin = Callable[..., Child]
"""Begins a run of a kind, with more settings, on the nodes."""


@pytest.fixture
def begin(small_run: Path, nodes: Nodes, tmp_path: Path, short_root: Path) -> Iterator[Begin]:
    begun: list[Child] = []

    def begin(kind: str, *more: object) -> Child:
        where = [*ON_NODES, f"cluster.address={nodes.address}", f"out={tmp_path}"]
        child = Child("train", small_run, *SMALL, *KINDS[kind], *where, *more, cwd=tmp_path, temp=short_root)
        begun.append(child)
        return child

    yield begin
    for child in begun:
        child.close()


def node_of_a_rank(out: Path) -> str:
    """The node of the first place."""
    started = [event for event in run_in(out).events(ProcessStarted) if event.process == WorkerId.rank(0, 0)]
    return started[0].node


def wait_for(child: Child, out: Path, event: str, times: int) -> None:
    """Until the event was so often in the journal."""
    assert child.wait_for(lambda: count_journalled(event, out) >= times), child.stderr


def assert_places_are_whole(run: Left) -> None:
    """The ranks of a place are on one node, and none is on the controller's."""
    places: dict[int, set[str]] = {}
    for name, process in run.summary["processes"].items():
        if name.startswith("rank/"):
            places.setdefault(int(name.split("/")[1]), set()).add(process["node"])
    assert places
    assert all(len(nodes) == 1 and nodes < {*OTHERS} for nodes in places.values())


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_places_on_other_nodes_end_with_the_bits_of_one_machine(
    kind: str, begin: Begin, undisturbed: Callable[[str], Left], tmp_path: Path
) -> None:
    child = begin(kind)
    assert child.wait() == 0, child.stderr
    run = run_in(tmp_path)
    assert_same(undisturbed(kind), run, steps=STEPS)
    assert_places_are_whole(run)


@pytest.mark.parametrize(
    ("kind", "event", "times"),
    [
        pytest.param("ranks", "micro_batch", 3, id="accumulate"),
        pytest.param("turns", "swapped", 6, id="suspend", marks=pytest.mark.deep),
        pytest.param("ranks", "updated", 3, id="publish", marks=pytest.mark.deep),
        pytest.param("ranks", "micro_batch", 8, id="step", marks=pytest.mark.deep),
        pytest.param("turns", "swapped", 7, id="resume", marks=pytest.mark.deep),
        pytest.param("turns", "published", 4, id="between", marks=pytest.mark.deep),
    ],
)
def test_the_node_of_training_processes_is_lost_and_the_run_ends_with_the_same_bits(
    kind: str, event: str, times: int, begin: Begin, nodes: Nodes, undisturbed: Callable[[str], Left], tmp_path: Path
) -> None:
    child = begin(kind, COPIES)
    wait_for(child, tmp_path, event, times)
    lost = node_of_a_rank(tmp_path)
    nodes.kill(lost)
    assert child.wait() == 0, child.stderr
    child.wait_until_gone()
    run = run_in(tmp_path)
    assert_same(undisturbed(kind), run, steps=STEPS)
    assert [event.node for event in run.events(NodeLost)] == [lost]
    assert {event.node for event in run.events(WorkerLost)} == {lost}
    assert_places_are_whole(run)
    assert lost not in {one["node"] for name, one in run.summary["processes"].items() if name.startswith("rank/")}
    assert kind == "ranks" or run.events(Swapped), "witness: they took turns"


@pytest.mark.deep
def test_without_copies_elsewhere_the_error_says_so_and_resume_is_exact(
    begin: Begin, nodes: Nodes, undisturbed: Callable[[str], Left], tmp_path: Path
) -> None:
    child = begin("ranks")
    wait_for(child, tmp_path, "published", 6)
    nodes.kill(node_of_a_rank(tmp_path))
    assert child.wait() == 1
    assert "process_groups.copies=2" in child.stderr
    assert "--resume" in child.stderr
    child.wait_until_gone()
    nodes.restore()
    resumed = begin("ranks", "--resume", run_in(tmp_path).path)
    assert resumed.wait() == 0, resumed.stderr
    assert_same(undisturbed("ranks"), run_in(tmp_path), steps=STEPS)
