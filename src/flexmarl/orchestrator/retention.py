"""Decides which checkpoints go when a new one is there."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One checkpoint on the disk."""

    step: int
    num_bytes: int = 0
    damage: str = ""
    """What is wrong with it; then its size is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One checkpoint that goes."""

    step: int
    because: str


def to_drop(held: Sequence[Held], *, saved: int, keep: int, budget_bytes: int | None) -> list[Drop]:
    """The checkpoints that go now that the one of step `saved`, among them, is complete; newest first.

    The saved one stays whatever it takes. Of the others the oldest go first, so that what stays is always a run of the
    newest intact ones.

    >>> held = [Held(step=step, num_bytes=10**9) for step in (1, 2, 3)]
    >>> to_drop(held, saved=3, keep=5, budget_bytes=2 * 10**9)
    [Drop(step=1, because='with it there are 3 GB, checkpoint.budget_gb is 2')]
    """
    drops: list[Drop] = []
    stay = total = 0
    for checkpoint in sorted(held, key=lambda one: one.step, reverse=True):
        total += checkpoint.num_bytes if checkpoint.step <= saved else 0
        because = ""
        if checkpoint.step > saved:
            because = f"the run went back behind it, and is at step {saved} now"
        elif checkpoint.step == saved:
            stay += 1
        elif checkpoint.damage:
            because = checkpoint.damage
        elif stay >= keep:
            because = f"checkpoint.keep is {keep}"
        elif budget_bytes is not None and total > budget_bytes:
            because = f"with it there are {total / 1e9:.3g} GB, checkpoint.budget_gb is {budget_bytes / 1e9:.3g}"
        else:
            stay += 1
        if because:
            drops.append(Drop(step=checkpoint.step, because=because))
    return drops
