"""Decides what an agent remembers of its earlier acts in an episode."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field

T = TypeVar("T")

Memory = Literal["none", "full"] | Annotated[int, Field(ge=1)]
"""`none`: every act starts anew from the role prompt; `full`: everything; n: the last n acts."""


def recall(memory: Memory, acts: Sequence[T]) -> Sequence[T]:
    """The acts that the next one starts from, oldest first.

    >>> recall(2, ["a", "b", "c"])
    ['b', 'c']
    """
    if memory == "none":
        return acts[:0]
    return acts if memory == "full" else acts[-memory:]
