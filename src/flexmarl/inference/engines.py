"""Factory of engines: the one place that turns an engine's settings into a live engine."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.interface import InferenceEngine
from flexmarl.objects.interface import ObjectStore
from flexmarl.objects.settings import Verify
from flexmarl.records import PolicyName, Version

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
    device: str = "cpu"
    """Device of the model: `cpu`, `cuda` or `cuda:1`."""
    deterministic: bool = False
    """True if a request must get the same bits whichever requests share its batch (law 6)."""
    verify: Verify = "full"
    """The checksum that a load returns: `full` is over every byte that is served, else over names, dtypes, shapes."""
    version: Version = FIRST_VERSION


class EngineSettings(Protocol):
    """Common part of the settings classes in ENGINES."""

    factory: ClassVar[str]
    """The factory `(settings, EngineParts) -> engine`, as `module:function`. Imported only when an engine is made."""


def make_engine(settings: EngineSettings, parts: EngineParts) -> InferenceEngine:
    """Makes a live engine with the factory that the settings name."""
    return pkgutil.resolve_name(settings.factory)(settings, parts)
