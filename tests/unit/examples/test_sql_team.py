"""The learning problem of the SQL team: questions, what they mean on SQLite, hints of the cold start, rewards."""

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from examples.cold_start import encode  # noqa: E402
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.sql_team.demonstrations import HINT, clauses, demonstration  # noqa: E402
from examples.sql_team.tasks import (  # noqa: E402
    ASKED,
    COLUMNS,
    FILE,
    GOODS,
    answer,
    draw,
    goods,
    meaning,
    query,
    split_of,
    sql_task,
)
from examples.sql_team.workflow import review, same_rows  # noqa: E402
from flexmarl.tasks import Split, check_disjoint  # noqa: E402
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks  # noqa: E402
from flexmarl.tools.sql_driver import Database  # noqa: E402


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_stays_in_its_split_and_is_answered_by_its_meaning(
    seed: int, index: int, split: Split
) -> None:
    task = sql_task(seed, index, split)
    assert task == sql_task(seed, index, split)
    assert split_of(task.prompt) == split
    assert task.reference == str(answer(task.data["files"][FILE], meaning(task.prompt)))


def test_no_question_is_in_both_splits() -> None:
    check_disjoint(GeneratorSource(GeneratorTasks(name="sql_team"), seed=1), num_train=1000, num_held_out=200)


def test_other_queries_than_the_right_one_seldom_give_its_result() -> None:
    """One query for all questions is right in a sixteenth, and a little more where two counts agree."""
    rng = random.Random(0)
    right = 0
    for _ in range(1500):
        asked, script = draw(rng), goods(rng)
        guess = query(*(rng.choice(list(words.values())) for words in (ASKED, COLUMNS, GOODS)))
        right += answer(script, guess) == answer(script, meaning(asked))
    assert right / 1500 == pytest.approx(0.09, abs=0.03)


def test_clauses_of_demonstrations_are_right_as_often_as_the_hint_says() -> None:
    rng = random.Random(1)
    asked = [draw(rng) for _ in range(4000)]
    drawn = [(clauses(rng, one), meaning(one)) for one in asked]
    aggregates = sum(f"{chosen[0]}(" in wanted for chosen, wanted in drawn) / len(drawn)
    whole = sum(query(*chosen) == wanted for chosen, wanted in drawn) / len(drawn)
    assert aggregates == pytest.approx(HINT + (1 - HINT) / 4, abs=0.03)
    assert whole == pytest.approx((HINT + (1 - HINT) / 4) * (HINT + (1 - HINT) / 2) ** 2, abs=0.03)


def test_only_what_the_writer_and_the_checker_say_is_demonstrated() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(2)
    for _ in range(50):
        messages = demonstration(rng)
        shown = encode(tokenizer, messages)
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        ends = "<|end|>"
        trained = tokenizer.decode(shown.ids[shown.trained])
        assert trained == "".join(said[:-1]) + said[-1] + ends


def test_every_query_of_the_language_runs_where_the_tool_runs_it() -> None:
    database = Database(write=False, steps=1_000_000)
    database.load(goods(random.Random(3)))
    for aggregate in set(ASKED.values()):
        for column in set(COLUMNS.values()):
            for condition in set(GOODS.values()):
                assert '"error"' not in database.answer(query(aggregate, column, condition), 4, 100)


def test_results_are_compared_as_multisets() -> None:
    assert same_rows([[1, "a"], [2, "b"]], [["2", "b"], ["1", "a"]])
    assert not same_rows([[1], [1]], [[1]])
    assert not same_rows([], [[1]])


def test_the_checker_reads_the_question_and_the_result_alone() -> None:
    assert review("most price new", [[97]]) == "most price new|97"
    assert review("most price new", None) == "most price new|-"
    assert review("most price new", [[None]]) == "most price new|None"
    assert len(review("most price new", [["x" * 100]])) == len("most price new|") + 16
