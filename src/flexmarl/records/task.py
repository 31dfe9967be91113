"""Task: one question for the team."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


def exact_match(answer: str, reference: str) -> float:
    """1.0 if the answer equals the reference apart from surrounding white space, else 0.0."""
    return float(answer.strip() == reference.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question for the team and how to score an answer to it."""

    input_id: str
    """Unique in its source, e.g. `mul5x5-17`; the first part of every sample id of this task."""
    prompt: str
    reference: str = ""
    scorer: Callable[[str, str], float] = exact_match
    """(answer, reference) -> score; a module-level function, so that the task can cross processes."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the workflow or the environment needs besides (level, seed, files)."""

    def score(self, answer: str) -> float:
        """The score of an answer, by `scorer`; 1.0 is a full success."""
        return float(self.scorer(answer, self.reference))
