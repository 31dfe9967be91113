"""Decides what the tokens of an episode's door amount to: each is delivered, left out or failed (law 13).

sampled by engines = delivered + undelivered (FILTERED, with the reason) + failed (FAILED, with the reason)
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flexmarl.records import SampleId

Fate = Literal["delivered", "undelivered", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """One call."""

    seat: str
    tokens: int
    """Tokens that the engine sampled for it."""
    fate: Fate
    because: str = ""


@dataclass(slots=True)
class Account:
    """The calls of one episode's door."""

    rows: dict[SampleId, AccountRow] = field(default_factory=dict)
    sampled: dict[SampleId, int] = field(default_factory=dict)
    """Tokens of each answer of an engine, whatever became of it."""
    continuity: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    retokenised: int = 0
    asks: Counter[str] = field(default_factory=Counter)
    """Requests, by what they were: new, joins, again."""

    def add(self, sample_id: SampleId, row: AccountRow) -> None:
        """Adds the fate of a call. Raises ValueError if it has one already."""
        if sample_id in self.rows:
            raise ValueError(f"call {sample_id} has two fates: {self.rows[sample_id]} and {row}")
        self.rows[sample_id] = row

    def tokens(self, fate: Fate) -> int:
        """Tokens of the calls with this fate."""
        return sum(row.tokens for row in self.rows.values() if row.fate == fate)

    @property
    def undelivered(self) -> Mapping[str, int]:
        """Tokens that nobody read, by the reason."""
        return self._by_reason("undelivered")

    @property
    def failed(self) -> Mapping[str, int]:
        """Tokens of calls that failed, by the reason."""
        return self._by_reason("failed")

    @property
    def missing(self) -> int:
        """Tokens that engines sampled and no row has; 0 if the account adds up."""
        return sum(self.sampled.values()) - sum(row.tokens for row in self.rows.values())

    def _by_reason(self, fate: Fate) -> Mapping[str, int]:
        tokens = Counter[str]()
        for row in self.rows.values():
            if row.fate == fate:
                tokens[row.because] += row.tokens
        return dict(tokens)


def undelivered(read: int, tokens: int) -> str:
    """The reason of a row whose reply was not delivered.

    >>> undelivered(3, 12)
    'undelivered: 3 of 12 tokens'
    """
    return f"undelivered: {read} of {tokens} tokens"
