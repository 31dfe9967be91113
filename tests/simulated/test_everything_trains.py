"""Every estimator and every term of the tables through the whole pipeline, with the tags that they need."""

from math import isfinite
from typing import Any

import pytest

from flexmarl.agents import Team, Workflow
from flexmarl.agents.patterns import grow
from flexmarl.credit import CreditSettings
from flexmarl.credit.estimators import ESTIMATORS
from flexmarl.credit.shaping import SHAPING
from flexmarl.events.group_events import GroupsCredited
from flexmarl.records import GenerationRequest, PolicyName, Purpose, RowState, Task
from flexmarl.testing.scripted_run import ScriptedRun

AGENTS = {"solver": "solver", "verifier": "verifier"}
CRITIC = {name: {"training": {"critic": {}}} for name in AGENTS}
OPTIONS: dict[str, dict[str, Any]] = {
    "hierarchical": {"episode_roles": ["verifier"]},
    "learnability": {"agents": ["solver"], "solvers": ["verifier"]},
    "overlong": {"max_tokens": 8, "buffer": 4},
}
"""What an entry of a table cannot do without, or what fits it to trees."""


async def turn(task: Task, team: Team) -> bool:
    """Solver, verifier, solver; every call carries whatever an estimator or a term may look at."""
    step = team.solver.state.get("step", 0)
    team.solver.state["step"] = step + 1
    said = {"anchor": f"state {step}", "env_step": step, "potential": -(0.5**step)}
    reply = await (team.verifier if step == 1 else team.solver).act(f"{task.prompt}, step {step}", **said)
    reply.reward(task.score(reply.text[:1]))
    reply.reward(len(reply.text) / 16, part="care")
    team.report(success=task.score(reply.text[:1]))
    return step == 2


def say(prompt: str, request: GenerationRequest) -> str:
    """Right or wrong, in one to sixteen letters, by the call's seed."""
    return "ab"[request.seed % 2] * (1 + request.seed // 2 % 16)


def grown(candidates: int) -> Workflow:
    """Three turns with so many candidates each; the best goes on."""

    async def play(task: Task, team: Team) -> None:
        tried = candidates if team.context.purpose is Purpose.TRAINING else 1
        await grow(turn, task, team, candidates=tried, keep=1, max_turns=3)

    return play


def trained(credit: dict[str, Any], **sections: Any) -> ScriptedRun:
    """Two steps, on trees where all that is chosen can look at trees; all of a batch must be there, and finite."""
    chosen = CreditSettings.model_validate({"filter": None, **credit})
    run = ScriptedRun(
        grown(1 if chosen.follows_calls else 2),
        say,
        agents=AGENTS,
        credit=chosen,
        steps=2,
        batch={"groups": 2, "episodes": 3},
        **sections,
    ).play()
    assert run.outcome is not None
    assert run.outcome.steps == 2
    assert {row.state for row in run.rows()} <= {RowState.TRAINED, RowState.FILTERED}
    rows = [row for row in run.rows() if row.state is RowState.TRAINED]
    assert all(isfinite(row.values["advantage"]) for row in rows)
    assert all(isfinite(value) for figures in run.metrics.values() for value in figures.values())
    for agent, policy in AGENTS.items():
        assert any(row.values["advantage"] for row in rows if row.agent == agent), f"{agent} learns nothing"
        assert run.trainers[PolicyName(policy)].version == 2
    return run


RETURNS: dict[str, Any] = {"estimator": {"type": "reinforce"}, "then": [{"type": "reward_to_go", "scope": "agent"}]}
"""What adds up what follows, without which a potential is refused."""


def with_options(kind: str) -> dict[str, Any]:
    return {"type": kind, **OPTIONS.get(kind, {})}


@pytest.mark.parametrize("kind", ESTIMATORS.built_in)
def test_every_estimator_trains(kind: str) -> None:
    invalid_action = {"order": "after"} if kind == "max_rl" else {}
    credit = {"estimator": with_options(kind), "invalid_action": invalid_action}
    trained(credit, policies=CRITIC if kind in ("gae", "step_gae") else {})


@pytest.mark.parametrize("kind", SHAPING.built_in)
def test_every_term_trains_and_is_a_part_of_the_reward_with_a_mean_of_its_own(kind: str) -> None:
    then = RETURNS["then"] if kind == "potential" else []
    by = {"estimator": RETURNS["estimator"]} if kind == "potential" else {}
    run = trained({"shaping": [with_options(kind), *then], **by})
    named = {"outcome", "care", "invalid_action", kind, *(term["type"] for term in then)}
    for step in (1, 2):
        assert f"reward_part/solver/{kind}" in run.metrics[step]
        assert named == set(run.events.of(GroupsCredited)[0].parts["solver"]["means"])
