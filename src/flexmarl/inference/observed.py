"""What the pool reports of its instances, for the journal and the timeline; times are the event loop's."""

from collections.abc import Callable
from dataclasses import dataclass

from flexmarl.objects.interface import Checksum
from flexmarl.records import FinishReason, PolicyName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One answered request, where it was answered."""

    instance: str
    policy: PolicyName
    request_id: str
    sent_at: float
    """When this instance was given it; an earlier one may have been lost with it."""
    waited_s: float
    """Since it was asked; 0 for one that goes on after an earlier part."""
    answered_at: float
    prompt_tokens: int
    sampled_tokens: int
    kept_tokens: int
    """Those of them that instances sampled from which the request was moved."""
    reused_tokens: int
    """Prompt tokens whose keys and values the instance still had."""
    version: Version
    """The version that began the answer."""
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """One instance's load of a version, acknowledged."""

    instance: str
    policy: PolicyName
    version: Version
    checksum: Checksum
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    """One instance's move to another policy, done."""

    instance: str
    """Its name before."""
    to: PolicyName
    became: str
    """Its name now."""
    because: str
    began_at: float
    ended_at: float


@dataclass(eq=False)
class PoolObservers:
    """Who is told. Called from the event loop, in the midst of its work: they must be quick, and must not raise."""

    on_call: Callable[[CallRecord], None] = lambda call: None
    """Every answered request."""
    on_loaded: Callable[[LoadRecord], None] = lambda load: None
    """Every load whose checksum was the published one, those of replacements too."""
    on_lost: Callable[[str, str], None] = lambda instance, because: None
    """Every instance that is given up, and why; a replacement that never came to serve, too."""
    on_replaced: Callable[[str, str, Version, float], None] = lambda old, new, version, seconds: None
    """Every instance that serves in place of another one: old, new, its version, and the seconds since the loss."""
    on_moved: Callable[[MoveRecord], None] = lambda move: None
    """Every instance that serves another policy now; one that fails on the way is lost."""
