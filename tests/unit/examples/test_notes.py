"""The notes that opencode reads in examples/black_box/opencode.yaml, and what its calls are worth."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from examples.black_box.notes import note, worth


@dataclass
class Call:
    """A delivered reply, and what it got."""

    seat: str
    text: str
    got: dict[str, float] = field(default_factory=dict)

    def reward(self, reward: float, part: str = "outcome") -> None:
        self.got[part] = reward


def judged(*calls: Call, reference: str = "42") -> dict[str, float]:
    reported: dict[str, float] = {}
    team: Any = SimpleNamespace(report=lambda **values: reported.update(values))
    task: Any = SimpleNamespace(reference=reference)
    worth(task, team, "whatever was printed", calls)  # type: ignore[arg-type]
    return reported


def test_every_second_note_is_long_and_each_says_its_number_first() -> None:
    short, long = note(1, 0, "train"), note(1, 1, "train")
    assert len(short.prompt) < 100
    assert len(long.prompt) > 1000
    for task in (short, long):
        assert task.prompt.startswith(f"There are {task.reference} ")
    assert note(1, 0, "train") == short != note(2, 0, "train")


def test_a_right_answer_is_worth_more_the_shorter_it_is() -> None:
    first, brief, wordy = Call("coder", "## Objective 41"), Call("coder", "42"), Call("coder", "x" * 300 + " 42")
    assert judged(first, brief) == {"success": 1.0, "characters": 2}
    assert first.got == {"outcome": 1.0}, "the summary before it has its share of the outcome"
    assert brief.got == {"outcome": 1.0, "short": pytest.approx(0.495)}
    assert judged(first, wordy)["success"] == 1.0
    assert wordy.got == {"outcome": 1.0, "short": 0.0}


@pytest.mark.parametrize("text", ["", "There are many.", "42 of 50", "142"])
def test_another_number_is_wrong(text: str) -> None:
    assert judged(Call("coder", text))["success"] == 0.0


@pytest.mark.parametrize(("text", "reward"), [("Pens in notes", 1.0), ("two\nlines", 0.0), ("x" * 51, 0.0), (" ", 0.0)])
def test_a_title_is_worth_its_form(text: str, reward: float) -> None:
    title = Call("titler", text)
    judged(Call("coder", "42"), title)
    assert title.got == {"outcome": reward}


def test_an_episode_without_a_delivered_answer_is_a_failure_to_answer() -> None:
    assert judged()["success"] == 0.0
