"""The games: their rules against play by hand and by brute force, exploitability, the seed model that ships."""

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from examples.cold_start import encode  # noqa: E402
from examples.games import kuhn, nim  # noqa: E402
from examples.games.demonstrations import HINT, chosen, demonstration  # noqa: E402
from examples.games.exact import kuhn_figures, main, nim_figures  # noqa: E402
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from flexmarl import cli  # noqa: E402
from flexmarl.records import Task  # noqa: E402

GAMES = ROOT / "examples" / "games"


@cache
def wins(position: nim.Position) -> bool:
    """True if whoever moves can force a win, by trying all that can follow."""
    return any(not any(left) or not wins(left) for left in nim.moves(position).values())


def test_the_theorem_agrees_with_trying_all_moves() -> None:
    assert {position for position in nim.POSITIONS if wins(position)} == set(nim.WON)
    for position in nim.POSITIONS:
        good = [move for move, left in nim.moves(position).items() if not any(left) or not wins(left)]
        assert nim.winning(position) == good


def test_games_begin_in_every_position_that_can_be_won_before_one_comes_again() -> None:
    for seed, lap in ((1, 0), (1, 1), (2, 0)):
        begun = [nim.nim(seed, lap * len(nim.WON) + place, "train") for place in range(len(nim.WON))]
        assert {task.prompt for task in begun} == set(map(str, nim.WON))
        assert len({task.input_id for task in begun}) == len(nim.WON)
        assert begun[3] == nim.nim(seed, lap * len(nim.WON) + 3, "train")
    assert [nim.nim(1, place, "train").prompt for place in range(48)] != sorted(map(str, nim.WON))


class Player:
    """A seat that says what it is told to."""

    def __init__(self, says: Iterator[str]) -> None:
        self._says = says
        self.heard: list[str] = []
        self.won: list[float] = []

    async def act(self, heard: str) -> Any:
        self.heard.append(heard)
        return SimpleNamespace(text=next(self._says))

    def reward(self, reward: float) -> None:
        self.won.append(reward)


def played(play: Any, prompt: str, says: list[str], coin: float = 0.0) -> tuple[Any, dict[str, float]]:
    """A team after a game, and its figures. `says`: what both say, in turn."""
    told, script = dict[str, float](), iter(says)
    team = SimpleNamespace(
        first=Player(script),
        second=Player(script),
        rng=SimpleNamespace(random=lambda: coin),
        report=lambda **figures: told.update(figures),
    )
    asyncio.run(play(Task(input_id="t", prompt=prompt), team))
    assert next(script, None) is None, "every answer was asked for"
    return team, told


@pytest.mark.parametrize(
    ("begun", "says", "first", "kept", "legal"),
    [
        ("001", ["c1"], 1.0, 1.0, 1.0),
        ("012", ["c1", "b1", "c1"], 1.0, 1.0, 1.0),
        ("012", ["c2", "b1"], -1.0, 0.5, 1.0),
        ("012", ["a1"], -1.0, 0.0, 0.0),
        ("012", ["c1", "?"], 1.0, 1.0, 0.0),
        ("012", ["b1", "c1", "c1"], 1.0, 1 / 3, 1.0),
    ],
)
def test_games_of_nim_by_hand(begun: str, says: list[str], first: float, kept: float, legal: float) -> None:
    team, told = played(nim.play, begun, says)
    assert (team.first.won, team.second.won) == ([first], [-first])
    assert told == pytest.approx({"success": float(first > 0), "winning_moves": kept, "legal": legal})


@pytest.mark.parametrize(("coin", "first"), [(0.4, -1.0), (0.6, 1.0)])
def test_a_coin_decides_who_is_paid_for_a_control_game_of_nim(coin: float, first: float) -> None:
    team, told = played(nim.shuffled_rewards, "012", ["c2", "b1"], coin)
    assert (team.first.won, team.second.won, told["success"]) == ([first], [-first], 0.0)


def test_each_player_of_nim_sees_the_position_and_nothing_else() -> None:
    team, _ = played(nim.play, "012", ["c1", "b1", "c1"])
    assert (team.first.heard, team.second.heard) == (["012", "001"], ["011"])


@pytest.mark.parametrize(
    ("deal", "says", "chips", "bets"),
    [
        ("KQ", ["p", "p"], 1, 0),
        ("JQ", ["p", "p"], -1, 0),
        ("JK", ["b", "p"], 1, 1),
        ("JK", ["b", "b"], -2, 2),
        ("QJ", ["p", "b", "p"], -1, 1),
        ("QJ", ["p", "b", "b"], 2, 2),
        ("KQ", ["?"], -2, 0),
        ("JQ", ["b", ""], 2, 1),
        ("JQ", ["p", "b", "bb"], -2, 1),
    ],
)
def test_games_of_poker_by_hand(deal: str, says: list[str], chips: int, bets: int) -> None:
    team, told = played(kuhn.play, deal, says)
    assert (team.first.won, team.second.won) == ([chips], [-chips])
    assert (told["chips"], told["bets"], told["success"]) == (chips, bets, chips > 0)
    assert told["legal"] == (says[-1] in ("b", "p"))
    seconds = [deal[1] + says[0]] if len(says) > 1 else []
    assert [team.first.heard[0], *team.second.heard] == [deal[0], *seconds]


def test_each_deal_comes_equally_often() -> None:
    deals = [kuhn.kuhn(3, index, "train").prompt for index in range(60)]
    assert len(set(deals)) == 6
    assert {deals.count(deal) for deal in deals} == {10}


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_nobody_wins_from_the_equilibria_of_poker(alpha: float) -> None:
    """Kuhn's: the first player bets a jack with alpha, a king with 3 alpha, and calls with a queen by alpha + 1/3."""
    first = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "Jpb": 0.0, "Qpb": alpha + 1 / 3, "Kpb": 1.0}
    second = {"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0}
    strategy = {**first, **second}
    assert kuhn.exploitability(strategy) == pytest.approx(0.0, abs=1e-12)
    deals = [a + b for a in "JQK" for b in "JQK" if a != b]
    assert sum(kuhn.expected(deal, strategy, strategy) for deal in deals) / 6 == pytest.approx(kuhn.VALUE)
    assert kuhn.exploitability({**strategy, "Qb": 1.0}) > 0.01


def test_a_strategy_that_never_bets_loses_a_chip_to_whoever_always_does() -> None:
    assert kuhn.exploitability(dict.fromkeys(kuhn.VIEWS, 0.0)) == pytest.approx(1.0)


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12))
@settings(max_examples=30, deadline=None)
def test_some_opponent_wins_from_every_strategy_or_nobody_does(bets: list[float]) -> None:
    assert kuhn.exploitability(dict(zip(kuhn.VIEWS, bets, strict=True))) >= -1e-12


def test_moves_of_demonstrations_win_as_often_as_the_hint_says() -> None:
    rng = random.Random(1)
    asked = nim.WON * 300
    share = sum(chosen(rng, position) in nim.winning(position) for position in asked) / len(asked)
    by_chance = sum(len(nim.winning(one)) / len(nim.moves(one)) for one in nim.WON) / len(nim.WON)
    assert share == pytest.approx(HINT + (1 - HINT) * by_chance, abs=0.02)


def test_only_moves_are_demonstrated() -> None:
    tokenizer, rng = build_tokenizer(), random.Random(2)
    for _ in range(50):
        messages = demonstration(rng)
        shown = encode(tokenizer, messages)
        assert tokenizer.decode(shown.ids[shown.trained]) == messages[-1]["content"] + "<|end|>"


def test_the_seed_model_knows_the_rules_and_has_everything_to_learn(capsys: pytest.CaptureFixture[str]) -> None:
    winning, _, legal = nim_figures(GAMES / "seed_model")
    assert winning < 0.55
    assert legal > 0.98
    assert kuhn_figures(GAMES / "seed_model")[0] > 0.35
    main("kuhn", [GAMES / "seed_model"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.count("|") == row.count("|") == len(kuhn.VIEWS) + 4


@pytest.mark.parametrize("config", ["nim.yaml", "kuhn.yaml", "nim_older.yaml"])
def test_a_game_trains(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["steps=1", "batch.groups=2", "batch.episodes=4", f"out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["flexmarl", "train", str(GAMES / config), *small])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    (folder,) = tmp_path.iterdir()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("team/success" in step for step in metrics)
