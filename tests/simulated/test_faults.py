"""Random runs with random faults keep every law, and a rule that is broken on purpose breaks one."""

import itertools
import json
import logging
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from flexmarl.analysis.costs import TrainerCosts
from flexmarl.events.group_events import EpisodeLost
from flexmarl.experience.interface import Row
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import AgentName, InstanceId, MicroBatch, PolicyName, RowState, SampleId, Version
from flexmarl.simulator.modelled_trainer import ModelledTrainer
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.faults.__main__ import main
from flexmarl.testing.faults.fault_plan import DRAWN, PLACED, FaultKind, FaultPlan, Targets, draw_plan
from flexmarl.testing.faults.faulty import FaultyTrainer
from flexmarl.testing.faults.injection import Injection
from flexmarl.testing.faults.laws import LAWS, broken
from flexmarl.testing.faults.laws_of_serving import law_3_tokens_are_as_fresh_as_promised
from flexmarl.testing.faults.lives import Stuck, at_most, live
from flexmarl.testing.faults.mutations import MUTATIONS, Mutation
from flexmarl.testing.faults.schedule import ENGINE_COSTS, MODES, PER_POLICY, draw, loses_while_streaming
from flexmarl.testing.faults.story import Life, Story
from flexmarl.testing.faults.trials import catch, digest, try_seed
from flexmarl.testing.faults.watched import WatchedCache, WatchedTrainer
from flexmarl.testing.faults.witness import COMBINATIONS, combined, reactions_of, seen
from flexmarl.testing.scripted_run import ScriptedRun
from flexmarl.training.aggregation import divisors_of
from tests.unit.training.conftest import random_samples

BURN = "import time\nwhile time.process_time() < {seconds}: pass"
INSTANCES = (InstanceId("solver", 0), InstanceId("solver", 1), InstanceId("frozen", 0))
TARGETS = Targets(instances=INSTANCES, trained=(PolicyName("solver"),), groups=2, steps=3)


@pytest.fixture(autouse=True)
def _quiet():
    """Tasks of a killed run say so to nobody."""
    logger = logging.getLogger("asyncio")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.parametrize("num", [36, pytest.param(64, marks=pytest.mark.deep)])
def test_a_run_keeps_every_law_whatever_breaks(num: int) -> None:
    struck, answered = Counter[FaultKind](), Counter[FaultKind]()
    for seed in range(num):
        mode = MODES[seed % len(MODES)]
        story = live(draw(seed, mode=mode))
        assert broken(story) == {}, f"python -m flexmarl.testing.faults --mode {mode} --seeds {seed}:{seed + 1}"
        one, other = seen(story)
        struck.update(one)
        answered.update(other)
    assert set(answered) == {*DRAWN, *PLACED}, f"never noticed: {({*DRAWN, *PLACED}) - set(answered)}"
    assert sum(answered.values()) > 0.7 * sum(struck.values()), f"struck {struck}, noticed {answered}"


@pytest.mark.parametrize("num", [24, pytest.param(200, marks=pytest.mark.deep)])
def test_episodes_of_lost_rollout_workers_and_nodes_are_played_again_and_every_law_holds(num: int) -> None:
    """A share of the random runs, alone: those whose episodes are played on several nodes."""
    struck, answered, replayed = Counter[FaultKind](), Counter[FaultKind](), 0
    seeds = (seed for seed in itertools.count() if draw(seed).workers)
    for seed in itertools.islice(seeds, num):
        story = live(draw(seed))
        assert broken(story) == {}, f"python -m flexmarl.testing.faults --seeds {seed}:{seed + 1}"
        one, other = seen(story)
        struck.update(one)
        answered.update(other)
        replayed += any(isinstance(event, EpisodeLost) for event in story.events)
    assert replayed >= num / 4, "the witness that workers died while they played"
    for kind in PLACED:
        assert answered[kind] >= max(num / 8, 0.7 * struck[kind]), f"{kind} struck {struck}, noticed {answered}"


def test_a_run_that_streams_credit_and_loses_its_trainer_keeps_every_law() -> None:
    seeds = [seed for seed in range(1000) if loses_while_streaming(seed)][:12]
    together = Counter[str]()
    for seed in seeds:
        story = live(draw(seed))
        assert broken(story) == {}, f"python -m flexmarl.testing.faults --seeds {seed}:{seed + 1}"
        together += combined(story)
    wanted = {"losses_while_streaming", "batch_id_reused"}
    assert wanted <= set(together), f"never came together: {wanted - set(together)}"


def test_programs_that_misbehave_lose_no_token_whatever_befalls_the_run() -> None:
    together = Counter[str]()
    for seed in [seed for seed in range(1000) if draw(seed).programs][:40]:
        story = live(draw(seed))
        assert broken(story) == {}, f"python -m flexmarl.testing.faults --seeds {seed}:{seed + 1}"
        together += combined(story)
    wanted = {name for name in COMBINATIONS if name.startswith("program_") or name.endswith("at_a_door")}
    assert len(wanted) == 5
    assert not [name for name in wanted if together[name] < 3], together


def test_updates_are_deferred_and_instances_lost_in_runs_of_the_asynchronous_modes() -> None:
    together = Counter[str]()
    for seed in range(400):
        if "publish" in draw(seed).sections["pipeline"]:
            story = live(draw(seed))
            assert broken(story) == {}, f"python -m flexmarl.testing.faults --seeds {seed}:{seed + 1}"
            together += combined(story)
        if together["deferred_and_lost"] == 3:
            return
    raise AssertionError(f"only {together['deferred_and_lost']} of 400 runs lost an instance after a deferred update")


def test_of_3000_runs_a_hundred_stream_credit_to_swapped_trainers_and_lose_one_and_a_write() -> None:
    drawn = [draw(seed) for seed in range(3000) if loses_while_streaming(seed)]
    assert len(drawn) >= 100
    for schedule in drawn:
        assert schedule.plan.of(FaultKind.LOST_TRAINER)
        assert schedule.plan.of(FaultKind.STORE_FAILURE)
        assert schedule.sections["credit"]["streaming"] == "linear"
        assert schedule.sections["process_groups"]["at_once"] == 1


def test_rows_under_the_id_of_a_dropped_micro_batch_are_remembered() -> None:
    # A step was filtered, and the rows of the next one, under the same ids, were trained and not remembered.
    solver = PolicyName("solver")
    dropped, *trained = (sample for sample in random_samples(0, weights=(1.0,)) if sample.num_tokens)

    async def scenario() -> WatchedTrainer:
        cache = WatchedCache(solver)
        modelled = ModelledTrainer(solver, TrainerCosts(sample_s=0.1), InlineObjectStore(), cache=cache)
        trainer = WatchedTrainer(FaultyTrainer(modelled, Injection(FaultPlan())), cache)
        samples = (replace(dropped, open_group="g"),)
        await trainer.accumulate_batch(MicroBatch(micro_batch_id="solver/0/0", policy=solver, samples=samples))
        await trainer.close_groups({"g": None})
        await trainer.accumulate_batch(MicroBatch(micro_batch_id="solver/0/0", policy=solver, samples=tuple(trained)))
        await trainer.step(divisors_of(trained))
        return trainer

    (update,) = run_virtual(scenario()).updates.values()
    assert update == {"solver/0/0": [sample.turn.sample_id for sample in trained]}


def test_the_same_seed_gives_the_same_journals_byte_for_byte() -> None:
    for seed in range(100, 106):
        schedule = draw(seed)
        assert digest(live(schedule)) == digest(live(schedule)), f"seed {seed}"
    assert digest(live(draw(100))) != digest(live(draw(101)))


@pytest.mark.parametrize(
    "mutation",
    [m for m in MUTATIONS if m.name in ("accumulated_twice", "served_unchecked", "window_ignored")],
)
def test_a_broken_rule_is_caught(mutation: Mutation) -> None:
    caught = catch(mutation, range(60))
    assert caught.seed is not None, f"no law noticed that {mutation.breaks}"
    assert not try_seed(caught.seed, mutation.mode).broken, "the sound rule breaks a law too"


def test_a_gradient_that_is_lost_under_a_reused_id_is_caught_by_the_law_of_samples() -> None:
    (mutation,) = (mutation for mutation in MUTATIONS if mutation.name == "reused_id_lost")
    caught = catch(mutation, [seed for seed in range(1000) if loses_while_streaming(seed)])
    assert "5" in caught.laws, caught
    assert not try_seed(caught.seed or 0, mutation.mode).broken, "the sound rule breaks a law too"


def test_where_policies_update_on_their_own_groups_are_counted_and_not_versions() -> None:
    # Of P = 3, S = 1 and W = 3: at most B + W - 2 = 7 groups, in however many versions.
    assert list(law_3_tokens_are_as_fresh_as_promised(_overtaken(by=[3, 2, 1, 1], mode=PER_POLICY))) == []
    (because,) = law_3_tokens_are_as_fresh_as_promised(_overtaken(by=[3, 3, 2], mode=PER_POLICY))
    assert because == "task-8_0_g8e0a0 was sampled at 0, and then 8 groups were trained, > 7"
    (because,) = law_3_tokens_are_as_fresh_as_promised(_overtaken(by=[3, 2, 1, 1], mode="async"))
    assert because == "task-8_0_g8e0a0 was sampled at 0 and trained into 5: lag 4 > 2"


def _overtaken(*, by: list[int], mode: str) -> Story:
    """Group 8 was sampled at version 0, and trained after so many others in each of the next versions."""
    others = iter([group for group in range(20) if group != 8])
    updates = {Version(at): {"": [_sample(next(others)) for _ in range(many)]} for at, many in enumerate(by, start=1)}
    settled = Version(len(by) + 1)
    trainer = SimpleNamespace(base=Version(0), updates=updates | {settled: {"": [_sample(8)]}})
    updates_of = "per_policy" if mode == PER_POLICY else "together"
    settings = ScriptedRun(
        mode="async",
        batch={"groups": 3, "episodes": 2},
        pipeline={"lag": 1, "window": 0.5, "updates": updates_of},
    ).settings
    life = Life(
        events=[],
        error=None,
        killed=False,
        hung=False,
        engines={},
        trainers=cast(Any, {PolicyName("solver"): trainer}),
    )
    row = Row(
        sample_id=_sample(8),
        agent=AgentName("solver"),
        policy=PolicyName("solver"),
        version=Version(0),
        state=RowState.TRAINED,
        next_agent_id=None,
        cache=None,
        settled_version=settled,
        reason="",
        values={"version_runs": [[0, 0]]},
    )
    return Story(settings=settings, lives=[life], rows=[row])


def _sample(group: int) -> SampleId:
    return SampleId(f"task-{group}_0_g{group}e0a0")


def test_a_life_is_stuck_when_it_computes_and_not_when_it_waits_for_others_that_do() -> None:
    with at_most(0.2):
        subprocess.run([sys.executable, "-c", BURN.format(seconds=0.5)], check=True)
    with pytest.raises(Stuck, match=r"it computed for more than 0\.2 s"), at_most(0.2):
        exec(BURN.format(seconds=600))


@pytest.mark.deep
def test_a_busy_machine_breaks_no_law() -> None:
    with ExitStack() as busy:
        for _ in range(8):
            process = busy.enter_context(subprocess.Popen([sys.executable, "-c", BURN.format(seconds=600)]))
            busy.callback(process.kill)
        assert [seed for seed in range(20177, 20185) if try_seed(seed).broken] == []


def test_the_command_says_what_struck_and_what_held() -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--seeds", "0:6", "--jobs", "1", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["seeds"], told["broken"]) == (6, {})
    assert sum(told["struck"].values()) > 6


def test_a_kind_that_is_witnessed_too_seldom_fails_the_command_by_name() -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--seeds", "0:2,5:7", "--jobs", "1", "--json", "--least", "300"])
    assert result.exit_code == 1
    assert "batch_id_reused was witnessed 0 times, --least is 300" in result.stderr.replace("\n", " ")
    assert json.loads(result.stdout.splitlines()[-1])["seeds"] == 4


def test_seeds_that_are_no_range_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="--seeds is '7'; give the first one and the one after the last"):
        main(seeds="7")


def test_a_plan_draws_every_kind_and_follows_its_seed() -> None:
    plans = [draw_plan(Random(seed), TARGETS) for seed in range(200)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(DRAWN)
    assert set(reactions_of(lambda policy: ENGINE_COSTS)) == set(FaultKind)
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
