"""Kuhn's poker: three cards, two players, one bet (Kuhn, 1950), and how much the best opponent wins from a strategy.

Each player puts in one chip and gets a card of J, Q, K. The first one passes or bets a chip more; after a pass, so does
the second one. Who faces a bet bets as well, and the higher card wins, or passes, and the better wins.

A player sees its card and what was done: `Qpb` is a queen, passed, after which the other one bet.
"""

from collections.abc import Mapping
from functools import cache
from itertools import permutations, product

from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

CARDS = "JQK"
BET, PASS = "b", "p"
OVER = ("pp", "bp", "bb", "pbp", "pbb")
"""What was done in whole games."""
SEEN = (("", "pb"), ("p", "b"))
"""What was done when the first player acts, and when the second one does."""
FORFEIT = 2
"""Chips that a word costs that the rules do not know."""
VALUE = -1 / 18
"""Chips that the first player wins per game if both play perfectly."""

Strategy = Mapping[str, float]
"""Probability of a bet for each card and what was done, e.g. `Qpb`."""
VIEWS = tuple(card + done for seen in SEEN for done in seen for card in CARDS)
"""All that a strategy must answer."""


@task_generator("kuhn")
def kuhn(seed: int, index: int, split: Split) -> Task:
    """A deal: the first player's card and the second one's. Each of the six comes equally often."""
    deals = ["".join(deal) for deal in permutations(CARDS, 2)]
    return Task(input_id=f"{split}-{seed}-{index}", prompt=deals[(seed + index) % len(deals)])


@workflow("kuhn")
async def play(task: Task, team: Team) -> None:
    """One game, paid in chips. Who says neither `b` nor `p` pays two, the most that a game can cost."""
    players, deal, done = (team.first, team.second), task.prompt, ""
    player, legal = 0, True
    while legal and done not in OVER:
        player = len(done) % 2
        said = await players[player].act(deal[player] + done)
        legal = said.text in (BET, PASS)
        done += said.text if legal else ""
    won = chips(deal, done) if legal else (-FORFEIT, FORFEIT)[player]
    team.first.reward(float(won))
    team.second.reward(float(-won))
    team.report(success=float(won > 0), chips=won, bets=done.count(BET), legal=float(legal))


def chips(deal: str, done: str) -> int:
    """Chips that the first player wins in a whole game, which may be negative.

    >>> chips("KQ", "bb"), chips("KQ", "pbp"), chips("JQ", "bp")
    (2, -1, 1)
    """
    if done.endswith("bp"):
        return 1 if len(done) == 2 else -1
    sign = 1 if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -1
    return sign * (1 + done.endswith("bb"))


def expected(deal: str, first: Strategy, second: Strategy, done: str = "") -> float:
    """Chips that the first player wins on average, from some point of a deal on."""
    if done in OVER:
        return float(chips(deal, done))
    player = len(done) % 2
    bets = (first, second)[player][deal[player] + done]
    return sum(
        share * expected(deal, first, second, done + action)
        for action, share in ((BET, bets), (PASS, 1 - bets))
        if share
    )


def exploitability(strategy: Strategy) -> float:
    """Chips per game that the best opponents win from a strategy that plays both sides: half of NashConv.

    It is 0 for a strategy that is perfect on both sides, and more for every other one. A best opponent has a fixed
    answer to each view: all 64 are tried.

    >>> round(exploitability(dict.fromkeys(VIEWS, 0.5)), 6)
    0.458333
    """
    deals = ["".join(deal) for deal in permutations(CARDS, 2)]
    best_second = max(-sum(expected(deal, strategy, second) for deal in deals) for second in fixed(1))
    best_first = max(sum(expected(deal, first, strategy) for deal in deals) for first in fixed(0))
    return (best_first + best_second) / (2 * len(deals))


@cache
def fixed(player: int) -> tuple[Strategy, ...]:
    """The strategies of one player that always answer a view in the same way."""
    views = [card + done for done in SEEN[player] for card in CARDS]
    return tuple(dict(zip(views, bets, strict=True)) for bets in product((0.0, 1.0), repeat=len(views)))
