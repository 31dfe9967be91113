"""Puzzles of reasoning-gym as tasks."""

import pickle

import pytest

from flexmarl.errors import ConfigError
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks
from flexmarl.testing.plugin_checks import check_task_source

pytest.importorskip("reasoning_gym", reason="needs the extra 'reasoning_gym': make test-extras")

TWO = {"chain_sum": {"max_terms": 3, "max_digits": 2}, "leg_counting": None}


def source(datasets: object = TWO, seed: int = 3) -> GeneratorSource:
    return GeneratorTasks(name="reasoning_gym", params={"datasets": datasets}).open(seed=seed)


def test_it_is_a_sound_source() -> None:
    check_task_source(source, num_tasks=60)


def test_the_kinds_take_turns_and_an_answer_scores_wherever_it_stands() -> None:
    tasks = [source().train(index) for index in range(6)]
    assert [task.input_id for task in tasks] == [f"{kind}-train-{n}" for n in range(3) for kind in TWO]
    for task in tasks:
        assert task.reference
        assert task.score(f" {task.reference}\n") == 1.0
        assert task.score(f"<answer>1</answer> No: <answer> {task.reference} </answer>") == 1.0
        assert task.score(f"<answer>{task.reference}</answer> or <answer>no idea</answer>") < 1.0
        assert task.score("") == 0.0


def test_a_puzzle_with_many_answers_is_scored_by_its_own_rule() -> None:
    task = source({"countdown": {"min_numbers": 3, "max_numbers": 3}}).train(0)
    one = task.reference
    assert pickle.loads(pickle.dumps(task)).score(one) == 1.0
    assert task.score(f"({one})") == 1.0, "other words, the same value"
    assert task.score("1") < 0.1


def test_another_seed_makes_other_puzzles() -> None:
    assert source().train(0).prompt != source(seed=4).train(0).prompt


@pytest.mark.parametrize(
    ("datasets", "said"),
    [
        ({}, r"tasks\.params\.datasets: name at least one dataset.*got \{\}"),
        ({"chain_sums": {}}, r"reasoning-gym has no 'chain_sums'; it has ab, .*chain_sum"),
        ({"chain_sum": {"most_terms": 3}}, r"train task 0: TypeError: .*most_terms"),
        ({"chain_sum": {"min_terms": 3, "max_terms": 2}}, r"train task 0: .*max_terms must be >= min_terms"),
    ],
)
def test_what_the_library_cannot_make_is_named(datasets: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        source(datasets).train(0)


def test_a_kind_with_one_question_has_none_to_hold_out() -> None:
    one = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    questions = {task.prompt for task in source(one).held_out(60)}
    assert len(questions) > 5, "there are a hundred sums of two digits: a tenth of them is held out"
    with pytest.raises(ConfigError, match=r"datasets\.coin_flip: none of 500 questions is for the split held_out"):
        source({"coin_flip": {"min_trials": 3, "max_trials": 3}}).held_out(1)
