"""Whole runs with estimators that remember, killed and resumed ones too, or that compare with a greedy play."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from flexmarl.agents import Team
from flexmarl.errors import EpisodeError
from flexmarl.events.group_events import GroupFiltered
from flexmarl.events.run_events import StoreRewound
from flexmarl.experience.interface import Row
from flexmarl.records import GenerationRequest, RowState, Task, split_sample_id, split_trajectory_id
from flexmarl.testing.scripted_run import ScriptedRun
from tests.simulated.conftest import Schedule, check_equal, groups_that_ended, lives, undisturbed

FEW = Schedule(seed=3, groups=2, estimator="rae", micro_batch=2)
FAULTY = Schedule(episodes=3, raising=0.2, forgetful=0.1, slow_calls=0.2, failed_calls=0.2, stuck=0.1)
SECTIONS = {"steps": 3, "evaluate": {"tasks": 1}}
GREEDY = "the greedy play: others are compared with it"


def of_step(rows: Sequence[Row], groups: range) -> list[Row]:
    return [row for row in rows if group_of(row) in groups]


def group_of(row: Row) -> int:
    return split_trajectory_id(split_sample_id(row.sample_id)[2])[0]


def episode_of(row: Row) -> int:
    return split_trajectory_id(split_sample_id(row.sample_id)[2])[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_that_remembers_baselines_is_killed_and_ends_as_if_undisturbed(deterministic: bool) -> None:
    schedule = replace(FEW, deterministic=deterministic)
    whole = undisturbed(schedule, **SECTIONS)
    assert groups_that_ended([whole]) == list(range(6))
    went_back_to = Counter[int]()
    for moment in range(5, 10_000, 9):
        lived = lives(schedule, [moment], checkpoint={"every": 1}, **SECTIONS)
        check_equal(lived, whole, schedule)
        if len(lived) == 1:
            break
        went_back_to.update(event.next_group for event in lived[1].events.of(StoreRewound))
    assert {2, 4} <= set(went_back_to)


def test_what_is_remembered_is_the_average_over_all_steps_so_far() -> None:
    rows = [row for row in undisturbed(FEW, **SECTIONS).rows() if row.state is RowState.TRAINED]
    baselines: dict[str, float] = {"solver": 0.0, "verifier": 0.0}
    for step in range(3):
        of_agent: dict[str, list[Row]] = {agent: [] for agent in baselines}
        for row in sorted(
            of_step(rows, range(2 * step, 2 * step + 2)), key=lambda row: (group_of(row), episode_of(row))
        ):
            of_agent[row.agent].append(row)
        for agent, agents_rows in of_agent.items():
            for row in agents_rows:
                reward = row.values["reward"]
                assert row.values["advantage"] == pytest.approx(reward - baselines[agent], abs=1e-12)
                baselines[agent] = 0.95 * baselines[agent] + 0.05 * reward
    assert all(baselines.values())


async def answered(task: Task, team: Team) -> None:
    reply = await team.solver.act(task.prompt)
    reply.reward(task.score(reply.text))
    team.report(success=task.score(reply.text))


def greedily_right(prompt: str, request: GenerationRequest) -> str:
    """Right at temperature 0, and in episodes with an even number."""
    right = not request.sampling.temperature or split_trajectory_id(split_sample_id(request.request_id)[2])[1] % 2 == 0
    return "a" if right else "b"


REMAX = {"estimator": {"type": "remax"}, "filter": None}


@pytest.mark.parametrize("order", ["free", "lockstep"])
@pytest.mark.parametrize("mode", ["microbatch", "sync", "one_step_off"])
def test_each_group_is_compared_with_one_greedy_play_that_is_in_no_count(mode: str, order: str) -> None:
    sections = {"mode": mode, "rollout": {"order": order}, "steps": 2, "batch": {"groups": 2, "episodes": 2}}
    run = ScriptedRun(answered, greedily_right, credit=REMAX, **sections).play()
    rows = [row for row in run.rows() if row.state is not RowState.EXPIRED]
    trained = [row for row in rows if row.state is RowState.TRAINED]
    assert len(trained) == 8
    assert {(episode_of(row), row.values["advantage"]) for row in trained} == {(0, 0.0), (1, -1.0)}
    greedy = [row for row in rows if episode_of(row) == 2]
    assert {group_of(row) for row in greedy} >= {group_of(row) for row in trained}
    assert {(row.state, row.reason, row.values["reward"]) for row in greedy} == {(RowState.FILTERED, GREEDY, 1.0)}
    assert run.metrics[1]["team/success"] == 0.5
    assert run.metrics[1]["rollout/episodes"] == 2 * run.metrics[1]["rollout/groups"]


def test_a_group_whose_greedy_play_fails_has_no_baseline_and_is_filtered() -> None:
    async def fails_greedily(task: Task, team: Team) -> None:
        reply = await team.solver.act(task.prompt)
        if reply.text.startswith("!") and task.input_id == "task-0":
            raise EpisodeError("stuck")
        reply.reward(task.score(reply.text))

    def say(prompt: str, request: GenerationRequest) -> str:
        return "a" if request.sampling.temperature else "!"

    run = ScriptedRun(fails_greedily, say, credit=REMAX, steps=1, batch={"groups": 2, "episodes": 2}).play()
    (filtered,) = run.events.of(GroupFiltered)
    assert filtered.group == 0
    assert filtered.because.startswith("no baseline: the greedy play failed: ")
    assert "stuck" in filtered.because
    states = Counter((group_of(row), row.state) for row in run.rows())
    assert states == {
        (0, RowState.FILTERED): 2,
        (0, RowState.FAILED): 1,
        (1, RowState.TRAINED): 2,
        (1, RowState.FILTERED): 1,
    }


@pytest.mark.parametrize("estimator", ["remax", "rae", "reinforce++"])
def test_under_faults_every_row_and_every_group_still_ends(estimator: str) -> None:
    seen = Counter[RowState]()
    for seed in range(12):
        schedule = replace(FAULTY, seed=seed, estimator=estimator, filtered=seed % 2 == 0)
        run = undisturbed(schedule)
        states = Counter(row.state for row in run.rows())
        seen.update(states)
        assert set(states) <= {RowState.TRAINED, RowState.FILTERED, RowState.FAILED}
        if run.outcome:
            assert groups_that_ended([run]) == list(range(6))
    assert set(seen) == {RowState.TRAINED, RowState.FILTERED, RowState.FAILED}
