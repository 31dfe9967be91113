"""The conformance check accepts a good environment and catches bad ones."""

import random

import pytest

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.records import Task
from flexmarl.tasks import EnvironmentSettings, StepResult, environment
from flexmarl.testing.plugin_checks import FakeEnvironment, check_environment


def test_the_fake_environment_passes() -> None:
    check_environment(FakeEnvironment, actions=["left", "right"])


def test_a_play_ends_once() -> None:
    environment = FakeEnvironment()
    environment.reset(3)
    while not environment.step("right").done:
        pass
    with pytest.raises(EpisodeError, match="the play is over"):
        environment.step("right")


class Forgetful(FakeEnvironment):
    """Its random stream is not part of the snapshot."""

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.noise = random.Random(seed)

    def step(self, action: str) -> StepResult:
        result = super().step(action)
        return StepResult(result.reward + self.noise.random(), result.done)


class Unseeded(FakeEnvironment):
    def reset(self, seed: int) -> None:
        super().reset(random.randrange(10**9))


class State(list):
    """A list that claims to be a value."""

    def __hash__(self) -> int:
        return 0


class Mutable(FakeEnvironment):
    """Gives its living state away."""

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.log = State()

    def step(self, action: str) -> StepResult:
        self.log.append(action)
        return super().step(action)

    def snapshot(self):  # type: ignore[override]
        return (*super().snapshot(), self.log)

    def restore(self, snapshot) -> None:
        super().restore(snapshot[:4])


@pytest.mark.parametrize(
    ("make", "law"),
    [
        (Forgetful, "a restored play has the same future"),
        (Unseeded, "the same seed and actions give the same play"),
        (Mutable, "playing on changes no snapshot"),
    ],
)
def test_a_broken_environment_is_caught(make: type[FakeEnvironment], law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_environment(make, actions=["left", "right"])


@environment("patient")
class Patient(FakeEnvironment):
    def __init__(self, task: Task, patience: int = 3) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("params", "refusal"),
    [({"patiense": 3}, "team.environment.params.patiense: unknown; 'patient' takes patience"), ({"patience": 4}, "")],
)
def test_a_misspelt_parameter_is_named_before_anything_is_played(params: dict[str, int], refusal: str) -> None:
    settings = EnvironmentSettings(name="patient", params=params)
    if not refusal:
        settings.resolve()
        return
    with pytest.raises(ConfigError, match=refusal):
        settings.resolve()
