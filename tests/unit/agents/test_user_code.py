import pickle
import sys

import pytest

from flexmarl.agents import load_code
from flexmarl.errors import ConfigError
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.agents.tables import TASK, context, spec

CODE = """
from flexmarl.agents import Team, workflow
from flexmarl.records import Task


def halves(answer: str, reference: str) -> float:
    return 0.5


@workflow("{name}")
async def run(task: Task, team: Team) -> None:
    reply = await team.solver.act(task.prompt)
    team.solver.reward(task.score(reply.text))
"""


@pytest.fixture
def code(tmp_path):
    def write(text, name="team.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_workflow_of_the_users_own_is_loaded_by_path_and_named_in_the_settings(code):
    path = code(CODE.format(name="mine"))
    module = load_code(path)
    assert load_code(str(path)) is module, "a file is imported once"
    assert pickle.loads(pickle.dumps(module.halves)) is module.halves
    team_spec = spec({"solver": {}}, {"type": "custom", "name": "mine"})
    assert team_spec.run is module.run
    team = team_spec.seat(context(lambda *_: "7"))
    run_virtual(team_spec.run(TASK, team))
    assert list(team.rewards().values()) == [1.0]


def test_an_unknown_workflow_is_refused_with_the_nearest_name(code):
    load_code(code(CODE.format(name="solve_and_verify"), "near.py"))
    with pytest.raises(ConfigError, match="no workflow 'solve_and_verifi'; did you mean 'solve_and_verify'"):
        spec({"solver": {}}, {"type": "custom", "name": "solve_and_verifi"})


def test_two_workflows_of_one_name_are_refused_and_both_places_named(code):
    load_code(code(CODE.format(name="twice"), "first.py"))
    with pytest.raises(ConfigError, match=r"two workflows are called 'twice': .*first.py:\d+ and .*second.py:\d+"):
        load_code(code(CODE.format(name="twice"), "second.py"))


GRID = """
from flexmarl.tasks.environment import environment


@environment("{name}")
class Grid:
    def __init__(self, task):
        self.task = task
"""


def test_a_class_that_is_imported_under_another_name_too_is_one_and_the_same(code):
    path = code(GRID.format(name="one-grid"), "grid.py")
    load_code(path)
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "examples.grid"})
    with pytest.raises(ConfigError, match=r"two environments are called 'one-grid': .*grid.py:\d+ and .*other.py:\d+"):
        load_code(code(GRID.format(name="one-grid"), "other.py"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n\nimport no_such_module\n", r"broken.py:3: ModuleNotFoundError"),
        ("x = 1\ny = (\n", r"broken.py:2: SyntaxError"),
        ("def f():\n    return 1 / 0\n\nf()\n", r"broken.py:2: ZeroDivisionError"),
    ],
)
def test_an_error_in_the_users_file_names_the_line_and_leaves_nothing_behind(code, text, message):
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message):
        load_code(code(text, "broken.py"))
    assert not {name for name in set(sys.modules) - before if name.startswith("flexmarl_user")}


@pytest.mark.parametrize("name", ["absent.py", "notes.txt"])
def test_what_is_no_python_file_is_refused(code, tmp_path, name):
    code("", "notes.txt")
    with pytest.raises(ConfigError, match=f"{name}' is no Python file"):
        load_code(tmp_path / name)
