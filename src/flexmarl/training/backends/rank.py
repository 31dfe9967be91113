"""Rank of a place on torch: a standing process that holds the training state of one policy at a time.

    resume(solver)   blocks ──► device: the model, its optimiser, its gradient sums        accumulate, step, publish ...
    suspend()        device ──► blocks, each linked once it is whole; then the device is freed
    resume(verifier) ...

Blocks are objects of the run's object store, which are written again and again (objects/backends/blocks.py). The block
of the weights is the object that engines load: a version that was set is not copied again. Policies with adapters on
one base take turns on that base, which stays.

On a CPU the other blocks, if none need stay, are the memory that the policy trains in: nothing of them is copied.

With several ranks, all of them are called at the same time. The first one writes the blocks, which are whole; each
reads its part of them, whatever the number of ranks that there were before.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from transformers import PreTrainedModel

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.torch_device import free_unused
from flexmarl.errors import FlexmarlError, ObjectError, TrainingError, boundary
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore, canary_key, weights_key
from flexmarl.records import CreditLine, Divisors, FloatArray, LossReport, MicroBatch, PolicyName, SampleId, Version
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.ranks import ALONE, Ranks
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.backends.state import Base, Skeleton, Tensors, TrainerState, bind, empty_like, facts_of
from flexmarl.training.group import SetAside
from flexmarl.training.interface import Appraised, UpdateReport
from flexmarl.training.settings import TrainingSettings

T = TypeVar("T")
IN_HOST = ("weights", "reference")
"""Kinds of tensors that never go to disk: engines load the weights, and a reference is written once."""
NOT_TAKEN = (*IN_HOST, "open")
"""Kinds of tensors that no policy trains in the blocks of: those, and sums that are freed one group after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A policy that places train: where its model is from, and how it is trained."""

    source: str | Path
    """A Hugging Face folder or name."""
    settings: TrainingSettings

    @property
    def base(self) -> tuple[str, str] | None:
        """The same for policies with adapters on one base; None if all weights are trained."""
        return None if self.settings.lora is None else (str(self.source), self.settings.dtype)


MakeSingle = Callable[[PolicyName, PreTrainedModel, Ranks], SingleProcessTrainer]
"""Makes the trainer of a policy around a model that is loaded, as one of these ranks; runs on its device thread."""


class RankHost:
    """One training process of a place."""

    def __init__(
        self,
        policies: Mapping[PolicyName, Trained],
        objects: ObjectStore,
        make: MakeSingle,
        *,
        disk: ObjectStore | None = None,
        device: str = "cpu",
        thread: DeviceThread | None = None,
        ranks: Mapping[int, Ranks] | None = None,
        gives_way: bool = False,
    ) -> None:
        """`policies` are those that it may be asked to hold. States that find no room in `objects` go to `disk`.

        If it `gives_way` to engines, the base of adapters is in host memory while it holds no policy.
        `ranks` has its view of the first n ranks of its place, by n; without it, it is the only one.
        The model is made, and copied from its blocks, on `thread`; without it, at once.
        """
        self._policies, self._objects, self._make = policies, objects, make
        self._disk = disk or objects
        self._device, self._thread, self._gives_way = device, thread, gives_way
        self._views = ranks or {1: ALONE}
        self._ranks = ALONE
        """The ranks that hold the policy."""
        self._keeps = False
        """True if the blocks of which the policy was resumed stay."""
        self._trainer: SingleProcessTrainer | None = None
        self._policy = PolicyName("")
        self._aside: SetAside | None = None
        """The state of which the policy that it holds was resumed."""
        self._base: Base | None = None
        self._skeletons: dict[str | Path, Skeleton] = {}
        """Models without memory, by their source."""

    async def resume(self, policy: PolicyName, aside: SetAside | None, world: int = 1, *, keep: bool = False) -> None:
        """Brings a policy's state onto the device. Unless `keep`, its blocks are then free, and gone."""
        if self._trainer is not None:
            raise TrainingError(f"policy '{policy}': this place holds policy '{self._policy}'; suspend that first")
        ranks = self._views[world]
        with boundary(TrainingError, f"policy '{policy}': bringing its state back"):
            if aside is None:
                self._trainer = await self._run(lambda: self._make(policy, self._first_model(policy, ranks), ranks))
            else:
                self._trainer = await self._bring(policy, aside, ranks, keep=keep)
        self._policy, self._aside, self._ranks, self._keeps = policy, aside, ranks, keep

    async def _bring(self, policy: PolicyName, aside: SetAside, ranks: Ranks, *, keep: bool) -> SingleProcessTrainer:
        """The trainer of a state that was set aside. The state stays if it raises."""
        here: dict[str, Tensors] = {}
        takes = not keep and ranks.world == 1 and self._device == "cpu" and not aside.on_disk
        taken = [kind for kind in aside.blocks if kind not in NOT_TAKEN] if takes else []
        try:
            for kind in aside.tensors:
                here[kind] = await (self._take(aside, kind) if kind in taken else self._read(aside, kind, ranks))
            trainer = await self._run(lambda: self._brought_back(policy, aside, here, ranks))
        except BaseException:
            for kind in here.keys() & taken:
                with suppress(ObjectError):
                    await asyncio.shield(self._objects.set(aside.blocks[kind], here[kind], verify="names"))
            raise
        if not keep and ranks.is_first:
            await self._release(aside, [kind for kind in aside.blocks if kind not in {*IN_HOST, *taken}])
        return trainer

    async def _take(self, aside: SetAside, kind: str) -> Tensors:
        with self._explaining_loss(aside.blocks[kind]):
            return dict(await self._objects.take(aside.blocks[kind]))

    async def _read(self, aside: SetAside, kind: str, ranks: Ranks) -> Tensors:
        """The whole tensors of a kind: copied, or seen where they are, if several ranks take their parts."""
        tier, key = self._tier(aside, kind), aside.blocks.get(kind)
        with self._explaining_loss(key):
            if ranks.world > 1 and key is not None and kind != "buffers":
                return dict(await tier.get(key))
            here = empty_like(aside.tensors[kind], self._device, at_once=kind != "open")
            if key is not None:
                await tier.get_into(key, here, verify="names", run=self._run)
            return here

    @contextmanager
    def _explaining_loss(self, key: ObjectKey | None) -> Iterator[None]:
        """Says what to do if a block is not there."""
        try:
            yield
        except KeyError:
            raise TrainingError(
                f"'{key}' of its state is on no node any more (process_groups.copies=2 keeps states on the "
                f"controller's node too); go on from the last checkpoint with --resume"
            ) from None

    async def suspend(self, room: int | None = None) -> SetAside:
        """Sets the state aside in blocks, then frees the device. If a block cannot be written, the state stays."""
        aside = await self._copied(room)
        self._trainer, self._aside = None, None
        await self._run(self._free)
        return aside

    async def keep(self, room: int | None = None) -> SetAside:
        """Sets a copy of the state aside in blocks. The copy before stays until `drop`: nobody may know of this one."""
        assert self._keeps or self._aside is None, "a policy that trains in its blocks has no copy of them"
        self._aside = await self._copied(room)
        return self._aside

    async def _copied(self, room: int | None) -> SetAside:
        """The state in new blocks."""
        trainer, policy, before = self._held(), self._policy, self._aside
        with boundary(TrainingError, f"policy '{policy}': setting its state aside"):
            state, number = await trainer.state(), before.number + 1 if before else 0
            published = await self.publish(trainer.version)
            num_bytes = sum(t.nbytes for kind, of in state.tensors.items() if kind != "weights" for t in of.values())
            aside = SetAside(
                number=number,
                version=trainer.version,
                published=published,
                blocks={kind: self._key(trainer, kind, number) for kind in state.tensors},
                tensors={kind: facts_of(of) for kind, of in state.tensors.items()},
                num_bytes=num_bytes,
                on_disk=room is not None and num_bytes > room,
                facts=state.facts,
            )
            known = set() if before is None else set(before.blocks.values())
            new = [kind for kind, key in aside.blocks.items() if kind != "weights" and key not in known]
            await self._write(aside, new, state)
            if before is not None and not self._keeps and self._ranks.is_first:
                await self.drop(before, aside)
        return aside

    async def drop(self, before: SetAside, aside: SetAside) -> None:
        """Frees the blocks of a state that has been replaced, but for weights and those that the new one has too."""
        held = {"weights", *(kind for kind, key in before.blocks.items() if key == aside.blocks.get(kind))}
        await self._release(before, [kind for kind in before.blocks if kind not in held])

    async def _write(self, aside: SetAside, kinds: Sequence[str], state: TrainerState) -> None:
        """Writes the blocks of these kinds. Raises TrainingError, on every rank, if one cannot be written."""
        ranks, failed = self._ranks, None
        try:
            for kind in kinds:
                whole = await self._run(lambda kind=kind: ranks.whole(state.tensors[kind]))
                if ranks.is_first and failed is None:
                    key, tier = aside.blocks[kind], self._tier(aside, kind)
                    try:
                        await tier.release(key)  # A lost rank may have written it.
                        # A digest would be compared with nothing: `resume` finds the block whole, or not at all.
                        await tier.set(key, whole, verify="names")
                    except FlexmarlError as error:
                        failed = error
        except BaseException:
            await self._release(aside, kinds)
            raise
        if failed is not None:
            await self._release(aside, kinds)
        if isinstance(failed, ObjectError):
            failed = TrainingError(
                f"policy '{self._policy}': its state of {aside.num_bytes:,} bytes cannot be set aside, and stays where "
                f"it is: {failed}; process_groups.host_gb (on several nodes objects.memory_gib) decides how much goes "
                f"to memory, the rest goes to disk"
            )
        await self._run(lambda: ranks.agree(failed))

    def _key(self, trainer: SingleProcessTrainer, kind: str, number: int) -> ObjectKey:
        """The object that gets a kind of tensors. Weights are published; a reference changes in a reset only."""
        if kind == "weights":
            return weights_key(self._policy, trainer.version)
        if kind == "reference" and self._aside and not trainer.reference_was_reset and kind in self._aside.blocks:
            return self._aside.blocks[kind]
        return ObjectKey(f"state/{self._policy}/{kind}/{number}")

    def _tier(self, aside: SetAside, kind: str) -> ObjectStore:
        return self._disk if aside.on_disk and kind not in IN_HOST else self._objects

    async def _release(self, aside: SetAside, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if kind in aside.blocks:
                await self._tier(aside, kind).release(aside.blocks[kind])

    def _first_model(self, policy: PolicyName, ranks: Ranks) -> PreTrainedModel:
        """The model that a policy begins with, from its files, or on the base that is here.

        Several ranks keep no base: each would keep it whole.
        """
        trained = self._policies[policy]
        if trained.base is None or ranks.world > 1:
            self._base = None
            return load_model(trained.source)
        return self._on_base(trained)

    def _on_base(self, trained: Trained) -> PreTrainedModel:
        if self._base is None or self._base.name != trained.base:
            self._base = None  # Before the next one is loaded: two may find no room.
            self._base = Base(trained.source, trained.settings.dtype, self._device, self._skeleton(trained))
        if self._gives_way:
            self._base.to(self._device)
        return self._base.model()

    def _skeleton(self, trained: Trained) -> Skeleton:
        if trained.source not in self._skeletons:
            self._skeletons[trained.source] = Skeleton(trained.source)
        return self._skeletons[trained.source]

    def _brought_back(
        self, policy: PolicyName, aside: SetAside, here: dict[str, Tensors], ranks: Ranks
    ) -> SingleProcessTrainer:
        trained = self._policies[policy]
        if trained.base is None:
            self._base = None
            model = bind(self._skeleton(trained).model(), here["weights"], here.get("buffers", {}))
        else:
            model = self._first_model(policy, ranks)
        trainer = self._make(policy, model, ranks)
        trainer.take_state(TrainerState(tensors=here, facts=dict(aside.facts)), aside.version, aside.published)
        return trainer

    def _free(self) -> None:
        if self._gives_way and self._base is not None:
            self._base.to("cpu")
        gc.collect()
        free_unused(self._device)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._thread.run(work) if self._thread else work()

    def _held(self) -> SingleProcessTrainer:
        if self._trainer is None:
            raise TrainingError("this place holds no policy; resume one first")
        return self._trainer

    async def accumulate(self, micro_batch_id: str, ids: Sequence[SampleId]) -> LossReport:
        """As the trainer of the policy that it holds; so do the following."""
        return await self._held().accumulate(micro_batch_id, ids)

    async def close_groups(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Closes credit groups."""
        return await self._held().close_groups(lines)

    async def step(self, divisors: Divisors) -> UpdateReport:
        """Updates."""
        return await self._held().step(divisors)

    async def publish(self, version: Version) -> Checksum:
        """Sets the weights. If a lost rank has set this version, nobody learned of it, and it is set anew."""
        trainer = self._held()
        if self._keeps and self._ranks.is_first and version == trainer.version and not trainer.is_published:
            await self._objects.release(weights_key(self._policy, version))
            await self._objects.release(canary_key(self._policy, version))
        return await trainer.publish(version)

    async def logprobs(self, batch: MicroBatch) -> list[FloatArray]:
        """Computes log-probabilities."""
        return await self._held().logprobs(batch)

    async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
        """Appraises rows."""
        return await self._held().appraise(ids)

    async def reset_reference(self) -> None:
        """Resets the reference."""
        await self._held().reset_reference()

    async def save(self, path: Path) -> None:
        """Saves the trainer."""
        await self._held().save(path)

    async def load(self, path: Path) -> Version:
        """Loads the trainer. The weights that were published before are released: they are those of no version."""
        trainer = self._held()
        before = trainer.version
        version = await trainer.load(path)
        await self._objects.release(weights_key(self._policy, before))
        if self._aside is not None:
            await self._release(self._aside, ["reference"])
            blocks = {kind: key for kind, key in self._aside.blocks.items() if kind != "reference"}
            self._aside = replace(self._aside, version=version, published=None, blocks=blocks)
        return version

    async def export(self, path: Path, form: Literal["merged", "adapter"] | None = None) -> None:
        """Exports the model."""
        await self._held().export(path, form)
