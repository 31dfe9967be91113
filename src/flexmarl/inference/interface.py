"""What every server of tokens can do."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import EngineUse, Generation, GenerationRequest, PolicyName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do. Asked once, when the pool takes it in; without arguments: it generates, and no more.

    A method that the record denies need not exist, and is never called.
    """

    loads_weights: bool = False
    """It has `load_weights`: a trained policy needs that, and so does an instance that moves to another policy."""
    sleeps: bool = False
    """It has `sleep` and `wake`. One without holds no device that a trainer could need in mode `colocated`."""
    deterministic: bool = False
    """A request gets the same bits in any company: a run with `deterministic: true` needs that (law 6)."""
    continues: bool = False
    """It goes on with a response that another instance began (`GenerationRequest.offset`), token by token the one that
    it would have sampled itself. `pool.on_move: continue` needs that; without, a move lets requests end first."""
    raw_logprobs: bool = False
    """`Generation.raw_logprobs` are of the model's own distribution at any temperature and filter. Without, they are
    those of the sampling distribution, and a trained policy must be sampled at temperature 1 without filters."""
    adapters: bool = False
    """`load_weights` also takes an adapter alone (objects/adapter.py), over the model that the engine began with, and
    returns the checksum of both: `training.publish: adapter` needs that."""


class InferenceEngine(Protocol):
    """One live replica that serves one policy. Called by the pool, from one event loop.

    Any number of `generate` calls may run at once; their requests share the batch. Closing the iterator early, or
    cancelling the task that reads it, aborts what is left of that call. A request that cannot be served (too long,
    say) yields a Generation with finish `error`; only the loss of the whole engine raises EngineError.
    """

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests at the next token boundary with finish `abort`; unknown or finished ids are no error."""
        ...

    async def usage(self) -> EngineUse:
        """The load right now."""
        ...

    async def capabilities(self) -> EngineCapabilities:
        """What this engine can do, the same at every call."""
        ...

    async def close(self) -> None:
        """Aborts what runs and frees the device. Calling it twice is no error."""
        ...


class WeightedEngine(InferenceEngine, Protocol):
    """An engine whose weights we own. Its capabilities say that it `loads_weights`, and whether it `sleeps`."""

    async def load_weights(self, policy: PolicyName, version: Version, key: ObjectKey) -> Checksum:
        """Gets the object, swaps the weights in place at a token boundary, and returns the checksum of what it serves.

        Running requests go on with the keys and values they have; their version runs record the change. The version
        is stamped only after the engine's own checksum. Raises EngineError if names, shapes or dtypes do not fit;
        then the old weights stay. Asleep or not.
        """
        ...

    async def sleep(self) -> None:
        """Gives up the device's memory: keys, values and weights. Returns when it is free; twice is no error.

        Requests without an answer stand still, those that come meanwhile wait; an abort still ends them.
        """
        ...

    async def wake(self) -> None:
        """Serves on from where it fell asleep, with the weights it had or has loaded since; twice is no error."""
        ...
