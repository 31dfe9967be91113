"""Interface of inference engines, and the factory that turns an engine's settings into a live engine."""

import pkgutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.settings import EngineSettings
from flexmarl.objects.interface import Checksum, ObjectStore
from flexmarl.objects.settings import Verify
from flexmarl.records import EngineUse, Generation, GenerationProgress, GenerationRequest, PolicyName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """Optional abilities of an engine. The pool asks once, when it takes the engine in. By default it only generates.

    A method that the record denies need not exist, and is never called.
    """

    loads_weights: bool = False
    """It has `load_weights`. A trained policy needs this, and so does an instance that moves to another policy."""
    sleeps: bool = False
    """It has `sleep` and `wake`. An engine without them must hold no device that trainers use in mode `colocated`."""
    deterministic: bool = False
    """A request gets the same bits whichever requests share its batch. `deterministic: true` needs this (law 6)."""
    continues: bool = False
    """It continues a response that another instance began (`GenerationRequest.offset`), with exactly the tokens that it
    would have sampled itself. `pool.on_move: continue` needs this; without it, a move lets requests end first."""
    raw_logprobs: bool = False
    """`Generation.raw_logprobs` belong to the model's own distribution, at any temperature and filter. If False, they
    belong to the sampling distribution, and a trained policy must be sampled at temperature 1 without filters."""
    drawn_logprobs: bool = True
    """`Generation.logprobs` belong to the distribution that was sampled from, at any temperature and filter. If False,
    they equal `raw_logprobs`: a policy that is trained with a correction must be sampled at temperature 1 without
    filters."""
    adapters: bool = False
    """`load_weights` also takes an adapter alone (PublishedAdapter), applied to the model that the engine began with,
    and returns the checksum of both. `training.publish: adapter` needs this."""


class InferenceEngine(Protocol):
    """One live replica that serves one policy. Called by the pool, from one event loop.

    Any number of `generate` calls may run at once; their requests share the batch. Closing the iterator early, or
    cancelling the task that reads it, aborts the unanswered requests of that call. A request that cannot be served (for
    example, one that is too long) yields a Generation with finish `error`. Only the loss of the whole engine raises
    EngineError.
    """

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation | GenerationProgress]:
        """Yields one Generation per request, in completion order; before it, perhaps progress of one that `streams`."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests at the next token boundary with finish `abort`. Unknown or finished ids are ignored.

        A request that comes later is not ended, whatever its id: an episode that is lost is played again.
        """
        ...

    async def usage(self) -> EngineUse:
        """The engine's load at this moment."""
        ...

    async def capabilities(self) -> EngineCapabilities:
        """The engine's optional abilities, the same at every call."""
        ...

    async def close(self) -> None:
        """Aborts running requests and frees the device. A second call does nothing."""
        ...


async def answers_of(engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
    """The answers alone, without their progress."""
    async with aclosing(cast(Any, engine.generate(requests))) as found:
        async for one in found:
            if isinstance(one, Generation):
                yield one


class WeightedEngine(InferenceEngine, Protocol):
    """An engine that loads published weights: its capabilities state `loads_weights`, and may state `sleeps`."""

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        """Gets the version (`weights_key`) and swaps the weights in place at a token boundary.

        Returns the engine's own checksum of what it serves.

        Running requests continue with the keys and values that they have, and their version runs record the change. The
        version is stamped only after the engine has computed its own checksum. If names, shapes or dtypes do not fit,
        it raises EngineError, and keeps the old weights or is lost: every later call raises EngineError then. The
        engine may be asleep.
        """
        ...

    async def sleep(self) -> None:
        """Frees the device's memory: keys, values and weights. Returns when it is free. A second call does nothing.

        Running requests pause, and new ones wait, until `wake`. An abort still ends them.
        """
        ...

    async def wake(self) -> None:
        """Resumes paused requests, with the weights that it had or has loaded since. A second call does nothing."""
        ...


FIRST_VERSION = Version(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Everything that a factory may use to make one engine. It takes the fields that its engine needs."""

    policy: PolicyName
    make_model: Callable[[], Any]
    """Makes a new torch module at each call. The engine owns it."""
    decode: Callable[[Sequence[int]], str]
    store: ObjectStore
    thread: DeviceThread
    source: str = ""
    """Folder of the model, or its name on the hub, for engines that load it themselves."""
    device: str = "cpu"
    """Device of the model: `cpu`, `cuda` or `cuda:1`."""
    sharing: int = 1
    """Engines that may share the memory of its device, this one included."""
    deterministic: bool = False
    """True if a request must get the same bits whichever requests share its batch (law 6)."""
    verify: Verify = "full"
    """The checksum that a load returns: `full` is over every byte that is served, else over names, dtypes, shapes."""
    version: Version = FIRST_VERSION
    together: tuple[PolicyName, ...] = ()
    """Further policies that the engine serves, each with an adapter on the same base, or as the base itself."""
    versions: int = 1
    """Versions of an adapter that requests may run under, the newest included: the lag of the mode and 1."""
    architecture: str = ""
    """Models of one architecture take each other's weights. "" is equal to none."""
    other: "Callable[[PolicyName], tuple[EngineSettings, EngineParts]] | None" = None
    """Settings and parts for another policy, to which the instance moves. None if it is never moved."""
    renderer: Any = None
    """The chat renderer on the policy's tokenizer, for engines that answer with texts."""
    modelled: Callable[[PolicyName], Any] | None = None
    """The costs and replies of a policy in section `simulation` (`EngineModel`), for engines that compute nothing."""


def make_engine(settings: EngineSettings, parts: EngineParts) -> InferenceEngine:
    """Makes a live engine with the factory of the settings."""
    factory = type(settings).factory
    return (pkgutil.resolve_name(factory) if isinstance(factory, str) else factory)(settings, parts)
