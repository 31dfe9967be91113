"""What an agent's act came to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flexmarl.records import FinishReason, Turn


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call and what came back."""

    name: str
    """Of the tool; empty if the call could not be understood."""
    argument: str
    """What the tool was given; of a call that could not be understood, the text that made it."""
    result: str
    """What the agent read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an agent answered to one observation, after its tool calls."""

    text: str
    """The final message; the messages that called tools are in `transcript`."""
    parsed: Any
    """What the agent's parser made of the text; None if it made nothing."""
    turns: tuple[Turn, ...]
    """The calls it took."""
    calls: tuple[ToolUse, ...]
    transcript: str
    """All that was said and read, line under line: the work, for a verifier to see."""
    finish: FinishReason
    """Of the last call; `length` means that the text was cut."""
    unresolved: bool = False
    """The text holds a tool call that was not run: the budget was spent, or the text was cut."""
    give: Callable[[tuple[Turn, ...], float, str], None] = field(repr=False)
    """Where rewards go."""

    @property
    def answer(self) -> str:
        """What was parsed, if that is a text or a number, else the text: what a task can score."""
        is_plain = isinstance(self.parsed, str | int | float) and not isinstance(self.parsed, bool)
        return str(self.parsed) if is_plain else self.text

    def reward(self, reward: float, part: str = "outcome") -> None:
        """Adds to the reward of this reply's turns; rewards of one `part` add up, and are logged apart from others."""
        self.give(self.turns, reward, part)
