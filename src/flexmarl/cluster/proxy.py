"""Proxy of a resident's hosted object: an object with the methods of its contract, each of which crosses to it.

    method ───────────────► one crossing, in the order of the calls
    method that streams ──► Streams ──► crossings shared by all streams, and by what is sent
    close ────────────────► the method of the hosted object, then the end of the resident

A contract is a Protocol whose methods are all `async def`, or return an AsyncIterator. Marks on its methods, `alters`
and `restores`, say what a cancelled call means; `sends` says that nobody waits for a call.
"""

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar, get_origin, get_type_hints

from flexmarl.cluster.interface import Address, ResidentSpec
from flexmarl.cluster.streams import Streams
from flexmarl.errors import FlexmarlError, WorkerError

CLOSE_TIMEOUT_S = 10.0
"""Seconds for work still under way when a resident is closed. After them the resident is ended, even if it hangs."""
F = TypeVar("F", bound=Callable[..., Any])


class Channel(Protocol):
    """Carries calls to one resident. Its cluster makes it."""

    async def cross(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the hosted object, or of its host.

        Calls arrive in the order in which they are made. Raises the method's error, or WorkerError if the resident is
        lost.
        """
        ...

    async def stop(self) -> None:
        """Ends the resident."""
        ...


def alters(method: F) -> F:
    """Marks a method of a contract that changes a state which must stay known.

    If such a call is cancelled, its work continues unseen, and nobody knows whether the state holds that work. So
    later calls are refused, until a method that `restores` has succeeded.
    """
    method.__dict__["alters_state"] = True
    return method


def restores(method: F) -> F:
    """Marks a method of a contract that replaces the whole state, whatever it was."""
    method.__dict__["restores_state"] = True
    return alters(method)


def sends(method: F) -> F:
    """Marks a method of a contract that returns nothing, and for which callers do not wait: it crosses with streams.

    Calls arrive in their order, also among openings of streams. If one fails, all streams of its resident end.
    """
    method.__dict__["is_sent"] = True
    return method


class Crossings:
    """The state that all methods of one proxy share."""

    def __init__(self, spec: ResidentSpec[Any], channel: Channel, tasks: asyncio.TaskGroup) -> None:
        """Tasks that carry streams run in `tasks`."""
        self.spec = spec
        self._channel = channel
        self._streams = Streams(channel, tasks, name=spec.name)
        self._numbers = itertools.count(1)
        self._abandoned = (0, "")
        """Number and description of the last altering call that was cancelled; number 0 if the state is known."""
        self._closing = False

    async def call(self, mark: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Makes one call of the contract's method `mark`."""
        method, number = mark.__name__, next(self._numbers)
        abandoned, what = self._abandoned
        if abandoned and not hasattr(mark, "restores_state"):
            raise self._error(f"{what} was cancelled while it ran, so the state of the resident is unknown")
        try:
            await self._streams.sent()
            result = await self._channel.cross(method, *args, **kwargs)
        except asyncio.CancelledError:
            if hasattr(mark, "alters_state"):
                self._abandoned = max(self._abandoned, (number, described_call(method, args)))
            raise
        except WorkerError as error:
            raise self._error(f"it was lost in '{method}': {error}") from error
        # Only success restores: after a `load` that failed, the state is still the unknown one.
        if hasattr(mark, "restores_state") and self._abandoned[0] < number:
            self._abandoned = (0, "")
        return result

    def send(self, method: str, /, *args: Any) -> None:
        """Sends one call."""
        try:
            self._streams.send(method, args)
        except WorkerError as error:
            raise self._error(f"it was lost before '{method}': {error}") from error

    async def stream(self, method: str, /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Yields the items of one stream. Closing this iterator closes the hosted object's iterator."""
        items = self._streams.open(method, args, kwargs)
        try:
            async for item in items:
                yield item
        except WorkerError as error:
            raise self._error(f"it was lost in '{method}': {error}") from error
        finally:
            await items.aclose()

    async def close(self) -> None:
        """Closes the hosted object, if it still answers, and ends the resident. Calling it twice is allowed."""
        if self._closing:
            return
        self._closing = True
        try:
            with suppress(FlexmarlError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._streams.sent()
                    await self._channel.cross("close")
                    await self._streams.ended()
        finally:
            self._streams.lose(WorkerError(f"{self.spec.name} is closed"))
            await self._channel.stop()

    def _error(self, what: str) -> FlexmarlError:
        advice = f"; {self.spec.advice}" if self.spec.advice else ""
        return self.spec.error(f"{self.spec.name}: {what}{advice}")


class Proxy(Generic[F]):
    """Base of all proxies. A subclass has the methods of one contract."""

    def __init__(self, crossings: Crossings) -> None:
        self._crossings = crossings

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._crossings.spec.name}>"


def proxy_of(spec: ResidentSpec[Any], channel: Channel, tasks: asyncio.TaskGroup) -> Any:
    """Makes an object with the methods of the spec's contract, which cross the channel."""
    return proxy_class(spec.contract)(Crossings(spec, channel, tasks))


@lru_cache
def proxy_class(contract: type) -> type[Proxy[Any]]:
    """The class of all proxies of a contract.

    Raises TypeError if a public member is neither an `async def` nor a method that returns an AsyncIterator.
    """
    methods = {name: forwarded(method) for name, method in methods_of(contract).items()}
    return type(f"{contract.__name__}Proxy", (Proxy,), {"__doc__": contract.__doc__, **methods})


def reached(contract: type, address: Address) -> Any:
    """Makes an object with the methods of a contract, which calls a resident by its address. Streams are not offered.

    Each call crosses by itself, from whichever process the caller is in.
    """

    def forward(name: str) -> Callable[..., Any]:
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await address.call(name, *args, **kwargs)

        return call

    methods = {name: forward(name) for name, method in methods_of(contract).items() if not streams(method)}
    return type(f"{contract.__name__}Reached", (), methods)()


@lru_cache
def methods_of(contract: type) -> dict[str, Callable[..., Any]]:
    """The methods of a contract by name, including inherited ones.

    >>> class Greeter(Protocol):
    ...     async def greet(self, name: str) -> str: ...
    >>> list(methods_of(Greeter))
    ['greet']
    """
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(contract.__mro__):
        if base in (object, Protocol, Generic):
            continue
        for name, member in vars(base).items():
            if name.startswith("_"):
                continue
            if not inspect.isfunction(member) or not (inspect.iscoroutinefunction(member) or streams(member)):
                raise TypeError(f"{contract.__name__}.{name} is no `async def` and returns no AsyncIterator")
            found[name] = member
    return found


def streams(method: Callable[..., Any]) -> bool:
    """True if a method of a contract returns an async iterator."""
    return get_origin(get_type_hints(method).get("return")) is AsyncIterator


def forwarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the method of a proxy that stands for a contract's method."""
    if method.__name__ == "close":

        async def close(self: Proxy[Any]) -> None:
            await self._crossings.close()

        return _like(close, method)
    if streams(method):

        def stream(self: Proxy[Any], *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            return self._crossings.stream(method.__name__, *args, **kwargs)

        return _like(stream, method)

    if hasattr(method, "is_sent"):

        async def send(self: Proxy[Any], *args: Any) -> None:
            self._crossings.send(method.__name__, *args)

        return _like(send, method)

    async def call(self: Proxy[Any], *args: Any, **kwargs: Any) -> Any:
        return await self._crossings.call(method, *args, **kwargs)

    return _like(call, method)


def _like(forward: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    forward.__name__, forward.__doc__ = method.__name__, method.__doc__
    return forward


def described_call(method: str, args: tuple[Any, ...]) -> str:
    """A call in few words: its method, and its first argument if that is a string.

    >>> described_call("accumulate", ("solver/0/1", ["..."]))
    "'accumulate' of solver/0/1"
    """
    return f"'{method}' of {args[0]}" if args and isinstance(args[0], str) else f"'{method}'"
