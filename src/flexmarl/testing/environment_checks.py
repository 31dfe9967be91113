"""Conformance check of environments, and a small environment to write tests with.

    check_environment(FakeEnvironment, actions=["left", "right"])

Both run without a test framework.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

from flexmarl.errors import EpisodeError
from flexmarl.tasks import Environment, StepResult


def check_environment(
    make: Callable[[], Environment[Any]], *, actions: Sequence[str], num_plays: int = 20, max_steps: int = 50
) -> None:
    """Plays `actions` and nonsense at random; raises AssertionError naming the law that the environment breaks."""
    for seed in range(num_plays):
        rng = random.Random(seed)
        script = [rng.choice((*actions, "", "no such action \N{SNOWMAN}")) for _ in range(max_steps)]
        environment, other = make(), make()
        environment.reset(seed)
        assert environment.observe() == environment.observe(), "observe changes nothing"
        play = _play(environment, script)
        environment.reset(seed)
        assert _play(environment, script) == play, "the same seed and actions give the same play, in the same instance"
        other.reset(seed)
        assert _play(other, script) == play, "the same seed and actions give the same play, in another instance"
        cut = rng.randrange(len(play))
        environment.reset(seed)
        _play(environment, script[:cut])
        _check_snapshot(environment, make(), script[cut:], play[cut:])


def _check_snapshot(
    environment: Environment[Any], other: Environment[Any], script: Sequence[str], future: Sequence[object]
) -> None:
    snapshot, now = environment.snapshot(), environment.observe()
    digest, frozen = hash(snapshot), pickle.dumps(snapshot)
    assert _play(environment, script) == future, "taking a snapshot changes nothing"
    environment.restore(snapshot)
    assert environment.observe() == now, "a restored play looks as it did"
    assert _play(environment, script) == future, "a restored play has the same future"
    other.restore(pickle.loads(frozen))
    assert other.observe() == now, "a snapshot restored elsewhere looks as it did"
    assert _play(other, script) == future, "a snapshot restored elsewhere has the same future"
    assert (hash(snapshot), pickle.dumps(snapshot)) == (digest, frozen), "playing on changes no snapshot"


def _play(environment: Environment[Any], script: Sequence[str]) -> list[tuple[StepResult, str]]:
    """Returns the result of each action and the observation after it, until the play or the script ends."""
    seen = []
    for action in script:
        result = environment.step(action)
        seen.append((result, environment.observe()))
        if result.done:
            break
    return seen


class FakeEnvironment:
    """A corridor: `left` and `right` move, and a seeded wind sometimes cancels a move. Either end finishes the play.

    The right end pays 1. An action that is not understood costs 0.1.
    """

    LENGTH = 7

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Starts in the middle. The seed decides the wind."""
        self._state = (seed, 0, self.LENGTH // 2, "")

    def observe(self) -> str:
        """Says where the agent is, and what was wrong with its last action."""
        _, _, place, complaint = self._state
        return f"You are at {place} of {self.LENGTH}.{complaint}"

    def step(self, action: str) -> StepResult:
        """Moves one place. Raises EpisodeError if the play is over."""
        seed, time, place, _ = self._state
        if place in (0, self.LENGTH):
            raise EpisodeError("the play is over; reset or restore the environment")
        move = {"left": -1, "right": 1}.get(action, 0)
        wind = -move if random.Random(f"{seed}/{time}").random() < 0.2 else 0
        place += move + wind
        self._state = (seed, time + 1, place, "" if move else " Say left or right.")
        return StepResult(float(place == self.LENGTH) - (0.0 if move else 0.1), place in (0, self.LENGTH))

    def snapshot(self) -> tuple[int, int, int, str]:
        """Returns the state, which is one immutable tuple."""
        return self._state

    def restore(self, snapshot: tuple[int, int, int, str]) -> None:
        """Sets the state to a snapshot."""
        self._state = snapshot
