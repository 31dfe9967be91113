"""The learning problem of the relay: sightings, habits, the seed model that ships, and what its keys compare."""

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
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.relay.demonstrations import WORDS, Habits  # noqa: E402
from examples.relay.figures import main  # noqa: E402
from examples.relay.make_seed import apart  # noqa: E402
from examples.relay.tasks import THINGS, sighting, split_of  # noqa: E402
from examples.relay.workflow import relay  # noqa: E402
from flexmarl import cli  # noqa: E402
from flexmarl.agents.chat import ChatRenderer, Message  # noqa: E402
from flexmarl.config import load_run  # noqa: E402
from flexmarl.tasks import Split, check_disjoint  # noqa: E402
from flexmarl.tasks.generator import GeneratorSource, GeneratorTasks  # noqa: E402
from flexmarl.testing.scripted_run import ScriptedRun  # noqa: E402

RELAY = ROOT / "examples" / "relay"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_and_stays_in_its_split(seed: int, index: int, split: Split) -> None:
    task = sighting(seed, index, split)
    assert task == sighting(seed, index, split)
    assert split_of(int(task.prompt[1:])) == split
    assert task.reference == task.prompt[0] == THINGS[index % len(THINGS)]


def test_every_step_shows_each_thing_equally_often() -> None:
    groups = load_run(RELAY / "cpu.yaml").batch.groups
    shown = Counter(sighting(1, index, "train").reference for index in range(groups))
    assert set(shown) == set(THINGS)
    assert len(set(shown.values())) == 1


def test_no_sighting_is_in_both_splits() -> None:
    source = GeneratorSource(GeneratorTasks(name="relay"), seed=1)
    check_disjoint(source, num_train=2000, num_held_out=400)


def test_habits_that_ship_help_no_more_than_guessing() -> None:
    assert apart(random.Random(0), 2.0).success <= 1 / len(THINGS)


def test_without_strength_habits_are_none() -> None:
    habits = Habits(random.Random(0), 0.0)
    assert habits.success == pytest.approx(1 / len(THINGS), rel=1e-12)
    assert {len(set(odds)) for odds in (*habits.spoken.values(), *habits.named.values())} == {1}


def test_the_success_of_habits_is_what_playing_them_comes_to() -> None:
    rng = random.Random(4)
    habits = Habits(rng, 3.0)
    tries = 20_000
    hits = sum(
        thing == rng.choices(THINGS, habits.named[rng.choices(WORDS, habits.spoken[thing])[0]])[0]
        for thing in rng.choices(THINGS, k=tries)
    )
    assert hits / tries == pytest.approx(habits.success, abs=0.012)


def test_demonstrations_are_tokenised_as_the_run_renders_them() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(0)
    renderer, habits = ChatRenderer(tokenizer), Habits(rng, 1.0)
    for _ in range(50):
        messages = habits.demonstration(rng)
        row = encode(tokenizer, messages)
        prompt = renderer.render([Message("system", messages[0]["content"]), Message("user", messages[1]["content"])])
        assert row.ids[: len(prompt)].tolist() == prompt.tolist()
        assert np.array_equal(row.trained, np.arange(len(row.ids)) >= len(prompt))
        assert tokenizer.decode(row.ids[row.trained]) == messages[-1]["content"] + "<|end|>"


def test_the_seed_model_that_ships_loads_and_has_the_stated_size() -> None:
    assert AutoModelForCausalLM.from_pretrained(RELAY / "seed_model").num_parameters() == 80_640
    assert AutoTokenizer.from_pretrained(RELAY / "seed_model").get_vocab() == build_tokenizer().get_vocab()


def played(key: list[str]) -> dict[str, tuple[str, str, float, float]]:
    """By sample: (agent, text, reward, advantage) of scripted runs in which half of the names are right."""
    credit = {"filter": None, "estimator": {"type": "default", "key": key}}
    run = ScriptedRun(
        relay,
        lambda prompt, request: "word" if request.policy == "speaker" else "ab"[request.seed % 2],
        agents={"speaker": "speaker", "listener": "listener"},
        steps=1,
        batch={"groups": 4, "episodes": 8},
        credit=credit,
    ).play()
    columns = ("text", "reward", "advantage")
    return {row.sample_id: (row.agent, *(row.values[name] for name in columns)) for row in run.rows()}


def test_both_are_paid_for_the_right_name_and_for_no_other() -> None:
    rows = played(["task", "agent"])
    rewards = Counter((agent, text, reward) for agent, text, reward, _ in rows.values())
    assert rewards["listener", "a", 1.0] == rewards["speaker", "word", 1.0] > 0
    assert rewards["listener", "b", 0.0] == rewards["speaker", "word", 0.0] > 0
    assert sum(rewards.values()) == 64


@pytest.mark.parametrize("key", [["task"], ["task", "agent", "turn"]])
def test_keys_by_task_by_agent_and_by_turn_are_one_where_each_speaks_once_for_one_reward(key: list[str]) -> None:
    expected, found = played(["task", "agent"]), played(key)
    assert {name: row[3] for name, row in found.items()} == pytest.approx({n: row[3] for n, row in expected.items()})
    assert any(row[3] for row in expected.values())


def test_the_config_trains_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    small = ["steps=1", "batch={groups: 8, episodes: 4}", "evaluate.tasks=8", f"out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["flexmarl", "train", str(RELAY / "cpu.yaml"), *small])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((folder / "summary.json").read_text())["policies"] == {
        "speaker": {"version": 1},
        "listener": {"version": 1},
    }
    main(tmp_path / "curves.png", [folder])
    assert "| relay | 1 |" in capsys.readouterr().out
    assert (tmp_path / "curves.png").stat().st_size > 1000
