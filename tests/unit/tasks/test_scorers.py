"""Answers are scored as their text means."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.records import Task
from flexmarl.records.scorers import SCORERS, same_number, scorer


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("42", "42", 1.0),
        ("6*7 = 42.", "#### 42", 1.0),
        ("1,234", "1234", 1.0),
        ("42.0", "42", 1.0),
        ("it is -5", "-5", 1.0),
        ("\N{MINUS SIGN}5", "-5", 1.0),
        ("1e3", "1000", 1.0),
        ("42 or 43", "42", 0.0),
        ("none", "42", 0.0),
        ("", "", 0.0),
        ("4 2", "42", 0.0),
        ("between 3-5", "5", 1.0),
        ("12 - -5", "-5", 1.0),
        ("1, 2,3", "3", 1.0),
        ("12,345,678.5", "12345678.5", 1.0),
        ("1234,567", "567", 1.0),
        ("1e999999999999999999999", "1", 0.0),
    ],
)
def test_the_last_number_decides(answer: str, reference: str, score: float) -> None:
    assert same_number(answer, reference) == score


@given(st.text(max_size=40), st.integers())
def test_no_answer_makes_a_scorer_raise(answer: str, reference: int) -> None:
    for name in ("exact", "number"):
        assert SCORERS[name](answer, str(reference)) in (0.0, 1.0)


@given(st.integers(), st.text(alphabet="ab .:", max_size=5))
def test_a_number_is_found_behind_any_words(number: int, words: str) -> None:
    assert same_number(f"{words} {number}", str(number)) == 1.0


def test_scorers_cross_processes_and_have_one_name_each() -> None:
    for name in ("exact", "number"):
        assert pickle.loads(pickle.dumps(SCORERS[name])) is SCORERS[name]
    with pytest.raises(ConfigError, match="two scorers are called 'number'"):
        scorer("number")(lambda answer, reference: 0.0)


@pytest.mark.parametrize(("given", "told"), [("good", "'good'"), (None, "None"), (float("nan"), "nan"), (1e999, "inf")])
def test_a_scorer_that_returns_no_finite_number_is_named_with_what_it_returned(given: object, told: str) -> None:
    def closeness(answer: str, reference: str) -> object:
        return given

    task = Task(input_id="a", prompt="?", reference="1", scorer=closeness)  # type: ignore[arg-type]
    with pytest.raises(EpisodeError, match=f"the scorer closeness returned {told}; return a finite number"):
        task.score("1")
