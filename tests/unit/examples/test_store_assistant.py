"""The store assistant: who is called how often, tools, the seed model that ships, and both of its configs."""

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.store_assistant.make_seed import demonstration  # noqa: E402
from examples.store_assistant.store import (  # noqa: E402
    HELPERS,
    LETTERS,
    LONGEST,
    answer_of,
    customer,
    find,
    helper,
    looked_up,
    router,
    split_of,
)
from flexmarl.assemble.simulation import simulate  # noqa: E402
from flexmarl.config import load_run  # noqa: E402
from flexmarl.events.journal import read_run  # noqa: E402
from flexmarl.events.run_folder import RunFolder  # noqa: E402
from flexmarl.events.serving_events import Called, Moved  # noqa: E402
from flexmarl.tasks import Split, check_disjoint  # noqa: E402
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks  # noqa: E402
from flexmarl.tools import Refusal  # noqa: E402

STORE = ROOT / "examples" / "store_assistant"
SHARES = {"router": 0.44, "search": 0.32, "orders": 0.06, "stock": 0.05, "prices": 0.04, "returns": 0.04}
SHARES |= {"advice": 0.03, "greeting": 0.02}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_and_stays_in_its_split(seed: int, index: int, split: Split) -> None:
    task = customer(seed, index, split)
    assert task == customer(seed, index, split)
    assert split_of(task.prompt) == split
    assert all(line.split()[0] in HELPERS for line in task.prompt.split(";"))


def test_training_and_held_out_customers_differ() -> None:
    check_disjoint(GeneratorSource(GeneratorTasks(name="store_assistant"), seed=1), num_train=500, num_held_out=64)


def test_two_agents_get_three_quarters_of_the_calls() -> None:
    calls: Counter[str] = Counter()
    for index in range(10_000):
        words = [line.split()[0] for line in customer(1, index, "train").prompt.split(";")]
        calls["router"] += len(words) + 1
        for word in words:
            calls[HELPERS[word].agent] += 1 + HELPERS[word].uses_tool
    assert {agent: count / calls.total() for agent, count in calls.items()} == pytest.approx(SHARES, abs=0.005)


def test_replies_have_a_long_tail_and_the_right_word_more_often_than_not() -> None:
    rng = random.Random(0)
    said = [router("find 417", rng) for _ in range(4000)]
    lengths = sorted(map(len, said))
    assert lengths[-1] == LONGEST
    assert lengths[len(lengths) * 99 // 100] > 8 * lengths[len(lengths) // 2]
    assert Counter(text[0] for text in said).most_common(1)[0][0] == "s"
    assert {text[0] for text in said} == set(LETTERS)


def test_a_helper_calls_its_tool_first_and_then_says_what_it_found() -> None:
    rng = random.Random(1)
    assert helper("find 417", rng) == "find(417)"
    after = Counter(helper("find 417find(417)7         ", rng)[0] for _ in range(300))
    assert after.most_common(1)[0][0] == "7"
    assert Counter(helper("greet 83", rng)[0] for _ in range(300)).most_common(1)[0][0] == "3"


def test_a_tool_finds_what_the_reward_asks_for_and_refuses_what_is_no_number() -> None:
    assert asyncio.run(looked_up("find", "417")) == answer_of("find 417") == asyncio.run(find("0417"[1:]))
    for argument in ("", "41x", "4170", "-1", "٣"):
        with pytest.raises(Refusal):
            asyncio.run(looked_up("find", argument))


def test_demonstrations_are_of_all_agents() -> None:
    rng = random.Random(0)
    assert {demonstration(rng)[0]["content"] for _ in range(600)} == {"route", *(one.agent for one in HELPERS.values())}


def test_the_seed_model_that_ships_loads_and_has_the_stated_size() -> None:
    assert AutoModelForCausalLM.from_pretrained(STORE / "seed_model").num_parameters() == 105_280
    assert AutoTokenizer.from_pretrained(STORE / "seed_model").get_vocab() == build_tokenizer().get_vocab()


def test_simulated_the_timed_store_calls_its_tools_and_moves_its_instances(tmp_path: Path) -> None:
    chosen = ["steps=2", "batch={groups: 16, episodes: 2}", f"out={tmp_path}"]
    folder = RunFolder(simulate(load_run(STORE / "timed.yaml", chosen)))
    events = list(read_run(folder.journal))
    calls = Counter(event.policy for event in events if isinstance(event, Called))
    assert calls.keys() == SHARES.keys()
    assert (calls["router"] + calls["search"]) / calls.total() == pytest.approx(0.76, abs=0.08)
    assert [event for event in events if isinstance(event, Moved)]
