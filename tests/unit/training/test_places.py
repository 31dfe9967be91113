"""Policies that take turns on places: swapped as often as one likes, a policy ends with the same bits (law 9)."""

import asyncio
import errno
import gc
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.cluster.allocation import Lease
from flexmarl.cluster.torch_device import return_heap
from flexmarl.errors import ObjectError, TrainingError
from flexmarl.events.event import Events
from flexmarl.events.training_events import Swapped
from flexmarl.objects.backends.memory import InlineObjectStore, ShmObjectStore
from flexmarl.objects.interface import ObjectKey, ObjectStore, checksum, weights_key
from flexmarl.records import CreditLine, MicroBatch, PolicyName, Sample, Version
from flexmarl.testing.training import accumulate, check_process_group, check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.rank import RankHost, Trained
from flexmarl.training.backends.ranks import Ranks
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.group import GroupTrainer, HostMemory
from flexmarl.training.interface import HeldRows, RowReader
from flexmarl.training.residency import Residency
from flexmarl.training.settings import ProcessGroupSettings, TrainingSettings
from tests.unit.training.standing_ranks import StandingRanks

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")
Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]
OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0.1}
KINDS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float64, with critic and reference": {"dtype": "float64", "kl": {"coef": 0.3}, "critic": {"learning_rate": 3e-2}},
    "adapter": {"lora": {"rank": 2}, "publish": "adapter", "kl": {"coef": 0.3}},
    "merged adapter": {"lora": {"rank": 2}, "publish": "merged", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def source(make_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


def settings_of(kind: str) -> TrainingSettings:
    return TrainingSettings.model_validate({"optimizer": OPTIMIZER, "publish": "merged", **KINDS[kind]})


def single(policy: PolicyName, source: Path, kind: str, objects: ObjectStore, rows: RowReader) -> SingleProcessTrainer:
    return SingleProcessTrainer(policy, load_model(source), settings_of(kind), objects, rows=rows, seed=7)


def ranks_of(number: int, source: Path, kinds: Mapping[PolicyName, str], objects: ObjectStore, rows: RowReader):
    trained = {policy: Trained(source=source, settings=settings_of(kind)) for policy, kind in kinds.items()}

    def make(policy: PolicyName, model: PreTrainedModel, ranks: Ranks) -> SingleProcessTrainer:
        return SingleProcessTrainer(policy, model, trained[policy].settings, objects, rows=rows, seed=7, ranks=ranks)

    return [RankHost(trained, objects, make) for _ in range(number)]


def standing(ranks: Sequence[RankHost]) -> list[StandingRanks]:
    """Places of one rank each."""
    return [StandingRanks(rank) for rank in ranks]


def lease(place: int, policy: PolicyName = SOLVER) -> Lease:
    return Lease(place=place, holder=policy, because="the test")


def batches_of(samples: Sequence[Sample], parts: int = 3, prefix: str = "mb") -> list[MicroBatch]:
    cut = [samples[number::parts] for number in range(parts)]
    return [
        MicroBatch(micro_batch_id=f"{prefix}/{number}", policy=part[0].turn.policy, samples=tuple(part))
        for number, part in enumerate(cut)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_keeps_the_contract_of_a_process_group(source: Path, make_samples: Samples, kind: str) -> None:
    def make(objects: ObjectStore, rows: RowReader) -> tuple[GroupTrainer, GroupTrainer]:
        trainer = GroupTrainer(SOLVER, standing(ranks_of(2, source, {SOLVER: kind}, objects, rows)))
        return trainer, trainer

    asyncio.run(check_process_group(make, batches_of(make_samples(14, 8))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_on_a_place_keeps_the_contract_of_a_trainer(
    source: Path, make_samples: Samples, tmp_path: Path, kind: str
) -> None:
    async def make(objects: ObjectStore, rows: RowReader) -> GroupTrainer:
        trainer = GroupTrainer(SOLVER, standing(ranks_of(1, source, {SOLVER: kind}, objects, rows)))
        await trainer.resume(lease(0))
        return trainer

    streams = "kl" not in KINDS[kind]
    asyncio.run(check_trainer(make, batches_of(make_samples(14, 8)), tmp_path, streams=streams))


@pytest.mark.parametrize("kind", ["full", "bfloat16", "merged adapter"])
def test_swapped_after_each_call_it_is_the_single_trainer_to_the_last_bit(
    source: Path, make_samples: Samples, kind: str
) -> None:
    """Three updates with open credit groups, on two places in turn."""

    async def published(swapped: bool) -> list[str]:
        objects, rows = InlineObjectStore(), HeldRows()
        trainer = group = GroupTrainer(SOLVER, standing(ranks_of(2, source, {SOLVER: kind}, objects, rows)))
        if not swapped:
            trainer = single(SOLVER, source, kind, objects, rows)
        place = 0

        async def swap() -> None:
            nonlocal place
            if swapped:
                await group.suspend()
                place = 1 - place
                await group.resume(lease(place))

        await group.resume(lease(0))
        found: list[str] = []
        for version in range(3):
            samples = make_samples(version, 6, version=version)
            samples = [replace(s, open_group="late") if n % 3 == 0 else s for n, s in enumerate(samples)]
            rows.hold(samples)
            for batch in batches_of(samples, prefix=str(version)):
                await accumulate(trainer, batch)
                await swap()
            line = CreditLine(baseline=0.5, divisor=2.0)
            await trainer.close_groups({"late": line})
            await swap()
            await trainer.step(divisors_of(samples))
            await swap()
            found.append(await trainer.publish(Version(version + 1)))
        return found

    assert asyncio.run(published(True)) == asyncio.run(published(False))


def test_policies_with_adapters_on_one_base_take_turns_on_it(source: Path, make_samples: Samples) -> None:
    """The base is loaded once, stays where it is, and no update touches it."""

    async def play() -> tuple[list[int], str]:
        objects, rows = InlineObjectStore(), HeldRows()
        (rank,) = ranks_of(1, source, {SOLVER: "adapter", VERIFIER: "adapter"}, objects, rows)
        groups = [GroupTrainer(policy, standing([rank])) for policy in (SOLVER, VERIFIER)]
        bases = []
        for round in range(2):
            for group in groups:
                samples = make_samples(round, 4, policy=group.policy, version=round)
                rows.hold(samples)
                await group.resume(lease(0, group.policy))
                await accumulate(group, *batches_of(samples, 1, prefix=f"{round}"))
                await group.step(divisors_of(samples))
                await group.suspend()
                assert rank._base is not None
                bases.append(id(rank._base.weights))
                held = checksum(rank._base.weights)
        return bases, held

    bases, held = asyncio.run(play())
    assert len(bases) == 4
    assert len(set(bases)) == 1, "it is loaded once"
    assert held == checksum({name: t for name, t in load_model(source).state_dict().items() if "lm_head" not in name})


def test_a_block_without_room_leaves_the_policy_on_its_device(source: Path, make_samples: Samples) -> None:
    class Full(InlineObjectStore):
        full = True

        async def set(self, key, tree, *, verify="full"):
            if self.full and "/moments/" in key:
                raise ObjectError("no room")
            return await super().set(key, tree, verify=verify)

    async def play() -> None:
        objects, rows, samples = Full(), HeldRows(), make_samples(3)
        rows.hold(samples)
        group = GroupTrainer(SOLVER, standing(ranks_of(1, source, {SOLVER: "bfloat16"}, objects, rows)))
        await group.resume(lease(0))
        await accumulate(group, *batches_of(samples, 1))
        await group.step(divisors_of(samples))
        before = await group.publish(Version(1))
        with pytest.raises(TrainingError, match=r"cannot be set aside, and stays where it is: no room.*host_gb"):
            await group.suspend()
        assert await group.publish(Version(1)) == before, "it trains on"
        assert not [key for key in objects._objects if key.startswith("state/")], "nothing half is left"
        objects.full = False
        await group.suspend()
        await group.resume(lease(0))
        assert await group.publish(Version(1)) == before

    asyncio.run(play())


def test_on_a_cpu_a_policy_trains_in_its_blocks_whatever_fails(
    source: Path, make_samples: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of blocks, one after the other, cannot be made, and the trainer cannot, before each swap that succeeds."""
    kind, objects, rows, samples = "float64, with critic and reference", ShmObjectStore(tmp_path), HeldRows(), []
    objects._root.rmdir()
    objects.create()
    link, names_left = os.link, [math.inf]

    def failing_link(block: Path, name: Path) -> None:
        names_left[0] -= "state%2F" in str(name)
        if names_left[0] < 0:
            raise OSError(errno.ENOSPC, "no room for a name")
        link(block, name)

    monkeypatch.setattr(os, "link", failing_link)

    def blocks() -> dict[str, int]:
        """By kind, the blocks that hold the state."""
        files = tmp_path.glob("state%2Fsolver%2F*.object")
        return {file.name.split("%2F")[2]: file.stat().st_ino for file in files if "reference" not in file.name}

    def number_of_blocks() -> int:
        return len(list(tmp_path.glob("*.block")))

    def trained_in(there: Mapping[str, int]) -> Set[tuple[str, int]]:
        """The critic's masters are parameters, which have memory of their own."""
        return {(name, block) for name, block in there.items() if name != "masters"}

    async def swap(group: GroupTrainer, rank: RankHost) -> None:
        most = 0
        for number in range(len((await rank._held().state()).tensors) - 2):  # But for weights and reference.
            names_left[0] = number
            with pytest.raises(TrainingError, match="stays where it is"):
                await group.suspend()
            assert not blocks(), "nothing half is left"
            names_left[0] = math.inf
            for name, tensors in (await rank._held().state()).tensors.items():
                others = [ObjectKey(f"state/solver/{name}/other{number}") for number in range(2)]
                for other in others:  # Who writes objects of this shape must not find the policy's own blocks.
                    await objects.set(other, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
                for other in others:
                    await objects.release(other)
            assert number_of_blocks() <= (most := most or number_of_blocks()), "no failure keeps a block"
        await group.suspend()
        there = blocks()
        with monkeypatch.context() as broken:
            broken.setattr(rank, "_make", lambda *_: 1 / 0)
            with pytest.raises(TrainingError, match="division by zero"):
                await group.resume(lease(0))
        assert blocks() == there
        for _ in range(2):
            await group.resume(lease(0))
            await group.suspend()
            assert trained_in(blocks()) == trained_in(there), "they were not copied"
        await group.resume(lease(0))

    async def play() -> None:
        (rank,) = ranks_of(1, source, {SOLVER: kind}, objects, rows)
        group, alone = GroupTrainer(SOLVER, standing([rank])), single(SOLVER, source, kind, InlineObjectStore(), rows)
        await group.resume(lease(0))
        for version in range(3):
            samples[:] = make_samples(3, 2, version=version)
            rows.hold(samples)
            for batch in batches_of(samples, 2, prefix=f"{version}"):
                await accumulate(group, batch)
                await accumulate(alone, batch)
                await swap(group, rank)
            for trainer in (group, alone):
                await trainer.step(divisors_of(samples))
            assert await group.publish(Version(version + 1)) == await alone.publish(Version(version + 1))
        await group.save(tmp_path / "group")
        await alone.save(tmp_path / "alone")
        sizes = {name: (tmp_path / name / "trainer.pt").stat().st_size for name in ("group", "alone")}
        assert sizes["group"] < 1.05 * sizes["alone"]

    asyncio.run(play())


def test_states_that_find_no_room_in_memory_go_to_disk_and_come_back_with_the_same_bits(
    source: Path, make_samples: Samples
) -> None:
    async def published(room: int | None) -> tuple[list[str], list[int]]:
        objects, disk, rows = InlineObjectStore(), InlineObjectStore(), HeldRows()
        memory, ranks = (
            HostMemory(room),
            ranks_of(2, source, dict.fromkeys((SOLVER, VERIFIER), "bfloat16"), objects, rows),
        )
        for rank in ranks:
            rank._disk = disk
        groups = [GroupTrainer(policy, standing(ranks), memory) for policy in (SOLVER, VERIFIER)]
        found, there = [], []
        for round in range(2):
            for group in groups:
                samples = make_samples(round, 4, policy=group.policy, version=round)
                rows.hold(samples)
                await group.resume(lease(round, group.policy))
                await accumulate(group, *batches_of(samples, 1, prefix=f"{round}"))
                await group.step(divisors_of(samples))
                await group.suspend()
                there.append(len(disk._objects))
                found.append(await group.publish(Version(round + 1)))
        return found, there

    (plain, none), (bounded, some) = (asyncio.run(published(room)) for room in (None, 100_000))
    assert bounded == plain
    assert not any(none)
    assert some[0] == 0, "the first state has room"
    assert some[1] == some[3] > 0, "the second one has none, and leaves nothing behind when it comes back"


def test_a_rank_holds_one_policy_at_a_time(source: Path) -> None:
    async def play() -> None:
        (rank,) = ranks_of(1, source, {SOLVER: "full", VERIFIER: "full"}, InlineObjectStore(), HeldRows())
        with pytest.raises(TrainingError, match="this place holds no policy"):
            await rank.suspend()
        await rank.resume(SOLVER, None)
        with pytest.raises(TrainingError, match="this place holds policy 'solver'; suspend that first"):
            await rank.resume(VERIFIER, None)

    asyncio.run(play())


def test_calls_outside_of_sessions_wait_for_a_place_and_leave_it(source: Path, make_samples: Samples) -> None:
    """Three policies publish, save and are appraised on one place; nobody has a session."""
    names = [PolicyName(name) for name in ("a", "b", "c")]

    async def play() -> list[Swapped]:
        objects, rows, events, swaps = InlineObjectStore(), HeldRows(), Events(), list[Swapped]()
        events.listen(Swapped, swaps.append)
        kind = "float64, with critic and reference"
        ranks = ranks_of(1, source, dict.fromkeys(names, kind), objects, rows)
        groups = {policy: GroupTrainer(policy, standing(ranks)) for policy in names}
        rows.hold([s for policy in names for s in make_samples(3, policy=policy)])
        async with Residency(groups, ProcessGroupSettings(at_once=1), events=events).open():
            await asyncio.gather(*(group.publish(Version(0)) for group in groups.values()))
            asked = [s.turn.sample_id for s in make_samples(3, policy="a")]
            answers = await asyncio.gather(*(group.appraise(asked) for group in groups.values()))
            assert all(len(answer) == len(asked) for answer in answers)
            await asyncio.gather(*(group.publish(Version(0)) for group in groups.values()))
        for policy in names:
            assert checksum(await objects.get(weights_key(policy, Version(0)))) == await groups[policy].publish(
                Version(0)
            )
        return swaps

    swaps = asyncio.run(play())
    assert {swap.policy for swap in swaps} == {*names}
    assert {swap.place for swap in swaps} == {0}


def test_between_suspend_and_resume_the_process_holds_nothing_and_the_blocks_are_there_once(
    tmp_path: Path, make_samples: Samples
) -> None:
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    num_parameters = model.num_parameters()
    model.save_pretrained(tmp_path / "model")
    del model
    objects, rows, samples = ShmObjectStore(tmp_path / "blocks"), HeldRows(), make_samples(3, 2)
    objects.create()
    rows.hold(samples)
    process = psutil.Process()

    def anonymous() -> int:
        gc.collect()
        return_heap()
        return process.memory_full_info().uss - sum(m.rss for m in process.memory_maps() if "blocks" in m.path)

    async def play() -> None:
        (rank,) = ranks_of(1, tmp_path / "model", {SOLVER: "full", VERIFIER: "full"}, objects, rows)
        group, warm = (GroupTrainer(policy, standing([rank])) for policy in (SOLVER, VERIFIER))
        await warm.resume(lease(0, VERIFIER))  # What torch and transformers load at the first use is no policy's.
        await warm.suspend()
        before = anonymous()
        await group.resume(lease(0))
        await accumulate(group, *batches_of(samples, 1))
        await group.step(divisors_of(samples))
        state = (await rank._held().state()).tensors
        in_tensors = sum(tensor.nbytes for kind in ("weights", "moments") for tensor in state[kind].values())
        del state
        assert in_tensors >= 3 * 4 * num_parameters, "witness: weights and moments are here"
        assert anonymous() - before > in_tensors - (1 << 20), "but for holes in pages that the heap had before"
        for _ in range(2):
            await group.suspend()
            assert anonymous() - before < 16 << 20
            weights = objects._path(weights_key(SOLVER, Version(1)))
            (moments,) = (tmp_path / "blocks").glob("state%2Fsolver%2Fmoments*.object")
            sizes = {path.stat().st_ino: path.stat().st_size for path in (tmp_path / "blocks").glob("*.block")}
            of_solver = sizes[weights.stat().st_ino] + sizes[moments.stat().st_ino]
            assert 3 * 4 * num_parameters < of_solver < 1.01 * 3 * 4 * num_parameters + 16384
            objects_left = {path.name for path in (tmp_path / "blocks").glob("state%2Fsolver*")}
            assert len([name for name in objects_left if "moments" in name]) == 1
            await group.resume(lease(0))
        assert not list((tmp_path / "blocks").glob("state%2Fsolver%2Fmoments*")), "they are on the device again"

    asyncio.run(play())
