"""The learning problem of the long notes: pages, window, demonstrations, the seed model that ships."""

import json
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from examples.cold_start import encode  # noqa: E402
from examples.long_notes.demonstrations import ASK, CARRY, SYSTEM, demonstration  # noqa: E402
from examples.long_notes.tasks import BETWEEN, KINDS, LENGTH, notes, split_of  # noqa: E402
from examples.long_notes.workflow import long_notes  # noqa: E402
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.relay.figures import main  # noqa: E402
from flexmarl import cli  # noqa: E402
from flexmarl.agents.chat import ChatRenderer, Message  # noqa: E402
from flexmarl.agents.context import EpisodeContext  # noqa: E402
from flexmarl.agents.remembering import compaction_of  # noqa: E402
from flexmarl.agents.spec import TeamSpec  # noqa: E402
from flexmarl.config import load_run  # noqa: E402
from flexmarl.records import GroupId, PolicyName  # noqa: E402
from flexmarl.simulator.virtual_time import run_virtual  # noqa: E402
from flexmarl.tasks import Split, check_disjoint  # noqa: E402
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks  # noqa: E402
from flexmarl.testing.agents import ScriptedModel  # noqa: E402

NOTES = ROOT / "examples" / "long_notes"
FACTS = "".join(KINDS.values())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_and_stays_in_its_split(seed: int, index: int, split: Split) -> None:
    task = notes(seed, index, split)
    assert task == notes(seed, index, split)
    *pages, question = task.prompt.split(BETWEEN)
    assert split_of(pages) == split
    assert [len(page) for page in pages] == [LENGTH, LENGTH]
    facts = [[one for one in page if one in FACTS] for page in pages]
    assert [len(found) for found in facts] == [1, 1], "one fact on each page"
    (asked,) = facts[task.data["page"] - 1]
    assert task.reference == asked
    assert asked in KINDS[question.removesuffix("?")]
    assert {kind for kind, values in KINDS.items() for found in facts if found[0] in values} == set(KINDS)
    assert task.score(asked) == 1.0
    assert task.score("x") == 0.0


def test_questions_are_on_either_page_and_either_kind_alike() -> None:
    tasks = [notes(1, index, "train") for index in range(2000)]
    assert Counter(task.data["page"] for task in tasks) == {1: 1000, 2: 1000}
    digits = sum(task.prompt.endswith("digit?") for task in tasks)
    assert 900 < digits < 1100
    check_disjoint(GeneratorSource(GeneratorTasks(name="long_notes"), seed=1), num_train=1000, num_held_out=256)


def team_of(reply: str) -> tuple[TeamSpec, EpisodeContext]:
    """The team of the config, and an episode in which it always says the same."""
    run, tokenizer = load_run(NOTES / "cpu.yaml"), build_tokenizer()
    team = TeamSpec.build(run.team, {PolicyName("reader"): ChatRenderer(tokenizer)}, [PolicyName("reader")])
    context = EpisodeContext(
        task=notes(1, 0, "train"),
        group=GroupId(0),
        trajectory_id="g0e0a0",
        run_seed=1,
        generate=ScriptedModel(tokenizer, lambda prompt, request: reply),
    )
    return team, context


@pytest.mark.parametrize("reply", ["", ".", "xy", "never less than its room"])
def test_whatever_it_says_the_reader_answers_with_no_page_before_it(reply: str) -> None:
    team, context = team_of(reply)
    seated = team.seat(context)
    run_virtual(long_notes(context.task, seated))
    first, second, question = context.task.prompt.split(BETWEEN)
    shown = [build_tokenizer().decode(turn.prompt_ids.tolist()) for turn in seated.turns]
    assert [turn.tags.get("action") for turn in seated.turns] == [None, "compact", None, "compact", None]
    assert [first in prompt for prompt in shown] == [True, True, False, False, False]
    assert [second in prompt for prompt in shown] == [False, False, True, True, False]
    assert question in shown[-1]
    assert set(seated.rewards().values()) == {context.task.score(seated.turns[-1].text)}
    assert seated.metrics["facts_carried"] <= 1.0


def test_demonstrations_are_what_the_reader_sees_and_favour_no_kind_of_character() -> None:
    agent = load_run(NOTES / "cpu.yaml").team.agents["reader"]
    compact = compaction_of(agent.context)
    assert compact is not None
    assert (agent.system, compact.ask, compact.carry) == (SYSTEM, ASK, CARRY)
    rng, kept, seen = random.Random(0), Counter[str](), Counter[str]()
    for _ in range(4000):
        messages = demonstration(rng)
        if messages[-2]["content"] == ASK:
            text, summary = messages[1]["content"].replace("|", ""), messages[-1]["content"]
            assert len(summary) == len(KINDS)
            assert not Counter(summary) - Counter(text), "copied, each once"
            seen.update("fact" if one in FACTS else "letter" for one in text)
            kept.update("fact" if one in FACTS else "letter" for one in summary)
    assert kept["fact"] / seen["fact"] == pytest.approx(kept["letter"] / seen["letter"], abs=0.02)


def test_demonstrations_have_the_ids_of_the_run_and_train_what_the_assistant_says() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(1)
    renderer = ChatRenderer(tokenizer)
    for _ in range(50):
        messages = demonstration(rng)
        row = encode(tokenizer, messages, ends=True)
        said = [Message(one["role"], one["content"]) for one in messages]
        prompt = renderer.render(said[:-1])
        assert np.array_equal(row.ids[: len(prompt)], prompt)
        trained = tokenizer.decode(row.ids[row.trained])
        assert trained == "".join(f"{one['content']}<|end|>" for one in messages if one["role"] == "assistant")


def test_the_seed_model_that_ships_loads_and_has_the_stated_size() -> None:
    assert AutoModelForCausalLM.from_pretrained(NOTES / "seed_model").num_parameters() == 121_664
    assert AutoTokenizer.from_pretrained(NOTES / "seed_model").get_vocab() == build_tokenizer().get_vocab()


@pytest.mark.parametrize("train_actions", ["true", "false"])
def test_the_config_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, train_actions: str
) -> None:
    small = ["steps=1", "batch={groups: 8, episodes: 4}", "evaluate.tasks=8", "cluster.threads=1", f"out={tmp_path}"]
    small.append(f"team.agents.reader.context.compact.train_actions={train_actions}")
    monkeypatch.setattr(sys, "argv", ["flexmarl", "train", str(NOTES / "cpu.yaml"), *small])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((folder / "summary.json").read_text())["policies"] == {"reader": {"version": 1}}
    main(tmp_path / "curves.png", [folder])
    assert "| long_notes | 1 |" in capsys.readouterr().out
