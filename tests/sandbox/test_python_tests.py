"""Code is scored by hidden tests: cheats get 0, honest answers 1, and a fault of the grader is no score."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flexmarl.assemble.boxes import boxed_scorer, check_sandbox_of
from flexmarl.config import load_run
from flexmarl.errors import EpisodeError
from flexmarl.records import Task
from flexmarl.sandbox.interface import Box, BoxOutcome, Ended
from flexmarl.tasks.scorers import Scores
from flexmarl.tasks.scorers.python_tests import reference_of
from tests.commands import run_commands
from tests.sandbox.conftest import remains

TESTS = [((2, 3), 5), ((10, -4), 6), ((0, 0), 0), ((7, 7), 14)]
TASK = Task(input_id="add", prompt="add", scorer="python_tests", reference=reference_of("add", TESTS, timeout_s=2.0))

HONEST = {
    "plain": "def add(a, b):\n    return a + b",
    "fenced": "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.",
    "lambda": "add = lambda a, b: a + b",
    "prints much": "def add(a, b):\n    print('x' * 100_000)\n    return a + b",
    "names of the grader's": "json = arguments = returned = file = 1\ndef add(a, b):\n    return a + b + json - 1",
    "imports": "import operator\nadd = operator.add",
    "float": "def add(a, b):\n    return float(a + b)",
    "main": "def add(a, b):\n    return a + b\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))",
}

FOOLS = {
    "exits": "import sys\nsys.exit(0)",
    "exits hard": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "equal to all": "class Any:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Any()",
    "equal number": "class Any(int):\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Any(1)",
    "reads the tests": (
        "import re, sys\nfrom pathlib import Path\n"
        "known = {}\nfor path in [*Path('.').rglob('*'), Path(__file__) if '__file__' in globals() else Path('x')]:\n"
        "    try:\n        known |= dict(re.findall(r'add\\(([^)]*)\\) == (-?\\d+)', path.read_text()))\n"
        "    except (OSError, UnicodeDecodeError):\n        pass\n"
        "def add(a, b):\n    return int(known[f'{a}, {b}'])"
    ),
    "reads the frames": (
        "import sys, re\ndef add(a, b):\n    frame = sys._getframe(1)\n    while frame:\n"
        "        for value in map(str, frame.f_globals.get('TESTS', [])):\n"
        "            if value.startswith(f'(({a}, {b}), '):\n                return int(value.split()[-1][:-1])\n"
        "        frame = frame.f_back"
    ),
    "walks the garbage": (
        "import gc\ndef add(a, b):\n    for one in gc.get_objects():\n"
        "        if isinstance(one, tuple) and len(one) == 2 and type(one[0]) is tuple and one[0] == (a, b):\n"
        "            if isinstance(one[1], int):\n                return one[1]"
    ),
    "ends at the first exception": "import sys, os\nsys.excepthook = lambda *_: os._exit(0)\nadd = lambda a, b: None",
    "at exit": "import atexit, os\natexit.register(lambda: os._exit(0))\nadd = lambda a, b: None",
}
"""Cheats that fool a grader which runs asserts in the process of the answer, and looks at its status."""

CHEATS = {
    **FOOLS,
    "nothing": "",
    "no code": "The answer is 5.",
    "a constant": "def add(a, b):\n    return 5",
    "true for one": "def add(a, b):\n    return a + b == a + b",
    "text for a number": "def add(a, b):\n    return str(a + b)",
    "no number": "def add(a, b):\n    return float('nan')",
    "says so": "print('OK')\nprint('4 passed')\nprint('[5, 6, 0, 14]')",
    "writes the file": (
        "import json\njson.dump([True] * 4, open('/box/returned.json', 'w'))\n"
        "open('/box/returned.json', 'a').close()\nimport os\nos.chmod('/box/returned.json', 0o444)\n"
        "def add(a, b):\n    raise SystemExit(0)"
    ),
    "a link as the file": (
        "import os\nos.symlink('/proc/self/environ', '/box/returned.json')\ndef add(a, b):\n    raise SystemExit(0)"
    ),
    "a fifo as the file": "import os\nos.mkfifo('/box/returned.json')\ndef add(a, b):\n    raise SystemExit(0)",
    "deep": "def add(a, b):\n    return a\nimport json\njson.dump = lambda value, file: file.write('[' * 100_000)",
    "long": "import json\njson.dump = lambda value, file: file.write('[' + '1,' * 10**6 + '1]')\nadd = max",
    "a huge number": "def add(a, b):\n    return 10 ** 4000",
    "patched json": "import json\njson.dump = lambda value, file: file.write('true')\nadd = max",
    "patched loads": "import json\njson.loads = lambda text: []\nadd = max",
    "patched builtins": "import builtins\nbuiltins.all = lambda _: True\nbuiltins.max = lambda *_: 5\nadd = max",
    "forged frames": (
        "import json, os, struct, sys\n"
        "frame = json.dumps({'nonce': '', 'ended': 'exited', 'exit': 0, 'data': 'dHJ1ZQ=='}).encode()\n"
        "for fd in range(3, 32):\n    try:\n"
        "        os.write(fd, struct.pack('!I', len(frame)) + frame)\n    except OSError:\n        pass\nadd = max"
    ),
    "forged with the nonce": (
        "import gc, json, os, struct, sys\ndef add(a, b):\n    frame = sys._getframe()\n"
        "    while 'request' not in frame.f_locals:\n        frame = frame.f_back\n"
        "    said = json.dumps({'nonce': frame.f_locals['request']['nonce'], 'ended': 'exited', 'exit': 0,\n"
        "                       'passed': True, 'score': 1.0}).encode()\n"
        "    os.write(int(sys.argv[1]), struct.pack('!I', len(said)) + said)\n    return 5"
    ),
    "kills its interpreter": "import os\nos.kill(os.getpid(), 9)",
    "kills all": "import os\ndef add(a, b):\n    os.kill(-1, 9)",
    "another program": "import os\nos.execv('/usr/bin/env', ['env', 'true'])",
    "closes all": "import os\nos.closerange(0, 64)\nadd = max",
    "endless": "while True: pass",
    "endless and deaf": ("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: pass"),
    "endless value": "def add(a, b):\n    return [add(a, b)]",
    "much memory": "held = bytearray(1 << 30)\nadd = max",
    "goes on": "import os\nif os.fork():\n    os._exit(0)\nadd = max",
}


def scored(answer: str, sandbox: Any, task: Task = TASK) -> float:
    return asyncio.run(Scores(sandbox).score(task, answer))


def naive(answer: str, folder: Any) -> float:
    """The score by asserts in the same program: what the cheats are made against."""
    program = f"{answer}\nTESTS = {TESTS}\n" + "\n".join(
        f"assert add({a}, {b}) == {expected}" for (a, b), expected in TESTS
    )
    (folder / "program.py").write_text(program)
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, timeout=60, check=False)
    return float(done.returncode == 0)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_answer_gets_1(name, sandbox):
    assert scored(HONEST[name], sandbox) == 1.0


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_gets_0_and_leaves_nothing(name, sandbox):
    assert scored(CHEATS[name], sandbox) == 0.0
    assert remains() == []


@pytest.mark.without_bwrap
@pytest.mark.parametrize("name", FOOLS)
def test_a_grader_in_the_answers_own_process_is_fooled(name, tmp_path):
    assert naive(FOOLS[name], tmp_path) == 1.0


def test_there_are_more_than_25_cheats():
    assert len(CHEATS) > 25


class Watched:
    """A sandbox that counts its boxes, and ends some of them when the tests are called."""

    def __init__(self, sandbox: Any, lost: int = 0) -> None:
        self.sandbox, self.lost, self.opened = sandbox, lost, 0

    @asynccontextmanager
    async def open(self, files: Mapping[str, str | bytes] = {}, limits: Any = None, **_: Any) -> AsyncIterator[Box]:
        self.opened += 1
        async with self.sandbox.open(files, limits) as box:
            if self.opened <= self.lost:
                await box.kill()
            yield box


@pytest.mark.parametrize(("lost", "boxes"), [(0, 1), (1, 2), (2, 3)])
def test_a_box_that_somebody_else_ended_costs_an_honest_answer_nothing(lost, boxes, sandbox):
    watched = Watched(sandbox, lost)
    assert scored(HONEST["plain"], watched) == 1.0
    assert watched.opened == boxes


def test_where_boxes_end_by_themselves_there_is_no_score(sandbox):
    watched = Watched(sandbox, lost=100)
    with pytest.raises(EpisodeError, match="boxes end or stand still by themselves on this machine"):
        scored(HONEST["plain"], watched)
    assert watched.opened == 4


def test_equal_answers_are_scored_once_also_at_the_same_time(sandbox):
    watched = Watched(sandbox)

    async def run() -> list[float]:
        scores = Scores(watched)
        first = await asyncio.gather(*(scores.score(TASK, HONEST["plain"]) for _ in range(8)))
        return [*first, await scores.score(TASK, HONEST["plain"]), await scores.score(TASK, CHEATS["nothing"])]

    assert asyncio.run(run()) == [1.0] * 9 + [0.0]
    assert watched.opened == 2


@pytest.mark.without_bwrap
def test_a_box_that_cannot_be_opened_is_a_fault_and_is_not_kept():
    class Closed:
        opened = 0

        @asynccontextmanager
        async def open(self, *_: Any, **__: Any) -> AsyncIterator[Box]:
            self.opened += 1
            raise EpisodeError("the sandbox cannot start a box")
            yield

    closed = Closed()

    async def run() -> None:
        scores = Scores(closed)
        for _ in range(2):
            with pytest.raises(EpisodeError, match="cannot start a box"):
                await scores.score(TASK, HONEST["plain"])

    asyncio.run(run())
    assert closed.opened == 2


@pytest.mark.without_bwrap
def test_a_box_that_runs_nothing_is_no_success():
    class Silent:
        async def run(self, code: str, *, timeout_s: float) -> BoxOutcome:
            return BoxOutcome(ended=Ended.EXITED, exit=0)

        async def read(self, path: str) -> bytes:
            raise FileNotFoundError(path)

    class Empty:
        @asynccontextmanager
        async def open(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            yield Silent()

    assert scored(HONEST["plain"], Empty()) == 0.0


@pytest.mark.without_bwrap
@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("", "Invalid JSON"),
        ('{"function": "add", "tests": []}', "tests"),
        ('{"function": "a b", "tests": [{}]}', "pattern"),
    ],
)
def test_a_reference_without_tests_is_a_fault(reference, fault):
    with pytest.raises(EpisodeError, match=f"holds no tests.*{fault}"):
        scored("", object(), Task(input_id="x", prompt="x", scorer="python_tests", reference=reference))


@pytest.mark.without_bwrap
def test_without_a_sandbox_or_without_waiting_there_is_no_score():
    with pytest.raises(EpisodeError, match="needs a sandbox"):
        scored("", None)
    with pytest.raises(EpisodeError, match=r"write `await team\.score\(answer\)`"):
        TASK.score("")


ROWS = '{{"prompt": "{}", "reference": {{"function": "f", "tests": [{{"arguments": [1], "returns": 2}}]}}}}\n'


@pytest.fixture
def with_tests(small_run, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(ROWS.format(f"12+{number}=?") for number in range(40)))
    return (str(small_run), f"tasks={{type: jsonl, file: {rows}, scorer: python_tests}}", "evaluate.tasks=0")


@pytest.mark.without_bwrap
def test_a_run_whose_scorer_needs_boxes_does_not_start_without_them(with_tests, tmp_path):
    (tmp_path / "programs").mkdir()
    command = ("train", *with_tests, f"out={tmp_path}/out")
    (said,) = run_commands(command, cwd=tmp_path, environment={"PATH": str(tmp_path / "programs")})
    assert said.returncode == 2, said.stderr
    assert b"the scorer python_tests would run code of a model" in said.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.without_bwrap
def test_a_simulation_refuses_a_scorer_that_needs_boxes(with_tests, tmp_path):
    (said,) = run_commands(("simulate", *with_tests), cwd=tmp_path)
    assert said.returncode == 2
    assert b"virtual time cannot wait" in said.stderr
    assert b"simulation.score_s=0.1" in said.stderr


@pytest.mark.without_bwrap
def test_the_scorers_of_a_generators_first_tasks_are_looked_at(small_run):
    assert boxed_scorer(load_run(small_run)) == ""
    assert check_sandbox_of(load_run(small_run)) == []


def test_a_run_is_scored_by_tests(with_tests, tmp_path, sandbox):
    scored_by_tests = ("team.workflow={type: sequential, agents: [solver]}", "steps=1", f"out={tmp_path}/out")
    (said,) = run_commands(("train", *with_tests, *scored_by_tests), cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    (folder,) = (tmp_path / "out").iterdir()
    steps = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert [step["team/success"] for step in steps if "team/success" in step] == [0.0]
