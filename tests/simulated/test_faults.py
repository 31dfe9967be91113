"""Random runs with random faults keep every law, and a rule that is broken on purpose breaks one."""

import json
import logging
from collections import Counter
from random import Random

import pytest
import typer
from typer.testing import CliRunner

from flexmarl.simulator.faults import FaultKind, Targets, draw_plan
from flexmarl.testing.faults.__main__ import main
from flexmarl.testing.faults.laws import LAWS, broken
from flexmarl.testing.faults.lives import live
from flexmarl.testing.faults.mutations import MUTATIONS, Mutation
from flexmarl.testing.faults.schedule import MODES, draw
from flexmarl.testing.faults.trials import catch, digest, try_seed
from flexmarl.testing.faults.witness import REACTIONS, seen

TARGETS = Targets(instances=("solver/0", "solver/1", "frozen/0"), trained=("solver",), groups=2, steps=3)


@pytest.fixture(autouse=True)
def _quiet():
    """Tasks of a killed run say so to nobody."""
    logger = logging.getLogger("asyncio")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def test_a_run_keeps_every_law_whatever_breaks() -> None:
    struck, answered = Counter[FaultKind](), Counter[FaultKind]()
    for seed in range(64):
        mode = MODES[seed % len(MODES)]
        story = live(draw(seed, mode=mode))
        assert broken(story) == {}, f"python -m flexmarl.testing.faults --mode {mode} --seeds {seed}:{seed + 1}"
        one, other = seen(story)
        struck.update(one)
        answered.update(other)
    assert set(answered) == set(FaultKind), f"never noticed: {set(FaultKind) - set(answered)}"
    assert sum(answered.values()) > 0.7 * sum(struck.values()), f"struck {struck}, noticed {answered}"


def test_the_same_seed_gives_the_same_journals_byte_for_byte() -> None:
    for seed in range(100, 106):
        schedule = draw(seed)
        assert digest(live(schedule)) == digest(live(schedule)), f"seed {seed}"
    assert digest(live(draw(100))) != digest(live(draw(101)))


@pytest.mark.parametrize(
    "mutation", [m for m in MUTATIONS if m.name in ("accumulated_twice", "served_unchecked", "window_ignored")]
)
def test_a_broken_rule_is_caught(mutation: Mutation) -> None:
    caught = catch(mutation, range(60))
    assert caught.seed is not None, f"no law noticed that {mutation.breaks}"
    assert not try_seed(caught.seed, mutation.mode).broken, "the sound rule breaks a law too"


def test_the_command_says_what_struck_and_what_held() -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--seeds", "0:6", "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["seeds"], told["broken"]) == (6, {})
    assert sum(told["struck"].values()) > 6


def test_seeds_that_are_no_range_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--seeds is '7'; give the first one and the one after the last"):
        main(seeds="7")


def test_a_plan_draws_every_kind_and_follows_its_seed() -> None:
    plans = [draw_plan(Random(seed), TARGETS) for seed in range(200)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FaultKind) == set(REACTIONS)
    assert plans == [draw_plan(Random(seed), TARGETS) for seed in range(200)]


def test_a_checkpoint_is_torn_only_where_the_controller_is_lost_too() -> None:
    for seed in range(200):
        plan = draw_plan(Random(seed), TARGETS)
        if plan.of(FaultKind.TORN_CHECKPOINT):
            assert plan.of(FaultKind.LOST_CONTROLLER)


def test_a_frozen_policy_is_asked_to_load_nothing() -> None:
    for seed in range(200):
        for fault in draw_plan(Random(seed), TARGETS).of(FaultKind.FAILED_PUBLISH):
            assert fault.target.startswith("solver/")


def test_every_law_has_its_own_words() -> None:
    assert len({law.__doc__ for law in LAWS.values()}) == len(LAWS)
