"""Decides what a call costs in which something went wrong, whatever its episode came to."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from pydantic import Field, field_validator

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import AddedTerm
from flexmarl.records import SampleId

Signal = Literal["tool_error", "format_error", "language_mix"]


class Process(AddedTerm):
    """-min(c_max, sum of c_q v_q) over what was found in the very call, v_q in [0, 1]."""

    type: Literal["process"] = "process"
    costs: Mapping[Signal, float] = dict.fromkeys(get_args(Signal), 0.05)
    """c_q, of each signal that counts."""
    most: float = Field(default=0.2, ge=0)
    """c_max."""
    language_mix_from: float = Field(default=0.1, ge=0, le=1)
    """A smaller share of letters that are foreign to the task counts as none: names and quotations."""

    @field_validator("costs")
    @classmethod
    def _costs_are_costs(cls, costs: Mapping[Signal, float]) -> Mapping[Signal, float]:
        for signal, cost in costs.items():
            if cost < 0:
                raise ValueError(f"{signal}: a cost must be at least 0, got {cost}; what is found is never paid for")
        return costs

    @property
    def may_be_negative(self) -> bool:
        """Where something went wrong in a call."""
        return self.most > 0 and any(self.costs.values())

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the signals of each call."""
        return {row.sample_id: -min(self.most, self._cost(row.signals)) for row in rows}

    def _cost(self, signals: Mapping[str, float]) -> float:
        found = {signal: signals.get(signal, 0.0) for signal in self.costs}
        if found.get("language_mix", 0.0) < self.language_mix_from:
            found["language_mix"] = 0.0
        return sum(cost * found[signal] for signal, cost in self.costs.items())
