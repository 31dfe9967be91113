"""The learning problem of the code team: questions, what they stand for, hints of the cold start, what a try tells."""

import asyncio
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from examples.code_team.demonstrations import HINT, chosen, demonstration, telling  # noqa: E402
from examples.code_team.tasks import (  # noqa: E402
    LANGUAGE,
    code_task,
    draw,
    examples_of,
    fitting,
    meaning,
    question_of,
    split_of,
)
from examples.code_team.workflow import program, question, review, tried  # noqa: E402
from examples.cold_start import encode  # noqa: E402
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from flexmarl.tasks import Split, check_disjoint  # noqa: E402
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks  # noqa: E402
from flexmarl.tasks.scorers.python_tests import hidden_tests  # noqa: E402


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_stays_in_its_split_and_one_expression_passes_its_tests(
    seed: int, index: int, split: Split
) -> None:
    task = code_task(seed, index, split)
    assert task == code_task(seed, index, split)
    assert split_of(task.prompt) == split
    tests = hidden_tests(task.reference)
    passing = [
        text for text, compute in LANGUAGE.items() if tests.passed([compute(*test.arguments) for test in tests.tests])
    ]
    assert meaning(examples_of(task.prompt)) in passing


def test_hidden_tests_leave_one_expression() -> None:
    several = 0
    for index in range(500):
        tests = hidden_tests(code_task(1, index, "train").reference)
        several += (
            sum(tests.passed([compute(*test.arguments) for test in tests.tests]) for compute in LANGUAGE.values()) > 1
        )
    assert several == 0


def test_no_question_is_in_both_splits() -> None:
    check_disjoint(GeneratorSource(GeneratorTasks(name="code_team"), seed=1), num_train=1000, num_held_out=200)


def test_a_question_says_its_examples_and_stands_for_one_expression() -> None:
    rng = random.Random(0)
    for _ in range(300):
        examples = draw(rng)
        assert examples_of(question_of(examples)) == examples
        assert len(fitting(examples)) == 1


def test_expressions_of_demonstrations_are_right_as_often_as_the_hint_says() -> None:
    rng = random.Random(1)
    asked = [question_of(draw(rng)) for _ in range(4000)]
    right = sum(chosen(rng, one) == meaning(examples_of(one)) for one in asked) / len(asked)
    assert right == pytest.approx(HINT + (1 - HINT) / len(LANGUAGE), abs=0.03)


def test_the_examples_that_tell_are_those_that_a_wrong_expression_does_not_fit() -> None:
    assert telling("3,5:15;2,7:14;2,2:4", "a+b") == [1, 2]
    assert telling("3,5:15;2,7:14;4,1:4", "a*b") == []


def test_only_what_the_coder_and_the_tester_say_is_demonstrated() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(2)
    for _ in range(50):
        messages = demonstration(rng)
        shown = encode(tokenizer, messages)
        assert tokenizer.decode(shown.ids[shown.trained]) == messages[-1]["content"] + "<|end|>"
        assert len(shown.ids) <= 96


def test_a_try_runs_the_expression_on_the_example_that_was_picked() -> None:
    task = code_task(1, 0, "train")
    asked: list[tuple[str, str]] = []

    async def score(answer: str, *, reference: str) -> float:
        asked.append((answer, reference))
        return 1.0

    team: Any = SimpleNamespace(score=score)
    assert asyncio.run(tried(task, team, "a+b", "2")) == 1.0
    assert asyncio.run(tried(task, team, "a+b", "4")) is None
    ((answer, reference),) = asked
    (test,) = hidden_tests(reference).tests
    a, b, result = task.data["examples"][1]
    assert (test.arguments, test.returns) == ([a, b], result)
    assert answer == program(task, "a+b")


def test_what_agents_read_is_bounded_whatever_was_written() -> None:
    assert question("3,5:15") == "3,5:15?"
    assert question("3,5:15", "a+b") == "3,5:15!a+b"
    assert review("3,5:15", "x" * 100) == "3,5:15|" + "x" * 16
    assert review("3,5:15", "") == "3,5:15|-"
