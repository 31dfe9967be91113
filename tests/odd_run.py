"""A `flexmarl train` in a process of its own whose workflows misbehave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from flexmarl.events.event import Event
from flexmarl.events.group_events import EpisodeFailed, GroupAdmitted, GroupExpired, GroupFailed, GroupFiltered
from flexmarl.events.journal import read_journal
from flexmarl.events.run_events import StepEnded
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.store_file import read_store
from flexmarl.records import ROW_TERMINAL
from tests.forked import ForkedCommand
from tests.odd_workflows import EVERY, FINISHED, ODDITIES, kind_of

E = TypeVar("E", bound=Event)


REPOSITORY = Path(__file__).resolve().parent.parent
EPISODES = 8
HANG_S = 240.0
"""Far above what a run takes on a busy machine."""
SIGTERM_S = 10.0
CODE = """
import os
from pathlib import Path
from flexmarl.agents import workflow
from tests.odd_workflows import odd_workflow, ODDITIES, Oddity, FAILED, kind_of

KINDS = os.environ["KINDS"].split(",")
EPISODES = int(os.environ["EPISODES"])

async def blocks(task, team):
    while True:
        pass

ODDITIES["blocks"] = Oddity(blocks, FAILED)
play_odd = odd_workflow(*KINDS, episodes=EPISODES)

@workflow("odd")
async def odd(task, team):
    kind = kind_of(team.context.trajectory_id, KINDS, EPISODES)
    if kind is not None:
        with open(os.environ["BEGUN"], "a") as begun:
            begun.write(f"{kind}\\n")
    await play_odd(task, team)
"""


class OddRun:
    """One command, whose every 7th episode is odd, of the kinds in turn."""

    def __init__(self, config: Path, folder: Path, kinds: Sequence[str], *overrides: str, forked: bool = False) -> None:
        self.kinds, self.folder = tuple(kinds), folder
        self._begun = folder / "begun"
        (folder / "odd.py").write_text(CODE, encoding="utf-8")
        groups = -(-EVERY * len(kinds) // EPISODES)
        words = [
            f"code=[tasks.py, {folder / 'odd.py'}]",
            "team.workflow={type: custom, name: odd}",
            f"batch={{groups: {groups}, episodes: {EPISODES}}}",
            f"out={folder}",
            "checkpoint.every=0",
            "steps=1",
            "evaluate.tasks=0",
            f"rollout={{inter_query: {groups}, intra_query: {EPISODES}, episode_timeout_s: 600, cancel_grace_s: 0.5}}",
            *overrides,
        ]
        path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"KINDS": ",".join(kinds), "EPISODES": str(EPISODES), "BEGUN": str(self._begun)}
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self._said = (folder / "said").open("w+")
        words = ["train", str(config), *words]
        self.process = (
            ForkedCommand(words, folder, environment, folder / "said")
            if forked
            else subprocess.Popen(
                [sys.executable, "-u", "-c", "from flexmarl.cli import main; main()", *words],
                cwd=folder,
                env={**os.environ, **environment},
                stdout=self._said,
                stderr=subprocess.STDOUT,
            )
        )

    def __enter__(self) -> "OddRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._said.close()

    @property
    def said(self) -> str:
        self._said.seek(0)
        return self._said.read()

    def wait(self, seconds: float = HANG_S) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def wait_until_all_have_begun(self) -> None:
        """Until an episode of each kind plays."""
        deadline = time.monotonic() + HANG_S
        while not self._begun.is_file() or set(self._begun.read_text().split()) < set(self.kinds):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, f"hangs: {self.said}"
            time.sleep(0.02)

    def terminate(self) -> float:
        """Sends SIGTERM; the seconds until the process is gone."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(HANG_S)
        return time.monotonic() - began

    def events(self, *kinds: type[E]) -> list[E]:
        (path,) = self.folder.glob("sums-*")
        return [event for event in read_journal(RunFolder(path).journal) if isinstance(event, kinds)]

    def check_ended_well(self) -> None:
        """It has trained; each odd episode has ended as it should, and no other has failed."""
        assert self.wait() == 0, self.said
        (path,) = self.folder.glob("sums-*")
        assert json.loads(RunFolder(path).summary.read_text())["steps"] == 1
        failed = {event.episode: event for event in self.events(EpisodeFailed)}
        found = Counter()
        for episode, event in failed.items():
            kind = kind_of(episode, self.kinds, EPISODES)
            assert kind is not None, f"a good episode failed: {event.because}"
            oddity = ODDITIES[kind]
            assert event.status == oddity.ends, event
            assert oddity.because in event.because, event
            found[kind] += 1
        assert set(found) == {kind for kind in self.kinds if ODDITIES[kind].ends is not FINISHED}
        ended = Counter(event.group for event in self.events(GroupFailed, GroupFiltered, GroupExpired))
        ended.update(group for event in self.events(StepEnded) for group in event.trained)
        assert ended == Counter(event.group for event in self.events(GroupAdmitted))
        with read_store(RunFolder(path).store) as store:
            assert {row.state for agent in store.agents for row in store.rows(agent)} <= ROW_TERMINAL
