"""Whole runs on three Ray nodes: the bits of one node, also if a node with engines is lost at a bad moment."""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flexmarl import cli
from flexmarl.assemble.commands import assemble_run
from flexmarl.cluster.backends.mooncake import engine_class
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.events.run_events import Evaluated, NodeLost, ObjectFetched, ProcessStarted, WorkerLost
from flexmarl.events.serving_events import InstanceReplaced
from tests.ray.child_run import Child, Left, assert_same, count_journalled
from tests.ray.conftest import OTHERS, Nodes
from tests.ray.losses import agent_of

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
        assert self.child.wait_for(lambda: count_journalled(event, self._folder) >= times), self.child.stderr

    def finish(self) -> Left:
        assert self.child.wait() == 0, self.child.stderr
        return self.run


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


@pytest.fixture(scope="module")
def spread(small_run: Path, shared_nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    """A run on three nodes that has ended."""
    with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as temp:
        begun = Spread(small_run, shared_nodes, tmp_path_factory.mktemp("spread"), Path(temp))
        try:
            yield begun.finish()
        finally:
            begun.child.close()


def assert_spread(undisturbed: Left, run: Left) -> None:
    """It has the bits of one process, though engines and trainers were elsewhere than the controller."""
    assert_same(undisturbed, run, steps=STEPS)
    places = {name: process["node"] for name, process in run.summary["processes"].items()}
    assert {places[name] for name in ("trainer/one", "trainer/two")} == {"right"}
    assert {places[f"engine/two/{number}"] for number in range(2)} == {"left", "right"}
    assert places["store/0"] == "head"
    fetched = [one.object for one in run.events(ObjectFetched) if one.node == "left"]
    assert {f"weights/two/{version}" for version in range(STEPS + 1)} <= {*fetched}
    assert len({*fetched}) == len(fetched), "once for each version"


def test_a_team_on_three_nodes_ends_with_the_bits_of_one_process(undisturbed: Left, spread: Left) -> None:
    assert_spread(undisturbed, spread)


@pytest.mark.parametrize(
    "how", ["objects.memory_gib=0", pytest.param("cluster.transport=mooncake", marks=WITH_MOONCAKE)]
)
def test_weights_cross_otherwise_and_the_bits_are_the_same(
    how: str,
    undisturbed: Left,
    small_run: Path,
    shared_nodes: Nodes,
    tmp_path: Path,
    short_root: Path,
    begin: list[Spread],
) -> None:
    begin.append(Spread(small_run, shared_nodes, tmp_path, short_root, how))
    assert_spread(undisturbed, begin[0].finish())


def test_a_run_of_three_nodes_is_evaluated_there_and_exported(
    undisturbed: Left, spread: Left, shared_nodes: Nodes, tmp_path: Path, short_root: Path
) -> None:
    child = Child("eval", spread.path, "--json", cwd=tmp_path, temp=short_root)
    try:
        assert child.wait_for(lambda: all(agent_of(node, shared_nodes.address) for node in OTHERS)), child.stderr
        assert child.wait() == 0, child.stderr
        said = json.loads(child.stdout.splitlines()[-1])
    finally:
        child.close()
    (after,) = (event for event in undisturbed.events(Evaluated) if event.when == "after")
    assert {name: said[name] for name in after.evaluation} == after.evaluation
    exported: list[dict[str, bytes]] = []
    for run in (undisturbed, spread):
        out = tmp_path / str(len(exported))
        result = CliRunner().invoke(cli.app, ["export", str(run.path), str(out)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        exported.append({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")})
    assert {Path(name).parent.name for name in exported[0]} == {"one", "two"}
    assert exported[0] == exported[1]


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
