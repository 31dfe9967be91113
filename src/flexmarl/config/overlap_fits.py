"""Decides whether the settings that say when tasks are played and rows are trained fit one another.

`mode`, `pipeline.ahead`, `pipeline.updates`, `credit.ready`, `credit.streaming` and `deterministic`; the table of what
each of them decides is in docs/architecture.md, section Modes.
"""

from collections.abc import Iterator, Mapping

from flexmarl.credit.settings import CreditSettings
from flexmarl.orchestrator.settings import Mode, PipelineSettings
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.streamable import obstacle


def overlap_misfits(
    mode: Mode,
    pipeline: PipelineSettings,
    credit: CreditSettings,
    training: Mapping[str, TrainingSettings],
    *,
    deterministic: bool,
) -> Iterator[str]:
    """Yields a sentence for each two settings that exclude each other. `training` has the trained policies."""
    yield from _memory_has_an_order(mode, credit)
    yield from _rows_can_be_ready(mode, credit)
    yield from _rows_can_stream(mode, credit, training, deterministic=deterministic)
    yield from _steps_can_overlap(mode, pipeline)
    yield from _policies_can_update_apart(mode, pipeline, credit)
    yield from _groups_can_be_replaced(mode, credit)
    if deterministic:
        yield from _bits_can_repeat(mode, credit)


def _memory_has_an_order(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if credit.needs == "state" and mode in (Mode.ASYNC, Mode.GREEDY):
        yield (
            f"credit.estimator remembers from episode to episode, in a fixed order, but mode '{mode.value}' "
            f"takes groups as they finish; use mode=microbatch or mode=fifo, or an estimator without a memory"
        )


def _rows_can_be_ready(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if credit.ready == "group":
        return
    if not mode.synchronous:
        yield f"credit.ready is 'trajectory', but mode '{mode.value}' takes whole groups; use credit.ready=group"
    if credit.needs != "row":
        yield (
            f"credit.ready is 'trajectory', but {', '.join(f'credit.{key}' for key in credit.compares)} "
            f"compares the rows of a {credit.needs}; use credit.estimator.type=reinforce without terms that "
            f"compare episodes, whitening or balance, or credit.ready=group"
        )
    elif credit.filter is not None:
        yield (
            "credit.ready is 'trajectory', but credit.filter judges whole groups; use credit.filter=null, or "
            "credit.ready=group"
        )


def _rows_can_stream(
    mode: Mode, credit: CreditSettings, training: Mapping[str, TrainingSettings], *, deterministic: bool
) -> Iterator[str]:
    if credit.streaming == "off":
        return
    if mode is not Mode.MICROBATCH:
        yield (
            f"credit.streaming is 'linear', but in mode '{mode.value}' rows wait for more than their "
            f"group, or are not on-policy; use mode=microbatch, or credit.streaming=off"
        )
    if deterministic or credit.ready == "trajectory":
        yield (
            "credit.streaming is 'linear', for which deterministic must be false, since which episode ends first "
            "depends on time, and credit.ready 'group'; use credit.streaming=off otherwise"
        )
    for name, settings in training.items():
        if because := obstacle(settings):
            yield f"credit.streaming is 'linear', but policies.{name}.training.{because}; or credit.streaming=off"


def _groups_can_be_replaced(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if credit.filter and credit.filter.refill and not mode.synchronous:
        yield (
            f"credit.filter.refill is true, but mode '{mode.value}' admits another task for every dropped "
            f"one anyway; use refill=false there"
        )


def _steps_can_overlap(mode: Mode, pipeline: PipelineSettings) -> Iterator[str]:
    if pipeline.ahead and mode not in (Mode.SYNC, Mode.MICROBATCH):
        yield (
            f"pipeline.ahead is true, but in mode '{mode.value}' rollout does not wait for updates, or engines sleep "
            f"meanwhile; use mode=microbatch, or pipeline.ahead=false"
        )


def _policies_can_update_apart(mode: Mode, pipeline: PipelineSettings, credit: CreditSettings) -> Iterator[str]:
    if pipeline.updates == "together":
        return
    if mode.synchronous:
        yield (
            f"pipeline.updates is 'per_policy', but in mode '{mode.value}' all policies end a step together; "
            f"use mode=async, or pipeline.updates=together"
        )
    if credit.needs not in ("row", "group"):
        yield (
            f"pipeline.updates is 'per_policy', but credit compares a whole {credit.needs}; "
            f"use pipeline.updates=together"
        )


def _bits_can_repeat(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if not mode.synchronous:
        yield (
            f"deterministic is true, but mode is '{mode.value}', in which what a batch holds depends on time; "
            f"use mode=microbatch, or deterministic=false"
        )
    if credit.ready == "trajectory":
        yield (
            "deterministic is true, but credit.ready is 'trajectory', and which trajectory ends first depends on "
            "time; use credit.ready=group, or deterministic=false"
        )
