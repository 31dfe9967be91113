"""Engines by the `type` of their settings: the one place that turns settings into a live instance."""

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
    """What a factory may use to make one instance; it takes what its engine needs."""

    policy: PolicyName
    make_model: Callable[[], Any]
    """A fresh torch module per call, which the engine then owns."""
    decode: Callable[[Sequence[int]], str]
    store: ObjectStore
    thread: DeviceThread
    device: str = "cpu"
    """Where the model lives: `cpu`, `cuda` or `cuda:1`."""
    deterministic: bool = False
    """Whether a request must get the same bits in any company (law 6)."""
    verify: Verify = "full"
    """The checksum that a load returns: of every byte that is served, or of names, dtypes and shapes."""
    version: Version = FIRST_VERSION


class EngineSettings(Protocol):
    """Any settings class of ENGINES."""

    factory: ClassVar[str]
    """`module:function` of `(settings, EngineParts) -> engine`; imported only when this engine is made."""


def make_engine(settings: EngineSettings, parts: EngineParts) -> InferenceEngine:
    """A live instance of the engine that the settings are of."""
    return pkgutil.resolve_name(settings.factory)(settings, parts)
