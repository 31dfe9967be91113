import pytest
from pydantic import ValidationError

from flexmarl.agents.settings import TeamSettings
from flexmarl.records import FinishReason
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.agents import check_turns
from tests.unit.agents.tables import CALCULATOR, TASK, context, spec, text

ITERATIVE = {
    "type": "iterative",
    "review": "{task}={answer}?",
    "retry": "{task} not {answer}: {feedback}",
    "approval": "yes",
}


def played(agents, workflow, script):
    team_spec = spec(agents, workflow)
    team = team_spec.seat(context(script, delay_s=lambda request: 1.0))
    run_virtual(team_spec.run(TASK, team))
    check_turns(team.turns)
    return team


def prompts(team):
    return [text(turn.prompt_ids).split("<|user|>")[-1].split("<|im_end|>")[0] for turn in team.turns]


def rewards(team):
    return [(turn.agent, team.rewards()[turn.sample_id]) for turn in team.turns]


def test_sequential_agents_see_the_task_and_what_was_said_before():
    answers = {"planner": "add", "worker": "6", "checker": "7"}
    team = played(
        {name: {"system": name} for name in answers},
        {"type": "sequential", "agents": list(answers)},
        lambda prompt, request: next(answer for name, answer in answers.items() if f"<|system|>{name}<" in prompt),
    )
    assert prompts(team) == ["3+4", "3+4\n\nplanner: add", "3+4\n\nplanner: add\nworker: 6"]
    assert rewards(team) == [("planner", 1.0), ("worker", 1.0), ("checker", 1.0)]
    assert team.metrics == {"success": 1.0}


def test_an_agent_that_speaks_twice_is_rewarded_once():
    team = played({"a": {}, "b": {}}, {"type": "sequential", "agents": ["a", "b", "a"]}, lambda *_: "7")
    assert rewards(team) == [("a", 1.0), ("b", 1.0), ("a", 1.0)]


def dialogue(proposals, verdicts):
    left = {"?": list(verdicts), "": list(proposals)}
    return lambda prompt, request: left["?" if "?<|im_end|><|assistant|>" in prompt else ""].pop(0)


def test_iterative_ends_when_the_verifier_approves():
    team = played({"solver": {}, "verifier": {}}, ITERATIVE, dialogue(["6", "7"], ["no, more", "Yes!"]))
    assert prompts(team) == ["3+4", "3+4=6?", "3+4 not 6: no, more", "3+4=7?"]
    assert rewards(team) == [("solver", 1.0), ("verifier", 1.0), ("solver", 1.0), ("verifier", 1.0)]
    assert team.metrics == {"success": 1.0, "rounds": 2.0, "approved": 1.0, "verifier_accuracy": 1.0}


def test_iterative_ends_after_its_rounds_and_judges_every_verdict_by_its_own_proposal():
    team = played({"solver": {}, "verifier": {}}, {**ITERATIVE, "max_rounds": 2}, dialogue(["7", "6"], ["no", "no"]))
    assert rewards(team) == [("solver", 0.0), ("verifier", 0.0), ("solver", 0.0), ("verifier", 1.0)]
    assert team.metrics == {"success": 0.0, "rounds": 2.0, "approved": 0.0, "verifier_accuracy": 0.5}


def test_a_verifier_can_be_shown_the_work():
    said = {"3+4": "calc(3+4)", "<|tool|>7": "it is 7"}
    team = played(
        {"solver": {**CALCULATOR, "parser": "integer"}, "verifier": {}},
        {**ITERATIVE, "review": "{work}|{answer}"},
        lambda prompt, request: next(
            (text for end, text in said.items() if prompt.endswith(f"{end}<|im_end|><|assistant|>")), "yes"
        ),
    )
    assert prompts(team)[-1] == "calc(3+4)\n7\nit is 7|7"
    assert team.metrics["success"] == 1.0
    assert all(turn.finish is FinishReason.STOP for turn in team.turns)


def test_episodes_of_a_team_share_nothing():
    team_spec = spec({"solver": {"context": "full"}, "verifier": {"context": "full"}}, ITERATIVE)
    lengths = []
    for episode in range(3):
        ctx = context(dialogue(["6", "7"], ["no", "yes"]), trajectory_id=f"g0e{episode}a0")
        team = team_spec.seat(ctx)
        run_virtual(team_spec.run(TASK, team))
        lengths.append([len(turn.prompt_ids) for turn in team.turns])
    assert lengths[0] == lengths[1] == lengths[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"workflow": {**ITERATIVE, "review": "{tsak}"}},
            "review: '{tsak}' names 'tsak'; it may name answer, task, work",
        ),
        ({"workflow": {**ITERATIVE, "review": "{"}}, "is no template"),
        ({"workflow": {**ITERATIVE, "review": "{task.scorer}"}}, "names 'task.scorer'"),
        ({"workflow": {**ITERATIVE, "verifier": "solver"}}, "verifier: 'solver' is the solver too"),
        ({"workflow": {**ITERATIVE, "verifier": "judge"}}, "needs the agent 'judge'; the team has solver, verifier"),
        ({"agents": {"report": {"policy": "p"}}}, "agents: 'report' cannot name an agent"),
        ({"agents": {"my agent": {"policy": "p"}}}, "agents: 'my agent' cannot name an agent"),
        (
            {"agents": {"solver": {"policy": "p", "tools": [{"type": "calculator"}], "syntax": "function"}}},
            "syntax",
        ),
        (
            {
                "agents": {
                    "solver": {
                        "policy": "p",
                        "tools": [{"type": "calculator", "name": "sum"}],
                        "syntax": {"type": "function"},
                    }
                }
            },
            "syntax.names: {'calc': 'calculator'} has no word for the tool 'sum'",
        ),
        (
            {"agents": {"solver": {"policy": "p", "tools": [{"type": "calculator"}, {"type": "calculator"}]}}},
            "tools: two are called 'calculator'",
        ),
        (
            {
                "agents": {
                    name: {"policy": "p", "tools": [{"type": "calculator", "max_parallel": most}]}
                    for name, most in (("solver", 2), ("verifier", None))
                }
            },
            "agents.verifier.tools: max_parallel of 'calculator' is null, and 2 for agent 'solver'; their calls count "
            "together: use one number, or give one tool another `name`",
        ),
        (
            {"agents": {"solver": {"policy": "p", "tools": [{"type": "calculator", "max_parallel": 0}]}}},
            "max_parallel",
        ),
        ({"agents": {"solver": {"policy": "p", "sampling": {"stop": [""]}}}}, "stop: '' would end every message"),
        (
            {
                "agents": {"solver": {"policy": "p", "context": "full"}},
                "workflow": {"type": "program", "name": "of_its_own"},
            },
            "agents.solver.context: its program keeps its own history; remove it",
        ),
        ({"agents": {"solver": {"policy": "p", "context": {"last": 0}}}}, "last"),
        (
            {"agents": {"solver": {"policy": "p", "memory": 2}}},
            "`memory` is called `context` now; instead of memory: 2 write context: {last: 2}",
        ),
        (
            {"agents": {"solver": {"policy": "p", "memory": "full"}}},
            "instead of memory: full write context: full",
        ),
    ],
)
def test_wrong_settings_say_what_would_work(settings, message):
    good = {"agents": {"solver": {"policy": "p"}, "verifier": {"policy": "p"}}, "workflow": ITERATIVE}
    TeamSettings.model_validate(good)
    with pytest.raises(ValidationError) as error:
        TeamSettings.model_validate({**good, **settings})
    assert message in str(error.value)
