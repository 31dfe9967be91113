"""Every term of a reward is seen apart, in the metrics and in the journal."""

import pytest

from flexmarl.events.group_events import GroupsCredited
from flexmarl.testing.scripted_run import ScriptedRun


async def styled(task, team):
    first = await team.solver.act(task.prompt)
    await team.judge.act(first.text)
    team.reward(task.score(first.text))
    first.reward(0.5, part="style")
    team.judge.reward(0.25)


def played(**credit):
    return ScriptedRun(
        styled,
        agents={"solver": "solver", "judge": "judge"},
        batch={"groups": 3, "episodes": 4},
        credit={"filter": None, **credit},
    ).play()


def test_each_part_has_a_mean_per_agent_and_they_add_up_to_the_reward():
    run = played(shaping=[{"type": "hop_weighted", "agents": ["judge"]}], invalid_action={"penalty": 0.125})
    metrics = run.metrics[1]
    parts = {name.removeprefix("reward_part/"): v for name, v in metrics.items() if name.startswith("reward_part/")}
    assert set(parts) == {
        "solver/outcome",
        "solver/style",
        "solver/invalid_action",
        "judge/outcome",
        "judge/hop_weighted",
        "judge/invalid_action",
    }
    assert parts["solver/style"] == 0.5
    assert parts["judge/outcome"] == pytest.approx(parts["solver/outcome"] + 0.25)
    assert parts["judge/hop_weighted"] == pytest.approx(-0.8 * parts["judge/outcome"]), "hop 1 of 10 counts 0.2"
    assert metrics["reward/solver"] == pytest.approx(parts["solver/outcome"] + 0.5), "as the workflow gave it"


def test_the_journal_says_what_the_credited_rewards_were_made_of():
    run = played()
    for event in run.events.of(GroupsCredited):
        solver = event.parts["solver"]
        assert solver["turns"] == 4
        assert solver["means"]["style"] == 0.5


def test_a_part_that_only_one_group_has_counts_0_in_the_others():
    seen: set[str] = set()

    async def rare(task, team):
        reply = await team.solver.act(task.prompt)
        seen.add(task.input_id)
        reply.reward(task.score(reply.text))
        if task.input_id == min(seen):
            reply.reward(0.5, part="rare")

    metrics = ScriptedRun(rare, batch={"groups": 3, "episodes": 4}, credit={"filter": None}).play().metrics[1]
    assert len(seen) == 3
    assert metrics["reward_part/solver/rare"] == pytest.approx(0.5 / 3)
    parts = [value for name, value in metrics.items() if name.startswith("reward_part/solver/")]
    assert sum(parts) == pytest.approx(metrics["reward/solver"])
