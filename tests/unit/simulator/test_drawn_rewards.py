"""Rewards drawn by lot: they differ between tasks and episodes, and repeat."""

from dataclasses import replace
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.records import RowState
from flexmarl.simulator.replies import DrawnRewards, drawn
from flexmarl.testing.scripted_run import ScriptedRun


@given(
    success=st.floats(0, 1), spread=st.floats(0, 1), seed=st.integers(0, 99), task=st.text("ab"), trajectory=st.text()
)
def test_a_reward_is_a_function_of_seed_task_and_episode(success, spread, seed, task, trajectory):
    rewards = DrawnRewards(success=success, spread=spread)
    reward = rewards.draw(seed, task, trajectory)
    assert reward in (0.0, 1.0)
    assert reward == rewards.draw(seed, task, trajectory)


def test_episodes_succeed_as_often_as_is_asked_and_tasks_differ():
    def mean(rewards, task):
        return fmean(rewards.draw(0, task, f"e{n}") for n in range(400))

    tasks = [f"task-{n}" for n in range(60)]
    alike = [mean(DrawnRewards(success=0.3, spread=0.0), task) for task in tasks]
    wide = [mean(DrawnRewards(success=0.5, spread=0.5), task) for task in tasks]
    assert all(abs(one - 0.3) < 0.12 for one in alike)  # Five standard errors of 400 draws.
    assert max(wide) - min(wide) > 0.5
    assert all(mean(DrawnRewards(success=chance, spread=0.0), "task") == chance for chance in (0.0, 1.0))


async def flat(task, team):
    for seat in team:
        await seat.act(task.prompt)
    team.reward(0.25)


def test_drawn_rewards_take_the_place_of_the_workflows_and_rows_are_trained():
    run = ScriptedRun(flat, steps=2, batch={"groups": 4, "episodes": 4}, credit={"filter": {}})
    team = run.blueprint.team
    run.blueprint = replace(run.blueprint, team=drawn(team, DrawnRewards(), seed=0))
    run.play()
    rows = run.rows()
    assert {row.values["reward"] for row in rows} == {0.0, 1.0}
    assert RowState.TRAINED in {row.state for row in rows}
    assert drawn(team, None, seed=0) is team
