"""Scorers that must be waited for, and what equal values are to hidden tests."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import EpisodeError
from flexmarl.events.safe_json import parse_json
from flexmarl.records import Task
from flexmarl.tasks.scorers import Scores, needs_box, scores
from flexmarl.tasks.scorers.python_tests import code_of, hidden_tests, python_tests, reference_of, same

ASKED: list[str] = []


async def closeness(answer: str, reference: str) -> float:
    ASKED.append(answer)
    await asyncio.sleep(0)
    return float("nan") if answer == "no number" else len(answer) / len(reference)


TASK = Task(input_id="a", prompt="?", reference="four", scorer=closeness)


def test_a_coroutine_function_is_a_scorer_and_equal_answers_are_asked_once() -> None:
    ASKED.clear()

    async def run() -> list[float]:
        kept = Scores()
        return list(await asyncio.gather(*(kept.score(TASK, answer) for answer in ("ab", "ab", "abcd", "ab"))))

    assert asyncio.run(run()) == [0.5, 0.5, 1.0, 0.5]
    assert sorted(ASKED) == ["ab", "abcd"]


def test_a_scorer_that_must_be_waited_for_says_so_and_one_without_a_number_is_named() -> None:
    with pytest.raises(EpisodeError, match=r"closeness must be waited for; write `await team\.score\(answer\)`"):
        TASK.score("ab")
    with pytest.raises(EpisodeError, match="closeness returned nan"):
        asyncio.run(Scores().score(TASK, "no number"))


def test_one_that_is_cancelled_leaves_its_place_to_the_next() -> None:
    async def run() -> float:
        kept = Scores()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(kept.score(TASK, "ab"))
            second = group.create_task(kept.score(TASK, "ab"))
            await asyncio.sleep(0)
            first.cancel()
        return second.result()

    assert asyncio.run(run()) == 0.5


def test_scores_that_are_kept_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.clear()
    monkeypatch.setattr(scores, "MOST_KEPT", 2)

    async def run() -> None:
        kept = Scores()
        for answer in ("a", "b", "c", "c", "a"):
            await kept.score(TASK, answer)

    asyncio.run(run())
    assert ASKED == ["a", "b", "c", "a"]


def test_only_a_scorer_with_boxes_needs_them() -> None:
    assert [needs_box(one) for one in (closeness, python_tests, "exact")] == [False, True, False]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_what_is_expected_equals_itself_through_a_reference(value: object) -> None:
    (test,) = hidden_tests(reference_of("f", [((value,), value)])).tests
    assert same(test.returns, value)
    assert same(value, test.arguments[0])


@pytest.mark.parametrize(
    ("expected", "returned"),
    [
        ("1", "true"),
        ("false", "0"),
        ("1", '"1"'),
        ("[1, 2]", "[2, 1]"),
        ("[1]", "1"),
        ("{}", "[]"),
        ('{"a": 1}', '{"a": 1, "b": 2}'),
        ("0.1", "0.1000001"),
        ("1.5", "1" + "0" * 400),
        ("null", "0"),
        ("9007199254740993", "9007199254740992"),
    ],
)
def test_these_are_not_equal(expected: str, returned: str) -> None:
    assert not same(parse_json(expected), parse_json(returned))


@given(st.text(alphabet="`\npython x=1", max_size=60))
def test_any_answer_has_code(answer: str) -> None:
    assert code_of(answer) in answer
