"""Faults by injection: whatever happens to the boxes of an episode, its reward is the right one, or it has none."""

import asyncio
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any

import psutil
import pytest

from flexmarl.errors import EpisodeError
from flexmarl.records import Episode, GroupId, GroupRecord, Task
from flexmarl.rollout.player import Player
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.interface import Box
from flexmarl.sandbox.spare_boxes import SparePool
from flexmarl.tasks.scorers.python_tests import reference_of
from flexmarl.testing.agents import ScriptedModel
from flexmarl.tools import ToolContext
from flexmarl.tools.boxed import LOST, PythonTool
from tests.sandbox.conftest import remains
from tests.unit.agents.tables import TOKENIZER, says, spec, text

CALL = '<tool_call>{"name": "python", "arguments": {"code": "sum(i for i in range(300_000)) and 6 * 7"}}</tool_call>'
ANSWERS = {"f = lambda a, b: a + b": 1.0, "f = lambda a, b: a - b": 0.0}
TESTS = [((2, 3), 5), ((1, 1), 2)]
TASK = Task(input_id="sum", prompt="1", scorer="python_tests", reference=reference_of("f", TESTS, timeout_s=2.0))


def processes(box: Any) -> list[psutil.Process]:
    """The processes of a box, its driver last, as the host sees them."""
    return psutil.Process(box._process.pid).children(recursive=True)


def kill_box(box: Any) -> None:
    there = processes(box)
    os.kill(box._process.pid, signal.SIGKILL)
    psutil.wait_procs(there, timeout=60)  # The kernel ends them after the call that ended their parent.


def kill_driver(box: Any) -> None:
    for one in processes(box)[-1:]:
        one.kill()
        psutil.wait_procs([one], timeout=60)


def stop_box(box: Any) -> None:
    for one in processes(box):
        one.suspend()


FAULTS: dict[str, Callable[[Any], None]] = {"box killed": kill_box, "driver killed": kill_driver, "stopped": stop_box}
REFUSED = "no box"


class Faulty:
    """The sandbox of one episode: its boxes meet the faults of a plan, one after the other, and then none."""

    def __init__(self, sandbox: Any, plan: Sequence[str], witnessed: Counter[str]) -> None:
        self.sandbox, self.plan, self.witnessed = sandbox, [*plan], witnessed

    @asynccontextmanager
    async def open(self, *given: Any, **named: Any) -> AsyncIterator[Box]:
        fault = self.plan.pop(0) if self.plan else ""
        if fault == REFUSED:
            self.witnessed[fault] += 1
            raise EpisodeError("the sandbox cannot start a box: a fault was injected")
        async with self.sandbox.open(*given, **named) as box:
            if not fault:
                yield box
                return
            after_s = [0.0, 0.002, 0.01][self.witnessed.total() % 3]
            injected = asyncio.get_running_loop().call_later(after_s, self.inject, fault, box)
            try:
                yield box
            finally:
                injected.cancel()

    def inject(self, fault: str, box: Any) -> None:
        with suppress(psutil.Error, ProcessLookupError):  # It has ended by itself.
            FAULTS[fault](box)
            self.witnessed[fault] += 1


def played(sandboxes: Sequence[Any], answers: Sequence[str], timeout_s: float = 1.0) -> list[Episode]:
    """An episode for each sandbox and answer, all at once: a call of `python`, then the answer, scored by tests."""
    agent = {"tools": [{"type": "python", "timeout_s": timeout_s}], "syntax": {"type": "tag"}, "tell_tools": "none"}

    async def run(task: Task, team: Any) -> None:
        reply = await team.solver.act(task.prompt)
        team.reward(await team.score(reply.text))

    async def play(number: int, sandbox: Any, answer: str) -> Episode:
        team = replace(spec({"solver": agent}), run=run, sandbox=sandbox)
        player = Player(team=team, generate=ScriptedModel(TOKENIZER, says(CALL, answer)), run_seed=1, timeout_s=300.0)
        return await player.play(GroupRecord(group=GroupId(number), task=TASK, step=0), 0)

    async def every() -> list[Episode]:
        pairs = zip(sandboxes, answers, strict=True)
        return await asyncio.gather(*(play(number, *pair) for number, pair in enumerate(pairs)))

    return asyncio.run(every())


def check(episodes: list[Episode], answers: list[str]) -> Counter[str]:
    """Each episode failed, or has the reward of its answer and a true observation. Counts which."""
    ends: Counter[str] = Counter()
    for episode, answer in zip(episodes, answers, strict=True):
        if not episode.finished:
            assert episode.failure is not None
            ends["failed"] += 1
            continue
        assert set(episode.rewards.values()) == {ANSWERS[answer]}
        seen = text(episode.turns[-1].prompt_ids)
        assert "42" in seen or "took longer than 1 s" in seen or LOST in seen, seen
        ends["42" if "42" in seen else "said"] += 1
    return ends


def plans() -> Iterator[tuple[str, str, str]]:
    """Faults of the tool's box, and of the first two in which an answer is scored: each pair of them at least once."""
    faults = ["", REFUSED, *FAULTS]
    for number, (first, second) in enumerate(product(faults, faults)):
        yield faults[number % len(faults)], first, second


@pytest.mark.parametrize("spare", [0, 2])
def test_an_episode_whose_boxes_break_has_the_right_reward_or_none(spare, sandbox):
    witnessed: Counter[str] = Counter()
    beneath = SparePool(sandbox, spare) if spare else sandbox
    sandboxes = [Faulty(beneath, plan, witnessed) for plan in plans()]
    answers = [list(ANSWERS)[number % 2] for number in range(len(sandboxes))]
    ends = check(played(sandboxes, answers), answers)
    assert set(witnessed) == {REFUSED, *FAULTS}
    assert ends["failed"], "a box that cannot be opened fails its episode"
    assert ends["42"], "some boxes are sound"
    assert remains() == []


def test_without_faults_every_episode_ends_well(sandbox):
    """The control of the test above."""
    answers = list(ANSWERS) * 4
    assert check(played([sandbox] * len(answers), answers, timeout_s=30.0), answers) == {"42": len(answers)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_session_that_somebody_ended_is_said_to_be_lost_and_the_next_call_has_a_new_one(fault, sandbox):
    boxes: list[Any] = []

    class Seen:
        @asynccontextmanager
        async def open(self, *given: Any, **named: Any) -> AsyncIterator[Box]:
            async with sandbox.open(*given, **named) as box:
                boxes.append(box)
                yield box

    async def run() -> list[str]:
        async with PythonTool(timeout_s=1.0).open(ToolContext(episode="e", seed=1, sandbox=Seen())) as bound:
            first = await bound.call({"code": "x = 1"})
            FAULTS[fault](boxes[0])
            return [first.text, (await bound.call({"code": "x"})).text, (await bound.call({"code": "x"})).text]

    first, told, anew = asyncio.run(run())
    assert first == "(no output)"
    assert LOST in told
    assert "NameError" in anew
    assert len(boxes) == 2
    assert remains() == []


def test_a_box_that_is_full_is_a_mistake_of_its_code_and_task_files_that_do_not_fit_are_a_fault(sandbox):
    small = Bubblewrap(sandbox.settings.model_copy(update={"disk_mib": 1}))

    async def run(files: dict[str, bytes]) -> list[str]:
        async with PythonTool().open(ToolContext(episode="e", seed=1, files=files, sandbox=small)) as bound:
            filled = await bound.call({"code": "open('f', 'wb').write(bytes(4 << 20))"})
            return [filled.text, (await bound.call({"code": "6 * 7"})).text]

    filled, after = asyncio.run(run({}))
    assert "No space left on device" in filled or "File too large" in filled
    assert after == "42"
    with pytest.raises(EpisodeError, match="cannot write 'big'"):
        asyncio.run(run({"big": bytes(4 << 20)}))
    assert remains() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a full disk")
def test_boxes_need_no_room_on_the_disk(sandbox, tmp_path, monkeypatch):
    """The temp folder is a disk of one page, which is full."""
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "full", full], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        (full / "all").write_bytes(bytes(4096))
        with pytest.raises(OSError, match="No space left"):
            (full / "more").write_bytes(b"x")
        monkeypatch.setattr(tempfile, "tempdir", str(full))
        answers = list(ANSWERS) * 2
        ends = check(played([sandbox] * len(answers), answers, timeout_s=30.0), answers)
        assert ends["42"] + ends["failed"] == len(answers)
        assert ends["42"]
    finally:
        subprocess.run(["umount", full], check=True)
    assert remains() == []
