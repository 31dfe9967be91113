"""The world of the example, its rewards, tasks, demonstrations, and the seed model that ships."""

import itertools
import random
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from examples.cold_start import encode  # noqa: E402
from examples.math_team.tokenizer import build_tokenizer  # noqa: E402
from examples.plan_path.demonstrations import demonstration, noise, shortest, translated  # noqa: E402
from examples.plan_path.grid import (  # noqa: E402
    BUMP,
    COMPASS,
    MOVES,
    ROUNDS,
    TURNS,
    Grid,
    PlanPath,
    absolute,
    plan_path_task,
    split_of,
)
from examples.plan_path.workflow import ASTRAY, BLOCKED, plan_or_move, told  # noqa: E402
from flexmarl.agents.chat import ChatRenderer, Message  # noqa: E402
from flexmarl.config import load_run  # noqa: E402
from flexmarl.records import Task  # noqa: E402
from flexmarl.simulator.virtual_time import run_virtual  # noqa: E402
from flexmarl.testing.plugin_checks import check_environment  # noqa: E402
from tests.docs.pages import commands  # noqa: E402
from tests.unit.agents.tables import context, spec  # noqa: E402

SEED_MODEL = ROOT / "examples" / "plan_path" / "seed_model"
CPU = ROOT / "examples" / "plan_path" / "cpu.yaml"
DETOUR = ".G./.#A/..."
"""Two ways to the goal: two moves, or six around the wall."""


def words(letters):
    return ["".join(said) for n in range(1, MOVES + 1) for said in itertools.product(letters, repeat=n)]


def world(text=DETOUR, seed=0):
    made = PlanPath(Task(input_id="x", prompt=text))
    made.reset(seed)
    return made


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_world_keeps_the_laws_of_environments(index):
    task = plan_path_task(0, index, "train")
    check_environment(lambda: PlanPath(task), actions=words(TURNS), num_plays=3)


def test_the_executor_moves_relative_to_where_it_faces_and_a_move_turns_it():
    made = world(DETOUR, seed=next(seed for seed in range(99) if world(seed=seed).observe()[0] == "E"))
    assert (made.map(), made.observe()) == (".G./.#A/...", "E#.#."), "east is the edge, west the wall"
    first = made.step("R")
    assert (made.map(), made.observe()) == (".G./.#./..A", "S#..#"), "the south-east corner"
    assert (first.reward, first.done) == (-1.0, False)
    second = made.step("F")
    assert (second.reward, made.map()) == (-BUMP, ".G./.#./..A")
    third = made.step("BF")
    assert (third.reward, made.map()) == (2.0, ".GA/.#./...")
    fourth = made.step("L")
    assert (fourth.reward, fourth.done, made.arrived) == (2.0, True, True)


@pytest.mark.parametrize("nonsense", ["", "X", "FFF", "N", "f", "F "])
def test_what_is_no_move_is_a_bump(nonsense):
    made = world()
    assert made.step(nonsense).reward == -BUMP
    assert made.map() == DETOUR


def test_a_promise_is_what_following_the_plan_gives():
    for index in range(60):
        made = world(plan_path_task(1, index, "train").prompt, seed=index)
        for plan in words(COMPASS):
            snapshot, (promised, target, walls) = made.snapshot(), made.promise(plan)
            result = made.step(translated(plan, made.observe()[0]))
            assert (result.reward, made.place) == (promised - BUMP * walls, target)
            made.restore(snapshot)
    assert world().promise("up") == (0.0, (1, 2), 1)


PLANS, MOVED = [*words(COMPASS), "?"], [*words(TURNS), "?"]


def rounds_of(script):
    """(reward of the plan, of the moves, of the environment) of each round in which a team says these words."""
    left, task = list(script), Task(input_id="x", prompt=DETOUR)
    agents = {"planner": {"system": "plan"}, "executor": {"system": "move"}}
    team = spec(agents).seat(context(lambda *_: left.pop(0), task=task, environment=PlanPath))

    async def play():
        while left and not await plan_or_move(task, team):
            pass

    team.environment.reset(0)
    start = team.environment.grid.worth(team.environment.place)
    run_virtual(play())
    given = list(team.rewards().values())
    return given[::2], given[1::2], team.environment.grid.worth(team.environment.place) - start


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLANS), st.sampled_from(MOVED)), min_size=1, max_size=ROUNDS))
def test_whatever_is_said_the_two_together_never_earn_more_than_was_gained(rounds):
    plans, moves, gained = rounds_of([said for pair in rounds for said in pair])
    assert all(reward <= 0 for reward in moves), "the executor pays; it never earns by anything but doing its part"
    assert sum(plans) + sum(moves) <= gained + 1e-12


def test_each_pays_for_its_own_faults():
    facing = world(seed=0).observe()[0]
    plans, moves, gained = rounds_of(["E", translated("E", facing)])
    assert (plans, moves, gained) == ([-BLOCKED], [-BUMP], 0.0), "both ran into the edge"
    plans, moves, gained = rounds_of(["N", translated("S", facing)])
    assert (plans, moves, gained) == ([1.0], [-2.0 - ASTRAY], -1.0), "one was to go north and went south"


def test_the_way_ends_at_the_goal():
    assert Grid("AG.").follow((0, 0), "EE") == ((0, 1), 0)


def test_who_does_their_part_earns_all_that_was_gained():
    facing = world(seed=0).observe()[0]
    plans, moves, gained = rounds_of(["NW", translated("NW", facing)])
    assert (plans, moves, gained) == ([3.0], [0.0], 3.0)


GRIDS = ["A.G", "A../.#./..G", DETOUR, "A#G/..."]


@pytest.mark.parametrize("text", GRIDS)
@pytest.mark.parametrize("who", ["team", "planner", "executor"])
def test_no_loitering_beats_the_best_way_to_the_goal(text, who):
    """All plays of ROUNDS rounds are enumerated: of the team, and of each agent beside one that does its part."""
    best = best_returns(text, who, discount=1.0)
    assert best["arrives"] > best["loiters"]


def test_with_another_discount_in_the_potential_loitering_pays():
    """The mutation that the law is about: with g = 0.5 moves back and forth earn more than the way to the goal."""
    best = best_returns("A.....G", "team", discount=0.5)
    assert best["arrives"] < best["loiters"]


def best_returns(text, who, *, discount):
    """The highest return of plays that arrive, and of those that do not."""
    grid = Grid(text)

    def rounds(place):
        """(next place, reward) of all rounds from here that the agent in question can bring about."""
        for plan in words(COMPASS):
            target, walls = grid.follow(place, plan)
            named = discount * grid.worth(target) - grid.worth(place)
            if who == "executor" and (walls or named < max_gain(grid, place)):
                continue  # The planner plans a shortest way.
            for done in words(COMPASS) if who != "planner" else [plan]:  # The executor does as it is told.
                after, bumps = grid.follow(place, done)
                gained = discount * grid.worth(after) - grid.worth(place) - BUMP * bumps
                parts = {
                    "planner": named - BLOCKED * walls,
                    "executor": min(0.0, gained - named) - ASTRAY * (after != target),
                }
                yield after, parts.get(who, sum(parts.values()))

    @cache
    def best(place, left, arrives):
        if place == grid.goal or left == 0:
            return 0.0 if (place == grid.goal) == arrives else float("-inf")
        return max(reward + best(after, left - 1, arrives) for after, reward in set(rounds(place)))

    return {"arrives": best(grid.start, ROUNDS, True), "loiters": best(grid.start, ROUNDS, False)}


def max_gain(grid, place):
    return max(grid.worth(grid.follow(place, plan)[0]) for plan in words(COMPASS)) - grid.worth(place)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_a_task_is_a_function_of_its_arguments_and_stays_in_its_split(seed, index, split):
    task = plan_path_task(seed, index, split)
    assert task == plan_path_task(seed, index, split)
    assert split_of(task.prompt) == split
    assert 3 <= Grid(task.prompt).distances[Grid(task.prompt).start] == task.data["distance"] <= 6
    assert task.prompt.count("#") == 4


def test_a_map_stays_in_its_split_wherever_the_executor_is():
    text = plan_path_task(0, 0, "held_out").prompt
    grid = Grid(text)
    assert {split_of(grid.drawn(place)) for place in grid.free - {grid.goal}} == {"held_out"}


@given(st.text(COMPASS, min_size=1, max_size=4), st.sampled_from(COMPASS))
def test_translated_and_absolute_are_inverse(plan, facing):
    assert absolute(translated(plan, facing), facing) == plan


def test_a_demonstrated_plan_leads_nearer_with_every_move():
    rng = random.Random(0)
    for index in range(100):
        grid = Grid(plan_path_task(2, index, "train").prompt)
        place, walls = grid.follow(grid.start, plan := shortest(grid, grid.start, rng))
        assert (grid.distances[place], walls) == (grid.distances[grid.start] - len(plan), 0)


@pytest.mark.parametrize("careless", [0.0, 0.6])
def test_demonstrations_are_tokenised_as_the_run_renders_them_and_hold_no_map_of_the_test(careless):
    tokenizer, rng = build_tokenizer(), random.Random(0)
    renderer = ChatRenderer(tokenizer)
    assert not renderer.extension.refused
    for _ in range(100):
        messages = demonstration(rng, careless)
        row = encode(tokenizer, messages)
        prompt = renderer.render([Message(**message) for message in messages[:2]])
        assert row.ids[: len(prompt)].tolist() == prompt.tolist()
        assert tokenizer.decode(row.ids[row.trained]) == messages[2]["content"] + "<|end|>"
        if messages[0]["content"] == "plan":
            assert split_of(messages[1]["content"]) == "train"


def test_what_the_executor_is_told_has_one_width():
    rng = random.Random(0)
    assert {len(told(said, "E.#..")) for said in ("", "N", "NE", "nonsense", noise(rng, COMPASS))} == {8}


def test_the_seed_model_that_ships_loads_and_has_the_stated_size():
    model = AutoModelForCausalLM.from_pretrained(SEED_MODEL)
    assert 0.5e6 < model.num_parameters() < 0.7e6
    tokenizer = AutoTokenizer.from_pretrained(SEED_MODEL)
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert tokenizer.chat_template == build_tokenizer().chat_template


@pytest.mark.parametrize("command", commands("examples/plan_path/README.md"))
def test_every_command_of_the_page_is_one_that_there_is(command):
    program, *rest = shlex.split(command)
    if program == "python":
        assert rest[0] == "-m"
        assert (ROOT / rest[1].replace(".", "/")).with_suffix(".py").is_file()
        return
    assert program == "flexmarl"
    doing, source, *overrides = rest
    assert doing in ("train", "eval")
    load_run(ROOT / source if doing == "train" else CPU, overrides)


@pytest.mark.parametrize("config", ["cpu", "shared", "tree"])
def test_the_configs_differ_in_what_they_are_named_for(config):
    settings = load_run(CPU.with_stem(config))
    same = {"tasks", "rollout", "evaluate", "steps", "cluster"}
    assert settings.model_dump(include=same) == load_run(CPU).model_dump(include=same)
    assert settings.trained == ({"both"} if config == "shared" else {"planner", "executor"})
    candidates = settings.team.workflow.candidates
    assert candidates * settings.batch.episodes == 8, "every run plays a task eight times"
