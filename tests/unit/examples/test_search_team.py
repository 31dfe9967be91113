"""The learning problem of the search team: facts, questions, hints of the cold start, routes, the configs."""

import asyncio
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from examples.cold_start import encode  # noqa: E402
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.search_team.demonstrations import (  # noqa: E402
    HINT,
    REPEAT,
    answer,
    demonstration,
    found,
    query,
    right_query,
    route,
)
from examples.search_team.tasks import (  # noqa: E402
    FILE,
    GROUP,
    RELATIONS,
    WORDS,
    Fact,
    documents,
    draw,
    path_of,
    search_task,
    split_of,
)
from examples.search_team.workflow import (  # noqa: E402
    ANSWER,
    MAX_SEARCHES,
    NOTHING,
    SEARCH,
    SEARCH_COST,
    always_twice,
    needed,
    route_search_answer,
    view,
)
from flexmarl import cli  # noqa: E402
from flexmarl.agents.chat import ChatRenderer, Message  # noqa: E402
from flexmarl.agents.context import EpisodeContext  # noqa: E402
from flexmarl.agents.spec import TeamSpec  # noqa: E402
from flexmarl.agents.team import Team  # noqa: E402
from flexmarl.config import load_run  # noqa: E402
from flexmarl.records import GroupId, PolicyName, Task  # noqa: E402
from flexmarl.tasks import Split, check_disjoint  # noqa: E402
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks  # noqa: E402
from flexmarl.testing.agents import ScriptedModel  # noqa: E402
from flexmarl.tools.search import TextIndex  # noqa: E402

SEARCH_TEAM = ROOT / "examples" / "search_team"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_stays_in_its_split_and_its_facts_answer_it(
    seed: int, index: int, split: Split
) -> None:
    task = search_task(seed, index, split)
    assert task == search_task(seed, index, split)
    assert split_of(task.prompt) == split
    facts = [Fact(*one["title"].split(), one["text"]) for one in map(json.loads, task.data["files"][FILE].splitlines())]
    assert len(facts) == 4 * GROUP == 40
    path = path_of(facts, task.prompt)
    assert (task.reference, task.data["path"]) == (path[-1].value, list(map(str, path)))


def test_no_question_is_in_both_splits_and_half_of_them_have_two_hops() -> None:
    check_disjoint(GeneratorSource(GeneratorTasks(name="search_team"), seed=1), num_train=1000, num_held_out=200)
    hops = [len(search_task(1, index, "train").data["path"]) for index in range(1000)]
    assert hops.count(1) + hops.count(2) == 1000
    assert 440 < hops.count(2) < 560


def test_questions_and_facts_have_no_word_in_common_but_names() -> None:
    assert not set(WORDS) & set(RELATIONS)
    rng = random.Random(0)
    for _ in range(50):
        facts, question = draw(rng)
        assert not set(question.split()[1:]) & {word for fact in facts for word in fact}


def test_person_and_relation_find_the_fact_and_the_question_itself_seldom_does() -> None:
    rng, direct, number = random.Random(0), 0, 400
    for _ in range(number):
        facts, question = draw(rng)
        index, path = TextIndex(documents(facts), FILE), path_of(facts, question)
        for fact in path:
            assert index.best(f"{fact.subject} {fact.relation}", 1) == [(f"{fact.subject} {fact.relation}", fact.value)]
        direct += index.best(question, 1)[0] == (f"{path[-1].subject} {path[-1].relation}", path[-1].value)
    assert direct / number < 0.3


def test_choices_of_demonstrations_are_right_as_often_as_the_hint_says() -> None:
    rng, number = random.Random(1), 4000
    routes = queries = answers = 0
    for _ in range(number):
        facts, question = draw(rng)
        person, relation = right_query(question, None) or ("", "")
        routes += route(rng, question, None) == SEARCH
        queries += query(rng, question, None) == f"{person} {relation}"
        fact = found(rng, facts, f"{person} {relation}")
        answers += answer(rng, question, fact) == fact.value
    assert routes / number == pytest.approx(HINT + (1 - HINT) / 2, abs=0.03)
    assert queries / number == pytest.approx(HINT + (1 - HINT) / 4, abs=0.03)  # Only one person is known.
    assert answers / number == pytest.approx(HINT + (1 - HINT) / 2, abs=0.03)


def test_the_right_query_leads_to_the_answer() -> None:
    rng = random.Random(2)
    for _ in range(200):
        facts, question = draw(rng)
        fact, searches = None, 0
        while asked := right_query(question, fact):
            fact, searches = found(rng, facts, " ".join(asked)), searches + 1
        path = path_of(facts, question)
        assert (fact, searches) == (path[-1], len(path))


def test_the_right_query_asks_for_the_fact_that_is_paid() -> None:
    rng = random.Random(4)
    for _ in range(300):
        facts, question = draw(rng)
        path = path_of(facts, question)
        for fact in (None, *path):
            asked, wanted = right_query(question, fact), needed(list(map(str, path)), str(fact))
            assert (asked and str(found(rng, facts, " ".join(asked)))) == wanted


def test_demonstrations_have_the_ids_of_the_run_and_train_what_the_assistant_says() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(3)
    renderer, roles = ChatRenderer(tokenizer), set[str]()
    for _ in range(100):
        messages = demonstration(rng)
        row = encode(tokenizer, messages)
        prompt = renderer.render([Message(one["role"], one["content"]) for one in messages[:2]])
        assert np.array_equal(row.ids[: len(prompt)], prompt)
        said = "".join(one["content"] for one in messages if one["role"] == "assistant")
        assert tokenizer.decode(row.ids[row.trained]) == f"{said}<|end|>"
        roles.add(messages[0]["content"])
    agents = load_run(SEARCH_TEAM / "cpu.yaml").team.agents.values()
    assert roles == {REPEAT, *(agent.system for agent in agents)}


def seated(script: list[str], task: Task) -> Team:
    """The team of the config, in an episode in which it says these words one after the other."""
    run, tokenizer, words = load_run(SEARCH_TEAM / "cpu.yaml"), build_tokenizer(), iter(script)
    policies = {PolicyName(name): ChatRenderer(tokenizer) for name in run.policies}
    context = EpisodeContext(
        task=task,
        group=GroupId(0),
        trajectory_id="g0e0a0",
        run_seed=1,
        generate=ScriptedModel(tokenizer, lambda prompt, request: next(words)),
    )
    return TeamSpec.build(run.team, policies, list(policies)).seat(context)


def two_hops() -> tuple[Task, list[Fact]]:
    """A task of two hops, and the facts on the way."""
    task = next(task for index in range(50) if len((task := search_task(1, index, "train")).data["path"]) == 2)
    facts = [Fact(*one["title"].split(), one["text"]) for one in map(json.loads, task.data["files"][FILE].splitlines())]
    return task, path_of(facts, task.prompt)


def calls(fact: Fact) -> list[str]:
    """What a searcher says that finds a fact."""
    return [f"s({fact.subject} {fact.relation})", fact.value]


def test_a_team_that_makes_no_mistake_searches_twice_and_is_paid() -> None:
    task, (first, last) = two_hops()
    team = seated([SEARCH, *calls(first), SEARCH, *calls(last), ANSWER, last.value], task)
    asyncio.run(route_search_answer(task, team))
    assert team.metrics["success"] == 1.0
    assert team.metrics["searches"] == 2
    paid = {turn.agent: team.rewards()[turn.sample_id] for turn in team.turns}
    assert paid == {"router": 1 - 2 * SEARCH_COST, "searcher": 1.0, "answerer": 1.0}
    heard = [build_tokenizer().decode(turn.prompt_ids.tolist(), skip_special_tokens=True) for turn in team.turns]
    assert heard[0].endswith(view(task.prompt, NOTHING))
    assert heard[3].endswith(view(task.prompt, str(first)))
    assert heard[-1].endswith(view(task.prompt, str(last)))


@pytest.mark.parametrize("route", [ANSWER, "", "nonsense"])
def test_a_router_that_does_not_ask_for_a_search_gets_none(route: str) -> None:
    task, _ = two_hops()
    team = seated([route, "x"], task)
    asyncio.run(route_search_answer(task, team))
    assert team.metrics["searches"] == 0
    assert set(team.rewards().values()) == {0.0}


def test_a_query_is_paid_for_the_fact_that_was_needed_next() -> None:
    task, (first, last) = two_hops()
    team = seated([SEARCH, *calls(first), SEARCH, *calls(first), SEARCH, *calls(last), last.value], task)
    asyncio.run(route_search_answer(task, team))
    paid = [team.rewards()[turn.sample_id] for turn in team.turns if turn.agent == "searcher"]
    assert paid == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert team.metrics["searcher/helped"] == pytest.approx(2 / 3)


def test_searches_are_bounded_and_a_search_that_finds_nothing_changes_nothing() -> None:
    task, (first, _) = two_hops()
    team = seated([SEARCH, *calls(first), *[SEARCH, "s(?)", NOTHING] * (MAX_SEARCHES - 1), first.value], task)
    asyncio.run(route_search_answer(task, team))
    assert team.metrics["searches"] == MAX_SEARCHES
    assert team.turns[-1].text == first.value


def test_in_the_control_the_router_is_not_obeyed() -> None:
    task, (first, last) = two_hops()
    team = seated([ANSWER, *calls(first), ANSWER, *calls(last), SEARCH, last.value], task)
    asyncio.run(always_twice(task, team))
    assert team.metrics["searches"] == 2
    assert team.metrics["success"] == 1.0


def test_the_seed_model_that_ships_loads_and_has_the_stated_size() -> None:
    assert AutoModelForCausalLM.from_pretrained(SEARCH_TEAM / "seed_model").num_parameters() == 179_200
    assert AutoTokenizer.from_pretrained(SEARCH_TEAM / "seed_model").get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize("changed", ["", "_always_twice", "_shuffled_rewards"])
def test_the_config_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, changed: str
) -> None:
    small = ["steps=1", "batch={groups: 4, episodes: 8}", "evaluate.tasks=8", f"out={tmp_path}"]
    small.append(f"team.workflow.name=search_team{changed}")
    monkeypatch.setattr(sys, "argv", ["flexmarl", "train", str(SEARCH_TEAM / "cpu.yaml"), *small])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["policies"]) == {"router", "searcher", "answerer"}
