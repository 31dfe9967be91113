"""Decides what a response costs that comes near the length limit, or passes it (DAPO's soft punishment)."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import AddedTerm
from flexmarl.records import SampleId


class Overlong(AddedTerm):
    """-f clip((len - (Lmax - buffer)) / buffer, 0, 1)."""

    type: Literal["overlong"] = "overlong"
    max_tokens: int = Field(ge=1)
    """Lmax: here, and beyond, all of the penalty."""
    buffer: int = Field(ge=1)
    """The penalty grows over so many tokens before that."""
    penalty: float = Field(default=1.0, ge=0)
    """f."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "Overlong":
        if self.buffer > self.max_tokens:
            raise ValueError(f"buffer: {self.buffer} is more than max_tokens={self.max_tokens}; use a part of it")
        return self

    @property
    def may_be_negative(self) -> bool:
        """Where a response is too long."""
        return self.penalty > 0

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the sampled tokens of each call."""
        return {row.sample_id: -self.penalty * self._share(row.num_tokens) for row in rows}

    def _share(self, num_tokens: int) -> float:
        return min(max((num_tokens - (self.max_tokens - self.buffer)) / self.buffer, 0.0), 1.0)
