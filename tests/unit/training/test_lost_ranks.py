"""A rank that is lost in any call leaves nothing behind, and its policy ends with the bits of an undisturbed one."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from flexmarl.cluster.allocation import Lease
from flexmarl.errors import ObjectSpaceError, RankLost, TrainingError
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectKey, checksum, weights_key
from flexmarl.records import PolicyName, Sample, Version
from flexmarl.testing.training import accumulate
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.rank import RankHost, Trained
from flexmarl.training.backends.ranks import Ranks
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.group import GroupTrainer, SetAside
from flexmarl.training.interface import HeldRows
from flexmarl.training.settings import TrainingSettings
from tests.unit.training.standing_ranks import StandingRanks
from tests.unit.training.test_ranks import two_batches

SOLVER = PolicyName("solver")
Samples = Callable[..., list[Sample]]
HERE = Lease(place=0, holder=SOLVER, because="the test")
CALLS = ("resume", "accumulate", "step", "publish", "keep", "suspend", "drop")


class Mortal:
    """A rank that is lost once: in call `number` of `method`, before its work or after it."""

    def __init__(self, host: RankHost, plan: dict[str, Any]) -> None:
        self._host, self._plan = host, plan
        self._dead = False

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            plan = self._plan
            plan["count"] += method == plan["method"]
            dies = method == plan["method"] and plan["count"] == plan["number"] and not plan["died"]
            if dies and plan["when"] == "hangs":
                plan["died"] = self._dead = True
                await asyncio.sleep(3600)
            if not (dies and plan["when"] == "before") and not self._dead:
                found = await getattr(self._host, method)(*args, **options)
                if not dies:
                    return found
            if not plan["died"]:
                plan["lose"]()
            plan["died"] = self._dead = True
            raise RankLost(f"rank/0/0: it was lost in '{method}'; go on from the last checkpoint with --resume")

        return call


class NodesStore(InlineObjectStore):
    """The objects of a node that may be lost, with all that was not copied elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self._elsewhere: set[ObjectKey] = set()
        self.copies = 0
        self.lost_in = 0
        """The copy in which the node is lost; 0 is none."""
        self.released: set[ObjectKey] = set()

    async def release(self, key: ObjectKey) -> None:
        self.released.add(key)
        await super().release(key)

    async def copy(self, aside: SetAside) -> None:
        self.copies += 1
        if self.copies == self.lost_in:
            self.lose()
        for key in aside.blocks.values():
            await self.get(key)
            self._elsewhere.add(key)

    def lose(self) -> None:
        for key in self._objects.keys() - self._elsewhere:
            del self._objects[key]


class Renewed:
    """A place whose rank is made anew."""

    def __init__(self, make: Callable[[], Mortal]) -> None:
        self._make, self.times = make, 0
        self.ranks: Sequence[Any] = [make()]

    async def renew(self, because: str) -> None:
        assert because
        self.times += 1
        self.ranks = [self._make()]


@pytest.fixture(scope="module")
def source(make_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


def plan_of(method: str = "", number: int = 0, when: str = "before") -> dict[str, Any]:
    """When a rank is lost; by default never."""
    return {"method": method, "number": number, "when": when, "died": False, "count": 0, "lose": lambda: None}


def place_of(
    source: Path, objects: NodesStore, rows: HeldRows, plan: dict[str, Any], *, later_rate: float = 1e-2
) -> Renewed:
    """A place of one rank. Ranks that are made after the first one have another learning rate, if asked."""
    made = 0

    def make() -> Mortal:
        nonlocal made
        made += 1
        rate = 1e-2 if made == 1 else later_rate
        settings = TrainingSettings.model_validate({"optimizer": {"learning_rate": rate}, "dtype": "bfloat16"})

        def make_trainer(policy: PolicyName, model: PreTrainedModel, ranks: Ranks) -> SingleProcessTrainer:
            return SingleProcessTrainer(policy, model, settings, objects, rows=rows, seed=7, ranks=ranks)

        return Mortal(RankHost({SOLVER: Trained(source=source, settings=settings)}, objects, make_trainer), plan)

    return Renewed(make)


async def updated(group: GroupTrainer, rows: HeldRows, samples: list[Sample]) -> None:
    """Accumulates the samples and updates."""
    rows.hold(samples)
    for batch in two_batches(samples):
        await accumulate(group, batch)
    await group.step(divisors_of(samples))


def play(
    source: Path, make_samples: Samples, method: str, number: int, when: str, *, node: bool = False
) -> tuple[list[str], int, list[str]]:
    """Three updates, with a suspension in each; the checksums, the renewals, and the states that are left.

    With `node`, the objects of the lost rank's node are lost too.
    """
    objects, rows = NodesStore(), HeldRows()
    plan = plan_of(method, number, when)
    plan["lose"] = objects.lose if node else lambda: None
    objects.lost_in = number if method == "copy" else 0

    async def played() -> tuple[list[str], int, list[str]]:
        place, found = place_of(source, objects, rows, plan), []
        timeout_s = 5.0 if when == "hangs" else None
        copy = objects.copy if node else None
        group = GroupTrainer(SOLVER, [place], keep=True, timeout_s=timeout_s, copy=copy)
        await group.resume(HERE)
        found.append(await group.publish(Version(0)))
        for version in range(3):
            samples = make_samples(version, 6, version=version)
            rows.hold(samples)
            first, second = two_batches(samples)
            await accumulate(group, first)
            await group.suspend()
            await group.resume(HERE)
            await accumulate(group, second)
            await group.step(divisors_of(samples))
            found.append(await group.publish(Version(version + 1)))
        await group.suspend()
        return found, place.times, sorted(key for key in objects._objects if key.startswith("state/"))

    found = asyncio.run(played())
    assert plan["died"] or objects.copies > objects.lost_in > 0 or number == 0, "witness: it was lost"
    return found


@pytest.fixture(scope="module")
def undisturbed(source: Path, make_samples: Samples) -> tuple[list[str], int, list[str]]:
    return play(source, make_samples, "accumulate", 0, "before")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", CALLS)
def test_a_rank_lost_in_any_call_ends_with_the_same_bits_and_leaves_nothing(
    source: Path, make_samples: Samples, undisturbed: tuple[list[str], int, list[str]], method: str, when: str
) -> None:
    checksums, none, left = undisturbed
    assert none == 0
    for number in (1, 3):
        found, times, leaves = play(source, make_samples, method, number, when)
        assert (found, times) == (checksums, 1)
        assert [key.rpartition("/")[0] for key in leaves] == [key.rpartition("/")[0] for key in left]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", [*CALLS, "copy"])
def test_a_node_lost_in_any_call_ends_with_the_same_bits_if_its_states_are_copied(
    source: Path, make_samples: Samples, undisturbed: tuple[list[str], int, list[str]], method: str, when: str
) -> None:
    for number in (1, 2, 3):
        found, times, left = play(source, make_samples, method, number, when, node=True)
        assert (found, times) == (undisturbed[0], 1)
        assert len(left) == len(undisturbed[2])


def test_states_that_nobody_copied_are_gone_with_their_node(
    source: Path, make_samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nowhere(self: NodesStore, aside: SetAside) -> None:
        pass

    monkeypatch.setattr(NodesStore, "copy", nowhere)
    with pytest.raises(TrainingError, match=r"/solver/.*' of its state is on no node .*copies=2.*--resume"):
        play(source, make_samples, "accumulate", 3, "before", node=True)


@pytest.mark.parametrize("method", ["accumulate", "publish"])
def test_a_rank_that_does_not_answer_in_time_is_lost(
    source: Path, make_samples: Samples, undisturbed: tuple[list[str], int, list[str]], method: str
) -> None:
    assert play(source, make_samples, method, 2, "hangs")[:2] == (undisturbed[0], 1)


def test_without_a_copy_the_loss_is_an_error_that_says_how_to_go_on(source: Path, make_samples: Samples) -> None:
    class Lost:
        async def resume(self, *_: Any, **__: Any) -> None:
            raise RankLost("rank/0/0: it was lost in 'resume'; go on from the last checkpoint with --resume")

    async def resume(**options: Any) -> None:
        group = GroupTrainer(SOLVER, [StandingRanks(Lost())], **options)  # pyright: ignore[reportArgumentType]
        await group.resume(HERE)

    for options in ({}, {"keep": True}):
        with pytest.raises(TrainingError, match="it was lost in 'resume'; go on from the last checkpoint"):
            asyncio.run(resume(**options))


def test_a_loaded_checkpoint_is_loaded_again_if_its_first_copy_is_lost(
    source: Path, make_samples: Samples, tmp_path: Path
) -> None:
    async def save_and_load() -> None:
        objects, rows = NodesStore(), HeldRows()
        group = GroupTrainer(SOLVER, [place_of(source, objects, rows, plan_of())], keep=True)
        await group.resume(HERE)
        await group.publish(Version(0))
        await updated(group, rows, make_samples(0, 6, version=0))
        saved = await group.publish(Version(1))
        (tmp_path / "checkpoint").mkdir()
        await group.save(tmp_path / "checkpoint")

        objects = NodesStore()
        objects.lost_in = 1
        place = place_of(source, objects, HeldRows(), plan_of())
        group = GroupTrainer(SOLVER, [place], keep=True, copy=objects.copy)
        await group.resume(HERE)
        assert await group.load(tmp_path / "checkpoint") == 1
        assert await group.publish(Version(1)) == saved
        assert place.times == 1, "witness: it was lost"

    asyncio.run(save_and_load())


def test_no_room_for_a_copy_is_no_loss_of_a_rank(source: Path) -> None:
    async def full(aside: SetAside) -> None:
        raise ObjectSpaceError("node 'head': 0 bytes are free")

    async def publish() -> None:
        place = place_of(source, NodesStore(), HeldRows(), plan_of())
        group = GroupTrainer(SOLVER, [place], keep=True, copy=full)
        await group.resume(HERE)
        with pytest.raises(TrainingError, match=r"as process_groups\.copies=2 asks: node 'head': 0 bytes are free"):
            await group.publish(Version(0))
        assert place.times == 0

    asyncio.run(publish())


def test_a_rank_lost_while_it_publishes_the_second_of_two_updates_sets_it_anew(
    source: Path, make_samples: Samples
) -> None:
    async def publish(plan: dict[str, Any]) -> str:
        objects, rows = NodesStore(), HeldRows()
        group = GroupTrainer(SOLVER, [place_of(source, objects, rows, plan)], keep=True)
        await group.resume(HERE)
        await group.publish(Version(0))
        for _ in range(2):
            await updated(group, rows, make_samples(0, 6, version=0))
        return await group.publish(Version(2))

    lost = plan_of("publish", 2, "after")
    assert asyncio.run(publish(lost)) == asyncio.run(publish(plan_of()))
    assert lost["died"], "witness: it was lost"


def test_the_first_weights_stay_when_a_rank_is_lost_in_the_first_step(source: Path, make_samples: Samples) -> None:
    async def lose() -> None:
        objects, rows = NodesStore(), HeldRows()
        place = place_of(source, objects, rows, plan_of("accumulate", 1))
        group = GroupTrainer(SOLVER, [place], keep=True)
        await group.resume(HERE)
        first = await group.publish(Version(0))
        objects.released.clear()
        first_half, _ = two_batches(make_samples(0, 6, version=0))
        rows.hold(make_samples(0, 6, version=0))
        await accumulate(group, first_half)
        await group.suspend()
        assert place.times == 1, "witness: it was lost"
        assert checksum(await objects.get(weights_key(SOLVER, Version(0)))) == first
        assert weights_key(SOLVER, Version(0)) not in objects.released, "engines may load it at any moment"

    asyncio.run(lose())


def test_the_checksum_of_a_publication_is_that_of_the_weights_that_were_set_last(
    source: Path, make_samples: Samples
) -> None:
    async def lose() -> None:
        objects, rows = NodesStore(), HeldRows()
        objects.lost_in = 2
        place = place_of(source, objects, rows, plan_of(), later_rate=1.1e-2)  # As if rounding were another now.
        group = GroupTrainer(SOLVER, [place], keep=True, copy=objects.copy)
        await group.resume(HERE)
        await group.publish(Version(0))
        await updated(group, rows, make_samples(0, 6, version=0))
        published = await group.publish(Version(1))
        assert place.times == 1, "witness: it was lost"
        assert checksum(await objects.get(weights_key(SOLVER, Version(1)))) == published

    asyncio.run(lose())
