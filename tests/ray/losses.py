"""Random schedules of faults for a run on real nodes, what carries them out, and the witness of each."""

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flexmarl.events.event import Event
from flexmarl.events.group_events import EpisodeLost
from flexmarl.events.run_events import NodeLost, ProcessEnded, ProcessStarted, StepEnded, StepStarted, WorkerLost
from flexmarl.events.serving_events import Called, InstanceLost, Moved
from flexmarl.records import WorkerId
from tests.ray.child_run import Left
from tests.ray.conftest import OTHERS, Nodes

LOOK_S = 0.05
"""Each look reads the whole journal."""
OWING = 20
"""While a step of 64 calls has answered no more, each of two rollout workers still plays episodes."""
SLOW_S = 1.5
"""So long a slow engine stands still: its calls, loads and moves take that much longer."""
MOVES = ("dies_after_abort", "stops_in_abort", "dies_in_move", "stops_in_move", "moved engine killed")
"""Faults that wait for a move. They come first in a run, as what is lost later may leave too few engines for moves."""
NODES = ("node killed", "agent killed")
OTHERS_LOST = (
    *("rollout killed", "garbage", "store killed", "dies_in_publish"),
    *("engine killed", "engine slow", "stops_in_publish", "wrong_checksum"),
)
KINDS = frozenset([*MOVES, *NODES, *OTHERS_LOST])
"""All faults. Those with a space are done to processes from outside; an engine does the others to itself when it comes
to that point (faulty_engine.py)."""
RUNS = 3
"""Runs that have all faults together: RUNS seeds from a multiple of it on. The first of them have them in this order,
so that two runs have what no other test has."""


@dataclass(slots=True)
class Fault:
    """One fault of a schedule: it comes when the event was so often in the journal."""

    kind: str
    event: str
    nth: int
    dice: random.Random
    done: str = ""
    """What it was done to; empty until then."""


def schedule(seed: int, *, calls: int) -> list[Fault]:
    """The faults of a run that answers so many calls. No run loses two nodes."""
    deck = random.Random(seed // RUNS)
    moves, nodes, others = (
        deck.sample(kinds, len(kinds)) if seed >= RUNS else list(kinds) for kinds in (MOVES, NODES, OTHERS_LOST)
    )
    hands = (
        [*moves[:2], nodes[0], *others[:2]],
        [*moves[2:4], nodes[1], *others[2:4]],
        [*moves[4:], *others[4:]],
    )
    dice = random.Random(seed)
    faults = list[Fault]()
    for kind in hands[seed % RUNS]:
        nth = 1 if kind in MOVES else dice.randint(1, calls // 3)
        event = "moved" if kind == "moved engine killed" else "call"
        faults.append(Fault(kind, event, nth, random.Random(dice.random())))
    return faults


@dataclass
class Losses:
    """Carries out a schedule while the run goes on."""

    faults: Sequence[Fault]
    nodes: Nodes
    armed: Path
    """The folder that `faulty` engines look into."""
    out: Path
    """The folder that the run's own is in."""
    pids: dict[int, float] = field(default_factory=dict)
    """Every process that the run was seen to have, with its start time."""
    _lines: int = -1
    _looked: float = 0.0

    @property
    def run(self) -> Left | None:
        """The run, once it has begun."""
        return next(map(Left, self.out.glob("sums-*")), None)

    def look(self) -> bool:
        """Does what is due, at most every LOOK_S. Returns True when nothing is left to do."""
        if time.monotonic() - self._looked < LOOK_S:
            return False
        self._looked = time.monotonic()
        journal = self.run.journal if self.run else []
        if len(journal) != self._lines:
            self._lines = len(journal)
            self.observe(journal)
            held = not any(event.name == "step_ended" for event in journal) and any(map(self._waits, self.faults))
            for fault in self.faults:
                if fault.done or (held and fault.kind not in MOVES):
                    continue
                if sum(event.name == fault.event for event in journal) >= fault.nth:
                    fault.done = self._do(fault, journal)
        return all(fault.done for fault in self.faults)

    def _waits(self, fault: Fault) -> bool:
        """True for a fault that waits for a move."""
        return fault.kind in MOVES and (not fault.done or (self.armed / fault.kind).exists())

    def observe(self, journal: Sequence[Event]) -> None:
        """Notes the processes that the run has."""
        for event in journal:
            if isinstance(event, ProcessStarted) and event.pid not in self.pids:
                with suppress(psutil.NoSuchProcess):
                    self.pids[event.pid] = psutil.Process(event.pid).create_time()

    def _do(self, fault: Fault, journal: Sequence[Event]) -> str:
        """Does it, and says to what; empty if nothing is there to do it to, so that it is tried again."""
        if " " not in fault.kind:
            (self.armed / fault.kind).touch()
            return fault.kind
        if fault.kind == "node killed":
            node = fault.dice.choice(OTHERS)
            self.nodes.kill(node)
            return node
        if fault.kind == "agent killed":
            node = fault.dice.choice(OTHERS)
            return node if (pid := agent_of(node, self.nodes.address)) and sent(pid, signal.SIGKILL) else ""
        if fault.kind == "rollout killed" and not 0 < calls_of_step(journal) <= OWING:
            return ""
        found = list(moved(journal) if fault.kind.startswith("moved") else live(journal, fault.kind.split()[0]))
        if not found:
            return ""
        pid = fault.dice.choice(sorted(found))
        if not fault.kind.endswith("slow"):
            return str(pid) if sent(pid, signal.SIGKILL) else ""
        if not sent(pid, signal.SIGSTOP):
            return ""
        time.sleep(SLOW_S)
        with suppress(psutil.NoSuchProcess):  # It had ended before, by another fault: another one is slow then.
            still = psutil.Process(pid).status() == psutil.STATUS_STOPPED
            return str(pid) if sent(pid, signal.SIGCONT) and still else ""
        return ""


def witnesses(faults: Sequence[Fault], run: Left, armed: Path) -> Iterator[tuple[str, str]]:
    """Yields the kind of each fault that the run met, and what it was done to.

    Raises AssertionError for one that it did not meet, unless it waited for a move that never came.
    """
    lost = {event.pid: event for event in run.events(WorkerLost)}
    replayed, handed_over = run.events(EpisodeLost), [call for call in run.events(Called) if call.kept_tokens]
    for fault in faults:
        struck = [path.suffix[1:] for path in armed.glob(f"{fault.kind}.*")]
        if fault.kind == "moved engine killed" and not fault.done:
            continue  # No engine was seen while it served another policy.
        if fault.kind in MOVES and " " not in fault.kind and not struck:
            assert not (handed_over if fault.kind.endswith("abort") else run.events(Moved)), f"{fault} did not come"
            continue
        assert fault.done, f"{fault} did not come"
        if fault.kind in NODES:
            (node,) = (event for event in run.events(NodeLost) if event.node == fault.done)
            yield fault.kind, f"{node.node}, {node.because}"
        elif fault.kind == "engine slow":
            yield fault.kind, fault.done
        elif " " in fault.kind:
            assert int(fault.done) in lost, f"{fault} was not noticed"
            process = lost[int(fault.done)].process
            if fault.kind == "rollout killed":
                assert any(event.because.startswith(f"{process}:") for event in replayed), f"{process} was not playing"
            yield fault.kind, process
        else:
            assert struck, f"{fault} did not come"
            assert run.events(InstanceLost), f"{fault} was not noticed"
            yield fault.kind, f"pid {struck[0]}"


def live(journal: Sequence[Event], kind: str) -> Iterator[int]:
    """Pids of the processes of a kind that the run has now."""
    there = dict[WorkerId, int]()
    for event in journal:
        if isinstance(event, ProcessStarted):
            there[event.process] = event.pid
        elif isinstance(event, WorkerLost | ProcessEnded):
            there.pop(event.process, None)
    yield from (pid for process, pid in there.items() if process.kind == kind)


def moved(journal: Sequence[Event]) -> Iterator[int]:
    """Pids of live engines that serve another policy than the one that they were started for."""
    names = dict[WorkerId, WorkerId]()
    for event in journal:
        if isinstance(event, Moved):
            before = WorkerId.engine(event.instance)
            names[WorkerId.engine(event.became)] = names.pop(before, before)
    started = {event.process: event.pid for event in journal if isinstance(event, ProcessStarted)}
    away = {started[process] for now, process in names.items() if now.policy != process.policy}
    yield from away & set(live(journal, "engine"))


def calls_of_step(journal: Sequence[Event]) -> int:
    """Number of calls that were answered in the step under way; 0 between two steps."""
    calls = 0
    for event in journal:
        if isinstance(event, StepStarted | StepEnded):
            calls = 0
        calls += isinstance(event, Called)
    return calls


def agent_of(node: str, address: str) -> int | None:
    """Pid of the run's agent on a node of the Ray at this address."""
    for raylet in psutil.process_iter():
        with suppress(psutil.Error):
            words = raylet.cmdline()
            if raylet.name() == "raylet" and f"--node-name={node}" in words and any(address in word for word in words):
                for child in raylet.children():
                    if "NodeAgentActor" in " ".join(child.cmdline()):
                        return child.pid
    return None


def sent(pid: int, number: int) -> bool:
    """Sends a signal; False if the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
