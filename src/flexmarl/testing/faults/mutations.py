"""Rules broken on purpose, each of which replaces a sound rule in a run. The laws must catch every one."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import PrivateAttr

from flexmarl.agents.context import forget
from flexmarl.assemble.wire import PRODUCTION, Rules
from flexmarl.config import RunSettings
from flexmarl.credit.estimators.presets import Default
from flexmarl.credit.interface import Credit, CreditRow
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.window import Taken, Window
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import Checksum
from flexmarl.orchestrator.publish import Gate
from flexmarl.records import (
    EpisodeId,
    FinishReason,
    Generation,
    GenerationRequest,
    GroupId,
    GroupRecord,
    GroupState,
    InstanceId,
    LossReport,
    MicroBatch,
    PolicyName,
    SampleId,
    Version,
)
from flexmarl.rollout.admission import Admission, Verdict
from flexmarl.rollout.rollout import Emit, Rollout
from flexmarl.testing.faults.faulty import Around
from flexmarl.testing.faults.watched import WatchedCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One broken rule, and the part of the run that it replaces."""

    name: str
    breaks: str
    """Description of the fault."""
    mode: str | None = None
    """The only mode in which the mutation has an effect; None if it has one in any mode."""
    rules: Rules = PRODUCTION
    pool: type[InferencePool] = InferencePool
    store: Callable[[Any], Any] = lambda store: store
    """Wraps the store."""
    cache: type[WatchedCache] = WatchedCache
    """The gradient cache of trainers."""
    settings: Callable[[RunSettings], RunSettings] = lambda settings: settings
    door: Callable[[], Any] = lambda: None
    """Makes the class of the doors at which programs play; None: the sound one. It needs the extra `gateway`."""


class _FreesSlotWhenDone(Admission):
    def may_admit(self) -> Verdict:
        playing = sum(self.state(group) is not GroupState.DONE for group in self.active)
        return Verdict(playing < self.slots, "a group that has finished playing holds no slot")


class _LosesGroups(Rollout):
    async def play(self, groups: Any, emit: Emit, *rest: Any, **more: Any) -> None:
        async def emit_most(group: GroupRecord) -> None:
            if group.group % 3 != 1 or not group.finished:
                await emit(group)

        await super().play(groups, emit_most, *rest, **more)


class _LeaksLeases(Around[ExperienceStore]):
    async def claim(self, policy: PolicyName, n: int, *, holder: str = "") -> list[SampleId]:
        return (await self.inner.claim(policy, n + 1, holder=holder))[:n]


class _KeepsRows(Around[ExperienceStore]):
    async def rewind(self, next_group: GroupId, **replay: Collection[GroupId]) -> int:
        return 0


class _KeepsLostEpisodes(Around[ExperienceStore]):
    async def discard(self, trajectories: Collection[EpisodeId]) -> int:
        return 0


class _AccumulatesTwice(WatchedCache):
    def add(self, batch: MicroBatch, *, duration_s: float) -> LossReport:
        samples = tuple(replace(sample, advantage=2 * sample.advantage) for sample in batch.samples)
        return super().add(replace(batch, samples=samples), duration_s=duration_s)


class _LosesReusedIds(WatchedCache):
    def add(self, batch: MicroBatch, *, duration_s: float) -> LossReport:
        if not self.cached.get(batch.micro_batch_id, batch):  # The cache has the id, and all its rows were dropped.
            samples = tuple(replace(sample, advantage=0.0) for sample in batch.samples)
            batch = replace(batch, samples=samples)
        return super().add(batch, duration_s=duration_s)


class _PublishesWithoutWaiting(InferencePool):
    async def load_weights(
        self, policy: PolicyName, version: Version, expected: Checksum | None = None
    ) -> dict[InstanceId, Checksum]:
        loading = asyncio.create_task(super().load_weights(policy, version, expected), name="load-unheeded")
        _unheeded.add(loading)
        loading.add_done_callback(_unheeded.discard)
        return {}


_unheeded = set["asyncio.Task[dict[InstanceId, Checksum]]"]()
"""Keeps tasks that nobody awaits, or they could be garbage collected."""


class _ServesUnchecked(InferencePool):
    async def load_weights(
        self, policy: PolicyName, version: Version, expected: Checksum | None = None
    ) -> dict[InstanceId, Checksum]:
        return await super().load_weights(policy, version, None)


class _PassesFailuresOff(InferencePool):
    async def generate(self, request: GenerationRequest, /, **how: Any) -> Generation:
        generation = await super().generate(request, **how)
        failed = generation.finish is FinishReason.ERROR
        return replace(generation, finish=FinishReason.STOP) if failed else generation


class _ForgetsInterruptedCalls(InferencePool):
    async def generate(self, request: GenerationRequest, /, **how: Any) -> Generation:
        how["interrupted"] = forget
        return await super().generate(request, **how)


class _RoundsLogprobs(InferencePool):
    async def generate(self, request: GenerationRequest, /, **how: Any) -> Generation:
        generation = await super().generate(request, **how)
        return replace(generation, logprobs=generation.logprobs.round(3))


class _ComparesWithOthers(Default):
    _before: list[float] = PrivateAttr(default_factory=list)

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        credit = super().estimate(rows)
        shift = sum(self._before)
        self._before[:] = [sum(row.reward or 0.0 for row in rows) / max(len(rows), 1)]
        shifted = {sample_id: advantage - shift for sample_id, advantage in credit.advantages.items()}
        return replace(credit, advantages=shifted)


def _mix(settings: RunSettings) -> RunSettings:
    credit = settings.credit.model_copy(update={"estimator": _ComparesWithOthers()})
    return settings.model_copy(update={"credit": credit})


class _IgnoresSize(Window):
    def take(self) -> Taken | None:
        self._size = None
        return super().take()


class _NeverShut(Gate):
    def shut(self, policies: Iterable[PolicyName]) -> None:
        return None


def _trains_unread_replies() -> Any:
    from flexmarl.gateway.episode_door import EpisodeDoor

    class TrainsUnread(EpisodeDoor):
        def left(self, replies: Any, characters: int = 0) -> None:
            self.delivered(replies)
            super().left(replies, characters)

    return TrainsUnread


def _forgets_what_was_left() -> Any:
    from flexmarl.gateway.episode_door import EpisodeDoor
    from flexmarl.gateway.heard import HeardGenerate

    class Forgetful(HeardGenerate):
        def when_settled(self, then: Callable[[], None]) -> None:
            self.left.clear()
            then()

    return type("ForgetfulDoor", (EpisodeDoor,), {"heard": Forgetful})


SOUND = Mutation(name="sound", breaks="nothing")
"""The production rules."""
MUTATIONS = (
    Mutation(
        name="slot_freed_at_take",
        breaks="a group that has finished playing no longer holds its slot",
        mode="greedy",
        rules=Rules(admission=_FreesSlotWhenDone),
    ),
    Mutation(
        name="window_ignored",
        breaks="any finished group is taken, however far beyond the oldest",
        mode="fifo",
        rules=Rules(window=_IgnoresSize),
    ),
    Mutation(
        name="gate_left_open",
        breaks="calls of a rollout that is ahead are sent to the old version",
        mode="sync",
        rules=Rules(gate=_NeverShut),
    ),
    Mutation(
        name="group_lost_on_the_way",
        breaks="some finished groups never reach collection",
        rules=Rules(rollout=_LosesGroups),
    ),
    Mutation(name="lease_leak", breaks="a claim leases one row more than it returns", store=_LeaksLeases),
    Mutation(name="rewind_keeps_rows", breaks="a resumption leaves the rows of groups it replays", store=_KeepsRows),
    Mutation(
        name="lost_episode_keeps_rows",
        breaks="the rows of an episode that is played again stay, when its rollout worker was lost",
        store=_KeepsLostEpisodes,
    ),
    Mutation(name="accumulated_twice", breaks="gradients enter the cache twice", cache=_AccumulatesTwice),
    Mutation(
        name="reused_id_lost",
        breaks="rows under the id of a micro-batch that was dropped are counted, and add no gradient",
        mode="microbatch",
        cache=_LosesReusedIds,
    ),
    Mutation(
        name="publish_without_waiting",
        breaks="a publication returns before the instances hold it",
        pool=_PublishesWithoutWaiting,
    ),
    Mutation(
        name="served_unchecked",
        breaks="a version is stamped whatever checksum the instance reports",
        pool=_ServesUnchecked,
    ),
    Mutation(
        name="failed_call_trained", breaks="a call that failed passes for a short answer", pool=_PassesFailuresOff
    ),
    Mutation(name="logprobs_rounded", breaks="rows hold log-probabilities with three digits", pool=_RoundsLogprobs),
    Mutation(
        name="interrupted_call_lost",
        breaks="of a call that its workflow left, what was sampled is not written",
        pool=_ForgetsInterruptedCalls,
    ),
    Mutation(
        name="unread_reply_trained",
        breaks="a reply whose program went away is trained as if it had been read",
        door=_trains_unread_replies,
    ),
    Mutation(
        name="left_reply_unaccounted",
        breaks="what was sampled for a program that went away is in no account",
        door=_forgets_what_was_left,
    ),
    Mutation(name="credit_mixes_groups", breaks="a group's rewards are compared with another one's", settings=_mix),
)
"""All mutations. A law must catch each of them."""
