"""Games of TextArena as environments."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from flexmarl.agents import load_code
from flexmarl.agents.settings import TeamSettings
from flexmarl.config.load import parse_yaml
from flexmarl.errors import EpisodeError
from flexmarl.experience.interface import Row
from flexmarl.records import Task
from flexmarl.tasks.environment import EnvironmentSettings
from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.tasks.textarena import TextArenaGame
from flexmarl.testing.plugin_checks import check_environment, check_task_source
from flexmarl.testing.scripted_run import ScriptedRun
from tests.docs.pages import files

pytest.importorskip("textarena", reason="needs the extra 'textarena': make test-extras")

A_TASK = Task(input_id="a", prompt="")


@pytest.mark.parametrize(
    ("game", "players", "actions"),
    [
        ("TicTacToe-v0", 2, [f"[{place}]" for place in range(9)]),
        ("TicTacToe-v0-raw", 2, [f"I take [{place}]" for place in range(9)]),
        ("GuessTheNumber-v0", 1, [f"[{number}]" for number in range(1, 21)]),
        ("FrozenLake-v0-random", 1, ["[up]", "[down]", "[left]", "[right]"]),
        ("KuhnPoker-v0", 2, ["[bet]", "[check]", "[call]", "[fold]"]),
    ],
)
def test_a_game_is_a_sound_environment(game: str, players: int, actions: list[str]) -> None:
    settings = EnvironmentSettings(name="textarena", params={"game": game, "players": players})
    check_environment(lambda: settings.resolve()(A_TASK), actions=actions, num_plays=6, max_steps=20)


def test_players_take_turns_see_each_other_and_get_their_own_rewards() -> None:
    game = TextArenaGame(A_TASK, game="TicTacToe-v0", players=2)
    game.reset(1)
    for number, action in enumerate(["[4]", "[0]", "[2]", "[1]"]):
        assert game.player == number % 2
        assert not game.step(action).done
    assert "[Player 1] [1]" in game.observe()
    last = game.step("[6]")
    assert (last.reward, last.done, game.rewards) == (1.0, True, {0: 1.0, 1: -1.0})
    with pytest.raises(EpisodeError, match="TicTacToe-v0 is over"):
        game.step("[3]")


def test_a_raw_game_shows_what_is_new() -> None:
    game = TextArenaGame(A_TASK, game="TicTacToe-v0-raw", players=2)
    game.step("[4]")
    game.step("[0]")
    assert "[Player 1] [0]" in game.observe()
    assert "Your goal" not in game.observe()


def test_games_beside_each_other_leave_each_other_and_the_process_their_random_numbers() -> None:
    def deals(beside: bool) -> list[str]:
        games = [TextArenaGame(A_TASK, game="KuhnPoker-v0", players=2) for _ in range(2 if beside else 1)]
        seen = []
        for game in games:
            game.reset(5)
        for action in ["[check]", "[check]", "[bet]", "[call]"] * 2:
            seen.append(games[0].observe())
            for game in games:
                if not game.rewards:
                    game.step(action)
        return seen

    random.seed(11)
    before = random.getstate()
    alone = deals(beside=False)
    assert random.getstate() == before
    assert deals(beside=True) == alone


def test_what_cannot_begin_fails_the_episode_with_the_reason() -> None:
    with pytest.raises(EpisodeError, match=r"beginning TicTacToe-v0 with 5 player\(s\): "):
        TextArenaGame(A_TASK, game="TicTacToe-v0", players=5)
    with pytest.raises(EpisodeError, match=r"beginning NoSuchGame-v0 with 1 player\(s\): .*NoSuchGame-v0"):
        TextArenaGame(A_TASK, game="NoSuchGame-v0")


def test_its_tasks_are_a_sound_source() -> None:
    check_task_source(lambda: GeneratorTasks(name="textarena", params={"game": "TicTacToe-v0"}).open(seed=1))


def test_the_game_of_the_page_is_played_and_trained(tmp_path: Path) -> None:
    page = files("docs/howto/task_source.md", "game")
    (tmp_path / "game.py").write_text(page["code"])
    load_code(tmp_path / "game.py")
    team = parse_yaml(page["config"])["team"]

    def say(prompt: str, request: Any) -> str:
        free = re.findall(r"'(\[\d\])'", prompt.rpartition("Available Moves:")[2])
        return free[request.seed % len(free)]

    run = ScriptedRun(
        TeamSettings.model_validate(team).workflow.resolve(),
        say,
        agents={"first": "solver", "second": "solver"},
        team=team,
        batch={"groups": 4, "episodes": 4},
    ).play()
    rows = run.rows()
    assert {name: trainer.version for name, trainer in run.trainers.items()} == {"solver": 1}
    assert {row.agent for row in rows} == {"first", "second"}

    def episode(row: Row) -> str:
        return row.sample_id.rpartition("_")[2]

    won = {episode(row): row.values["reward"] for row in rows if row.agent == "first"}
    assert set(won.values()) == {-1.0, 0.0, 1.0}
    assert all(row.values["reward"] == -won[episode(row)] for row in rows if row.agent == "second")
