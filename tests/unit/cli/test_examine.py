"""What `check` looks at in which world."""

import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flexmarl import cli
from flexmarl.assemble import blueprint
from flexmarl.assemble.boxes import servers_of
from flexmarl.cli.examine import examine
from flexmarl.cli.needs import Finding, examine_machine
from flexmarl.config import load_run
from flexmarl.credit.estimators import ESTIMATORS
from flexmarl.credit.shaping import SHAPING
from flexmarl.errors import ConfigError
from flexmarl.events.machine import this_machine
from flexmarl.records.scorers import SCORERS
from flexmarl.tools.mcp import McpServer

UNCORRECTED = ["policies.one.training.correction={type: none}"]
SHORT = ["policies.one.engine.max_len=64", "team.agents.solver.sampling.max_tokens=64", "checkpoint.every=0"]


def looked_at(config: Path, *overrides: str) -> set[str]:
    findings, problems = examine(load_run(config, [*SHORT, *overrides]))
    assert problems == []
    return {finding.subject for finding in findings}


def test_what_simulated_devices_do_not_have_is_not_looked_at(small_run: Path) -> None:
    of_devices = {"checkpoint.every", "team.agents.solver.sampling.max_tokens"}
    assert of_devices <= looked_at(small_run)
    simulated = ["cluster.backend=simulated", "simulation.replies={default: {type: asked}}"]
    assert not of_devices & looked_at(small_run, *simulated)


def test_colocated_training_needs_no_devices_beside_those_of_the_engines(small_run: Path) -> None:
    def processes(*more: str) -> Finding:
        settings = load_run(small_run, ["policies.one.instances=3", "cluster={backend: ray, device: cuda}", *more])
        found = examine_machine(settings, {}, replace(this_machine(), devices=("GPU",) * 3), {})
        return next(one for one in found if one.subject == "processes")

    assert processes("mode=sync").todo.startswith("run on a machine with 4 accelerators")
    in_turn = processes("mode=colocated")
    assert in_turn.todo == ""
    assert in_turn.found.startswith(
        "3 engines and 1 place for 1 trained policies, in 3 rooms: 3 engines and 1 training processes have theirs in "
        "turn, on cuda"
    )
    ranks = processes("mode=colocated", "policies.one.training.ranks=4")
    assert ranks.todo.startswith("run on a machine with 4 accelerators")
    wide = processes("mode=sync", "policies.one.engine={type: vllm, tensor_parallel: 2}")
    assert wide.todo.startswith("run on a machine with 7 accelerators")


def test_a_library_that_an_engine_lacks_here_is_to_do(small_run: Path, monkeypatch) -> None:
    vllm = load_run(small_run, ["cluster={backend: inline}", "policies.one.engine={type: vllm}"])

    def found() -> list[Finding]:
        findings = list(examine_machine(vllm, {}, this_machine(), {}))
        return [finding for finding in findings if finding.subject == "policies.one.engine"]

    monkeypatch.setattr(blueprint, "find_spec", lambda _: None)
    (lacks,) = found()
    assert "pip install 'vllm" in lacks.todo
    monkeypatch.setattr(blueprint, "find_spec", lambda _: "there")
    assert found() == []


@pytest.mark.parametrize(
    ("engine", "device", "named"),
    [
        (
            "{type: vllm}",
            "cuda:1",
            "cluster.device is 'cuda:1', but policies.one.engine is vLLM, which takes",
        ),
        ("{type: vllm, tensor_parallel: 2}", "cuda", "tensor_parallel is 2, but cluster.backend=inline on 'cuda' has"),
    ],
)
def test_devices_that_vllm_in_one_process_cannot_have_are_named(small_run: Path, engine, device, named) -> None:
    with pytest.raises(ConfigError) as refused:
        load_run(small_run, [f"cluster={{backend: inline, device: {device}}}", f"policies.one.engine={engine}"])
    assert named in str(refused.value)


def test_tasks_of_a_file_are_counted(small_run: Path) -> None:
    rows = small_run.parent / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "reference": "{n + 1}"}}\n' for n in range(10)))

    def tasks(*more: str) -> str:
        table = f"tasks={{type: jsonl, file: {rows}, scorer: number, held_out_share: 0.2, {', '.join(more)}}}"
        findings, _ = examine(load_run(small_run, [*SHORT, table]))
        return next(finding.found for finding in findings if finding.subject == "tasks")

    assert tasks().startswith("to train on: 8, repeated without end; held out: 2;")
    assert tasks("epochs: 3").startswith("to train on: 8, 24 with repeats; held out: 2;")


@pytest.mark.parametrize(
    ("groups", "epochs", "works"),
    [
        (400, 1, "need 800 tasks, there are 8; use at most batch.groups=4, or a higher tasks.epochs"),
        (6, 1, "need 12 tasks, there are 8; use at most steps=1, or at most batch.groups=4, or a higher tasks.epochs"),
    ],
)
def test_too_few_tasks_are_answered_with_numbers_that_work(small_run: Path, groups, epochs, works) -> None:
    rows = small_run.parent / "few.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}+1=", "reference": "{n + 1}"}}\n' for n in range(10)))
    table = f"tasks={{type: jsonl, file: {rows}, held_out_share: 0.2, epochs: {epochs}}}"
    _, problems = examine(load_run(small_run, [*SHORT, table, "steps=2", f"batch.groups={groups}"]))
    assert any(works in problem for problem in problems)


def test_a_faulty_row_is_told_before_the_models_are_looked_at(small_run: Path, monkeypatch, capsys) -> None:
    rows = small_run.parent / "faulty.jsonl"
    rows.write_text('{"prompt": "1+1=", "reference": "2"}\n{"prompt": null}\n')
    monkeypatch.setattr(cli.runs, "examine", None)
    monkeypatch.setattr(sys, "argv", ["flexmarl", "check", str(small_run), f"tasks={{type: jsonl, file: {rows}}}"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "faulty.jsonl:2: 'prompt' (set by tasks.prompt) is null" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_says_how_much_of_it_tells_of_tools(small_run: Path) -> None:
    tools = ["team.agents.solver.tools=[{type: calculator}]", "team.agents.solver.tell_tools=prompt"]

    def too_long(*more: str) -> list[str]:
        _, problems = examine(load_run(small_run, ["policies.one.engine.max_len=8", *SHORT[1:], *more]))
        return [problem for problem in problems if "engine.max_len is 8" in problem]

    (told,) = too_long(*tools)
    assert re.search(r"engine\.max_len is 8; \d+ of them tell it of its tools", told)
    assert not any("tell it" in problem for problem in too_long())


def test_what_is_allowed_and_has_a_price_is_to_do(small_run: Path) -> None:
    findings, problems = examine(load_run(small_run, ["mode=async", *UNCORRECTED]))
    assert problems == []
    (priced,) = [finding for finding in findings if finding.subject == "policies.one.training.correction"]
    assert priced.found.startswith("type none in mode 'async'")
    assert priced.todo == "use type: tis"
    assert "policies.one.training.correction" not in looked_at(small_run, "mode=async")


def test_train_says_what_has_a_price_before_it_begins(small_run: Path, monkeypatch, capsys) -> None:
    warm = ["team.agents.solver.sampling.temperature=0.7", "cluster.backend=simulated"]  # which ends it at once
    monkeypatch.setattr(sys, "argv", ["flexmarl", "train", str(small_run), *warm])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(
        "flexmarl: caution: team.agents.solver.sampling: temperature 0.7, but the loss takes log-"
    )


@pytest.fixture(autouse=True, scope="module")
def plug_ins_of_this_file_alone() -> Iterator[None]:
    """A file of code is imported once in a process, so what it registers stays until the last test of this file."""
    tables = (SCORERS, SHAPING, ESTIMATORS)
    before = [dict(table._entries) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table._entries = entries


@pytest.fixture(scope="module")
def own_credit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a term and an estimator that raise."""
    file = tmp_path_factory.mktemp("own") / "own_credit.py"
    file.write_text(OWN_CREDIT)
    return file


BROKEN = """
import asyncio

from flexmarl.agents import workflow
from flexmarl.records import Task
from flexmarl.tasks import scorer, task_generator


@scorer("examined_length")
def length(answer):
    return float(len(answer))


@scorer("examined_ten")
def ten(answer, reference):
    return 10.0 * (answer == reference)


@task_generator("examined")
def examined(seed, index, split, *, scorer="number"):
    return Task(input_id=f"{split}-{index}", prompt=f"{split} {index}", reference="7", scorer=scorer)


@workflow("examined_scores")
async def scores(task, team):
    reply = await team.solver.act(task.prompt)
    reply.reward(task.score(reply.answer))


@workflow("examined_reads")
async def reads(task, team):
    reply = await team.solver.act(task.prompt)
    reply.reward(float(int(reply.text) == 7))


@workflow("examined_reports")
async def reports(task, team):
    reply = await team.solver.act(task.prompt, env_step=0)
    reply.reward(1.0)
    team.report(gained=1.0)


@workflow("examined_parts")
async def parts(task, team):
    reply = await team.solver.act(task.prompt)
    reply.reward(1.0)
    reply.reward(2.0, part="style")


@workflow("examined_forgets")
async def forgets(task, team):
    reply = await team.solver.act(task.prompt)
    reply.reward(1.0)
    team.solver.act("and then?")


async def think():
    pass


@workflow("examined_thinks")
async def thinks(task, team):
    think()
    reply = await team.solver.act(task.prompt)
    reply.reward(1.0)


@workflow("examined_hurries")
async def hurries(task, team):
    team.solver.act(task.prompt).reward(1.0)


@workflow("examined_misspells")
async def misspells(task, team):
    reply = await team.sover.act(task.prompt)


@workflow("examined_waits")
async def waits(task, team):
    await asyncio.Event().wait()


@workflow("examined_loops")
async def loops(task, team):
    while True:
        pass  # for ever
"""


def examined(small_run: Path, workflow: str, scorer: str = "number") -> tuple[str, list[str]]:
    """What `check` says of a task that is played, and the problems of the config."""
    findings, problems = examined_with(small_run, workflow, f"tasks.params={{scorer: {scorer}}}")
    return next((finding.found for finding in findings if finding.subject == "a task"), ""), problems


def examined_with(small_run: Path, workflow: str, *overrides: str) -> tuple[list[Finding], list[str]]:
    code = small_run.parent / "examined.py"
    code.write_text(BROKEN)
    chosen = [f"code=[{code}]", f"team.workflow.name={workflow}", "tasks.name=examined"]
    return examine(load_run(small_run, [*SHORT, *chosen, *overrides]))


def test_a_reward_outside_of_the_range_that_groups_are_judged_by_is_to_do(small_run: Path) -> None:
    def told(*overrides: str) -> list[Finding]:
        found, problems = examined_with(small_run, "examined_scores", "tasks.params={scorer: examined_ten}", *overrides)
        assert problems == []
        return [finding for finding in found if finding.subject == "credit.filter.reward_range"]

    (finding,) = told()
    assert (finding.found, finding.todo[:16]) == ("[0, 1]", "a play gave 10: ")
    assert not told("credit.filter.reward_range=[0, 10]")
    assert not told("credit.filter=null")


def test_a_task_is_played_with_a_scorer_that_python_names(small_run: Path) -> None:
    played, problems = examined(small_run, "examined_scores", "number")
    assert (played, problems) == ("'train-0' was played with scripted replies", [])


def test_a_scorer_that_fails_whatever_is_answered_is_a_problem_of_the_config(small_run: Path) -> None:
    _, (problem,) = examined(small_run, "examined_scores", "examined_length")
    assert "fails with each of them" in problem
    assert "length() takes 1 positional argument but 2 were given" in problem


def test_a_scorer_that_nobody_registered_is_refused_where_the_task_is_made(small_run: Path) -> None:
    _, problems = examined(small_run, "examined_scores", "numbr")
    assert any("there is no scorer 'numbr'; did you mean 'number'?" in problem for problem in problems)


def test_a_workflow_that_fails_with_some_answers_is_no_problem_and_to_do(small_run: Path) -> None:
    findings, problems = examined_with(small_run, "examined_reads", "tasks.params={scorer: number}")
    (played,) = [finding for finding in findings if finding.subject == "a task"]
    assert problems == []
    assert "with the reply 'I do not know.' it fails" in played.found
    assert "ValueError: invalid literal for int()" in played.found
    assert played.todo.startswith("mend it, unless no model gives this reply")


def test_a_prompt_that_leaves_less_than_max_tokens_is_to_do(small_run: Path) -> None:
    def told(max_len: int) -> list[Finding]:
        chosen = [f"policies.one.engine.max_len={max_len}", "team.agents.solver.sampling.max_tokens=8"]
        findings, problems = examined_with(small_run, "examined_scores", "tasks.params={scorer: number}", *chosen)
        assert problems == []
        return [finding for finding in findings if finding.subject == "policies.one.engine.max_len"]

    assert told(25) == []
    (finding,) = told(24)
    assert finding.found == "24, but a prompt of the trial play and sampling.max_tokens take 25"


def test_the_range_of_rewards_is_that_of_what_the_filter_compares(small_run: Path) -> None:
    def told(*overrides: str) -> list[str]:
        findings, _ = examined_with(small_run, "examined_parts", *overrides)
        return [finding.todo for finding in findings if finding.subject == "credit.filter.reward_range"]

    assert told() == []
    assert told("credit.filter.filter_on=final")[0].startswith("a play gave 3: ")


def test_a_workflow_that_raises_is_named_with_file_and_line(small_run: Path) -> None:
    line = next(n for n, text in enumerate(BROKEN.splitlines(), start=1) if "team.sover" in text)
    _, (problem,) = examined(small_run, "examined_misspells")
    assert problem.endswith(f"(examined.py:{line})")


def test_a_workflow_that_waits_for_ever_is_ended_and_not_played_again(small_run: Path, monkeypatch) -> None:
    monkeypatch.setattr("flexmarl.cli.examine.PLAY_S", 0.1)
    line = next(n for n, text in enumerate(BROKEN.splitlines(), start=1) if "asyncio.Event" in text)
    _, (problem,) = examined(small_run, "examined_waits")
    assert "played with scripted replies ('7'), fails with each of them: took longer than" in problem
    assert problem.endswith(f"(examined.py:{line})")


def test_a_workflow_that_never_gives_the_event_loop_back_is_ended_and_its_line_is_named(
    small_run: Path, monkeypatch
) -> None:
    for name, seconds in {"BLOCKED_S": 0.05, "STUCK_S": 0.2, "BEAT_S": 0.05}.items():
        monkeypatch.setattr(f"flexmarl.rollout.blocking_watch.{name}", seconds)
    before = signal.getsignal(signal.SIGINT)
    lines = [n for n, text in enumerate(BROKEN.splitlines(), start=1) if "while True" in text or "pass  #" in text]
    _, (problem,) = examined(small_run, "examined_loops")
    assert re.search(rf"examined.py:({lines[0]}|{lines[1]}) has kept the event loop for 10 s", problem)
    assert "await asyncio.to_thread(f, x)" in problem
    assert signal.getsignal(signal.SIGINT) is before


def test_an_act_that_is_never_awaited_is_a_problem_and_python_does_not_warn_of_it(small_run: Path, recwarn) -> None:
    line = next(n for n, text in enumerate(BROKEN.splitlines(), start=1) if "and then?" in text)
    _, (problem,) = examined(small_run, "examined_forgets")
    assert problem.endswith(
        'fails with each of them: never_awaited: the call `team.solver.act("and then?")` was made and never awaited, '
        f"so it did not run; write `await` before it (examined.py:{line})"
    )
    assert not [*recwarn]


def test_a_call_of_ones_own_that_is_never_awaited_is_to_do_and_python_does_not_warn_of_it(
    small_run: Path, recwarn
) -> None:
    line = next(n for n, text in enumerate(BROKEN.splitlines(), start=1) if text.strip() == "think()")
    findings, problems = examined_with(small_run, "examined_thinks")
    (forgotten,) = [finding for finding in findings if finding.todo == "write `await` before it"]
    assert forgotten.found == f"examined.py:{line}: the call `think()` was made and never awaited, so it did not run"
    assert (problems, [*recwarn]) == ([], [])


def test_a_reply_that_was_not_awaited_is_a_problem_that_says_so(small_run: Path, recwarn) -> None:
    _, (problem,) = examined(small_run, "examined_hurries")
    assert "write `await` before the call that made it (examined.py:" in problem
    assert not [*recwarn]


def test_an_agent_that_the_workflow_never_asks_is_to_do(small_run: Path) -> None:
    helper = "team.agents.helper={policy: one, sampling: {max_tokens: 8}}"
    findings, problems = examined_with(small_run, "examined_reports", helper)
    (finding,) = [finding for finding in findings if "never asked" in finding.found]
    assert (finding.subject, problems) == ("team.agents.helper", [])
    assert finding.found == "the workflow never asked agent 'helper' in the trial play"


def test_a_figure_that_no_play_has_is_to_do(small_run: Path) -> None:
    compared = ["evaluate.tasks=2", "evaluate.every=1", "evaluate.every_tasks=2", "checkpoint.every=1"]
    for key in ("stop", "checkpoint.best"):
        misspelt, right = (
            examined_with(small_run, "examined_reports", *compared, f"{key}={{metric: {metric}}}")
            for metric in ("gaind", "gained")
        )
        (finding,) = [finding for finding in misspelt[0] if finding.subject == f"{key}.metric"]
        assert finding.found == "'gaind' is no figure of the task that was played; it has: gained, reward/solver"
        assert "team.report" in finding.todo
        assert not [finding for finding in right[0] if finding.subject == f"{key}.metric"]
        assert (misspelt[1], right[1]) == ([], [])


def test_a_key_that_names_a_tag_which_no_call_carries_is_a_problem(small_run: Path) -> None:
    key = "credit.estimator={{type: grpo, key: [task, agent, {}]}}".format
    _, (problem,) = examined_with(small_run, "examined_reports", key("env_stp"))
    assert problem.startswith("credit.estimator.key: unknown tag 'env_stp'")
    assert "env_step" in problem
    assert examined_with(small_run, "examined_reports", key("env_step"))[1] == []


OWN_CREDIT = """
from typing import Literal

from flexmarl.credit import estimator, term
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.shaping.base import AddedTerm


@term
class Squared(AddedTerm):
    type: Literal["own_squared"] = "own_squared"

    def added(self, rows):
        return {row.sample_id: row.nothing for row in rows}


@estimator
class Divided(GroupRelative):
    type: Literal["own_divided"] = "own_divided"

    def estimate(self, rows, memory={}):
        return 1 / 0
"""


@pytest.mark.parametrize(
    ("override", "because"),
    [
        (
            "credit.shaping=[{type: own_squared}]",
            "credit.shaping[0] (own_squared): AttributeError: 'CreditRow' object has no attribute 'nothing' "
            "(own_credit.py:14)",
        ),
        (
            "credit.estimator={type: own_divided}",
            "credit.estimator: ZeroDivisionError: division by zero (own_credit.py:22)",
        ),
    ],
)
def test_a_term_or_an_estimator_that_raises_is_named_with_file_and_line(
    small_run: Path, own_credit: Path, override: str, because: str
) -> None:
    files = f"code=[{small_run.parent / 'examined.py'}, {own_credit}]"
    _, problems = examined_with(small_run, "examined_reports", override, files)
    assert problems == [because]


def test_a_prompt_that_is_too_long_for_the_engine_is_a_problem_that_gives_both_numbers(small_run: Path) -> None:
    _, (problem,) = examined_with(small_run, "examined_reports", "policies.one.engine.max_len=2")
    assert "of solver has" in problem
    assert "policies.one.engine.max_len is 2" in problem


def test_keys_and_values_are_told_for_requests_like_those_played_and_at_most_those_of_max_len(small_run: Path) -> None:
    def told(*overrides: str) -> tuple[float, float]:
        findings, problems = examined_with(small_run, "examined_reports", "policies.one.engine.slots=64", *overrides)
        (found,) = [finding.found for finding in findings if finding.subject == "  keys and values"]
        assert not problems
        ((held, most),) = re.findall(
            r"^([\d.]+) GiB(?: for requests like those of the task played, at most ([\d.]+))?", found
        )
        return float(held), float(most or held)

    held, most = told("policies.one.engine.max_len=131072")
    doubled = told("policies.one.engine.max_len=262144")
    assert held < most / 10
    assert doubled == (held, pytest.approx(2 * most, rel=0.05)), "a longer max_len takes nothing until it is used"


def test_two_servers_with_one_file_of_tools_are_refused(small_run: Path) -> None:
    def servers(*more: str) -> list[McpServer]:
        tools = ", ".join(
            f"{{type: mcp, tools_file: x.json, url: 'http://a', name: {name}}}" for name in ("shop", *more)
        )
        return servers_of(load_run(small_run, [f"team.agents.solver.tools=[{tools}]"]))

    assert len(servers()) == 1
    with pytest.raises(ConfigError, match=r"'shop' and 'till', have the same tools_file=x\.json; give each a file"):
        servers("till")
