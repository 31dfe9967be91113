"""The learning problem of the example: tasks, tokenizer, demonstrations, prompts and the seed model that ships."""

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from examples.cold_start import encode  # noqa: E402
from examples.math_team.demonstrations import COPYING, HABITS, JUDGING, check, demonstration, solve  # noqa: E402
from examples.math_team.tasks import LEVELS, draw, evaluate, math_task, split_of  # noqa: E402
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.math_team.workflow import misread, question, review  # noqa: E402
from flexmarl.agents.chat import ChatRenderer, Message  # noqa: E402
from flexmarl.agents.seat import ToolUse  # noqa: E402
from flexmarl.tools import Calculator  # noqa: E402

SEED_MODEL = ROOT / "examples" / "math_team" / "seed_model"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_and_stays_in_its_split(seed: int, index: int, split: str) -> None:
    task = math_task(seed, index, split)
    assert task == math_task(seed, index, split)
    assert split_of(task.prompt) == split
    assert task.reference == str(eval(task.prompt)) == Calculator().compute(task.prompt).text
    assert task.score(task.reference) == 1.0


def test_the_order_of_terms_and_factors_never_crosses_the_split() -> None:
    assert split_of("12+7*3") == split_of("3*7+12") == split_of("7*3+12")
    assert split_of("48213*907") == split_of("907*48213")


def test_both_splits_hold_every_level_and_some_one_digit_products() -> None:
    for split in ("train", "held_out"):
        tasks = [math_task(0, index, split) for index in range(300)]
        assert {task.data["level"] for task in tasks} == set(LEVELS)
    products = {f"{a}*{b}" for a in range(1, 10) for b in range(1, 10)}
    assert 5 < sum(split_of(product) == "held_out" for product in products) < 40


@pytest.mark.parametrize("easy", [0.0, 0.2, 0.5])
def test_every_run_of_a_hundred_tasks_has_the_asked_mix_of_levels(easy: float) -> None:
    levels = [math_task(3, index, "train", easy=easy).data["level"] for index in range(1000)]
    for start in range(0, 1000, 100):
        assert abs(levels[start : start + 100].count("easy") - 100 * easy) <= 3


def test_shares_that_exceed_one_are_refused_with_their_values() -> None:
    with pytest.raises(ValueError, match=r"easy=0.7 and expression=0.4"):
        math_task(0, 0, "train", easy=0.7, expression=0.4)


def test_a_misread_question_is_another_question() -> None:
    rng = random.Random(0)
    texts = [draw(rng, level) for level in LEVELS for _ in range(200)]
    assert all(misread(rng, text) != text for text in texts)


def test_every_printable_character_is_one_token_and_decodes_to_itself() -> None:
    tokenizer = build_tokenizer()
    text = "".join(map(chr, range(32, 127)))
    ids = tokenizer.encode(text)
    assert len(ids) == len(set(ids)) == 95
    assert tokenizer.decode(ids) == text


def test_the_chat_template_only_appends() -> None:
    renderer = ChatRenderer(build_tokenizer())
    assert not renderer.extension.refused


@pytest.mark.parametrize("habits", [COPYING, JUDGING, HABITS])
def test_demonstrations_are_tokenised_as_the_run_renders_them(habits) -> None:
    tokenizer, rng = build_tokenizer(), random.Random(0)
    renderer = ChatRenderer(tokenizer)
    for _ in range(100):
        messages = demonstration(rng, habits)
        row = encode(tokenizer, messages)
        sampled = [message["content"] for message in messages if message["role"] == "assistant"]
        first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        prompt = renderer.render([Message(**message) for message in messages[:first]])
        assert row.ids[: len(prompt)].tolist() == prompt.tolist()
        assert not row.trained[: len(prompt)].any()
        if len(sampled) == 2:
            said = renderer.encode(sampled[0])
            prompt = renderer.extend(prompt, said, Message(**messages[first + 1]))
            assert row.ids[: len(prompt)].tolist() == prompt.tolist()
        assert tokenizer.decode(row.ids[row.trained]) == "".join(sampled) + "<|end|>"


def test_prompts_have_fixed_widths_so_that_digits_align() -> None:
    assert question("7*8") == "7*8        ?"
    assert question("48213*90712", retry=True) == "48213*90712!"
    use = ToolUse(name="calculator", argument="48213*907", result="43729191")
    assert review("48213*907", [use], "43729191") == "48213*907   |calc(48213*907)=43729191  |43729191"
    assert review("7*8", [], "56") == "7*8         |56"
    call, checked = solve(question("7*8"))[-1]["content"], check(review("7*8", [], "56"))[-1]["content"]
    assert call[:11] == checked[:11]


CONFIG = yaml.safe_load((ROOT / "examples/math_team/cpu.yaml").read_text())
SOLVER = CONFIG["team"]["agents"]["solver"]
RENDERER = ChatRenderer(build_tokenizer())
SAYS, MOST_DIGITS = SOLVER["sampling"]["max_tokens"], SOLVER["tools"][0]["max_digits"]


@settings(max_examples=200, deadline=None)
@example("9**134")  # A result of 128 digits, the longest that the calculator gives.
@given(st.text(alphabet="0123456789*/%+-() !a", max_size=SAYS - len("calc()")))
def test_whatever_the_solver_says_the_prompts_that_follow_fit(expression: str) -> None:
    renderer, asked = RENDERER, question("99999*99999")
    result = Calculator(max_digits=MOST_DIGITS).compute(expression).shown
    conversation = [Message("system", "solve"), Message("user", asked), Message("assistant", f"calc({expression})")]
    use = ToolUse(name="calculator", argument=expression, result=result)
    verdict = [Message("system", "check"), Message("user", review("99999*99999", [use], "9" * SAYS))]
    for prompt in ([*conversation, Message("tool", result)], verdict):
        assert len(renderer.render(prompt)) + SAYS <= CONFIG["policies"]["solver"]["engine"]["max_len"]


def test_prompts_are_no_longer_than_the_positions_that_the_model_knows() -> None:
    known = AutoModelForCausalLM.from_pretrained(SEED_MODEL).config.max_position_embeddings
    assert CONFIG["policies"]["solver"]["engine"]["max_len"] <= known


def test_the_seed_model_that_ships_loads_and_has_the_stated_size() -> None:
    model = AutoModelForCausalLM.from_pretrained(SEED_MODEL)
    assert 0.7e6 < model.num_parameters() < 0.9e6
    tokenizer = AutoTokenizer.from_pretrained(SEED_MODEL)
    made = build_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template


def test_every_level_evaluates_to_what_the_calculator_says() -> None:
    rng = random.Random(1)
    for level in LEVELS:
        for _ in range(100):
            prompt = draw(rng, level)
            assert str(evaluate(prompt)) == Calculator().compute(prompt).text
