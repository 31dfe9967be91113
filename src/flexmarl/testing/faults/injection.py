"""Runs a plan of faults during a run, and records each fault that strikes as the event `fault` in the journal.

consumes     a FaultPlan
waits for    the time of each fault that comes by time; the other faults strike when their target asks for them
produces     broken engines, lost instances and nodes, and answers to wrappers that ask for a fault
unblocked by time
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from flexmarl.events.event import Events
from flexmarl.events.run_events import FaultStruck
from flexmarl.records import InstanceId
from flexmarl.testing.faults.fault_plan import PLACED, Fault, FaultKind, FaultPlan

BY_TIME = (FaultKind.LOST_INSTANCE, FaultKind.SLOW_INSTANCE, FaultKind.ENGINE_SILENCE)
"""Kinds that strike an engine at a second of the run. A lost node and a lost controller come by time too."""
LOST = "it was lost, as planned"


class Switches(Protocol):
    """An engine that can be broken."""

    def fail(self, because: str, /) -> None:
        """Kills the engine: running and later calls raise EngineError."""
        ...

    def slow(self, factor: float) -> None:
        """Makes the engine take `factor` times as long from now on."""
        ...

    def mute(self) -> None:
        """Makes the engine stop answering."""
        ...


class Injection:
    """One plan for all lives of a run. A fault that struck in one life does not strike in the next."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self._struck = set[Fault]()
        self._noted = set[Fault]()
        self._counts = Counter[tuple[FaultKind, str]]()
        self._events: Events | None = None
        self._die: Callable[[], None] = lambda: None

    def begin(self, events: Events, die: Callable[[], None]) -> None:
        """Begins a life of the run: counts begin anew.

        `events` get each fault that strikes. `die` ends the life as kill -9 would.
        """
        self._events, self._die = events, die
        self._counts.clear()
        self._noted.clear()

    async def watch(
        self,
        engines: Callable[[], Mapping[InstanceId, Switches]],
        lose: Callable[[InstanceId, str], None],
        lose_node: Callable[[str, str], object] = lambda node, because: None,
        workers: Callable[[], Mapping[str, Callable[[str], object]]] = dict,
    ) -> None:
        """Strikes by time until no such fault is left or the controller dies. Skips instances that no longer exist.

        `lose` is called with an instance whose process is seen to end and the reason; `lose_node` with a node and the
        reason. `engines` returns the engines that live now, by instance, and `workers` a function for each rollout
        worker that lives now, which ends it for a reason.
        """
        waiting = [f for f in self.plan.of(*BY_TIME, *PLACED) if f not in self._struck]
        waiting += [f for f in self._controller("seconds") if f not in self._struck]
        for fault in sorted(waiting, key=lambda fault: fault.after):
            await asyncio.sleep(fault.after - asyncio.get_running_loop().time())
            if fault.kind is FaultKind.LOST_CONTROLLER:
                self._strike(fault)
                self._die()
                return
            if fault.kind is FaultKind.LOST_NODE:
                self._strike(fault)
                lose_node(fault.target, LOST)
                continue
            if fault.kind is FaultKind.LOST_WORKER:
                if lose_worker := workers().get(fault.target):
                    self._strike(fault)
                    lose_worker(LOST)
                continue
            engine = engines().get(fault.instance)
            if engine is not None:
                self._strike(fault)
                _throw(engine, fault)
                if fault.how == "at_once":
                    lose(fault.instance, LOST)

    def occurs(self, kind: FaultKind, target: str = "") -> Fault | None:
        """Counts one more occurrence for this kind and target. Returns the fault that comes due with it, or None."""
        self._counts[kind, target] += 1
        for fault in self.plan.of(kind):
            if fault.target == target and fault not in self._struck and self._counts[kind, target] == fault.after:
                self._strike(fault)
                return fault
        return None

    def stricken(self, kind: FaultKind, target: str = "") -> Fault | None:
        """Like `occurs`, for a fault that lasts: it strikes `amount` occurrences, from number `after` on."""
        self._counts[kind, target] += 1
        count = self._counts[kind, target]
        for fault in self.plan.of(kind):
            begins = fault not in self._struck and count == fault.after
            if fault.target == target and (begins or (fault in self._noted and count < fault.after + fault.amount)):
                self._strike(fault)
                return fault
        return None

    def store_called(self) -> None:
        """Counts a write to the store, and ends the life if the plan says so."""
        self._counts[FaultKind.LOST_CONTROLLER, ""] += 1
        for fault in self._controller("store_calls"):
            if fault not in self._struck and self._counts[FaultKind.LOST_CONTROLLER, ""] == fault.after:
                self._strike(fault)
                self._die()

    def befalls(self, kind: FaultKind, input_id: str) -> bool:
        """Returns True if the plan has a fault of this kind for the task. The fault then strikes."""
        fault = next((fault for fault in self.plan.of(kind) if fault.target == input_id), None)
        if fault is not None:
            self._strike(fault)
        return fault is not None

    def flattens(self, position: int) -> bool:
        """Returns True if the task at a position must get equal rewards. The fault then strikes."""
        for fault in self.plan.of(FaultKind.ALL_FILTERED):
            if fault.after <= position < fault.after + fault.amount:
                self._strike(fault)
                return True
        return False

    def exhausts(self, position: int) -> bool:
        """Returns True if the source must have no task at a position. The fault then strikes."""
        for fault in self.plan.of(FaultKind.SOURCE_EXHAUSTED):
            if position >= fault.after:
                self._strike(fault)
                return True
        return False

    def tears(self) -> Fault | None:
        """Returns the fault that damages the newest checkpoint, or None. The next life must `note` it."""
        fault = next((f for f in self.plan.of(FaultKind.TORN_CHECKPOINT) if f not in self._struck), None)
        if fault is not None:
            self._struck.add(fault)
        return fault

    def note(self, fault: Fault) -> None:
        """Emits that a fault struck, once in each life. Later strikes in that life emit nothing."""
        if fault not in self._noted and self._events is not None:
            self._noted.add(fault)
            self._events.emit(
                FaultStruck(kind=fault.kind, target=fault.target, after=fault.after, amount=fault.amount, how=fault.how)
            )

    def _strike(self, fault: Fault) -> None:
        self._struck.add(fault)
        self.note(fault)

    def _controller(self, how: str) -> list[Fault]:
        return [fault for fault in self.plan.of(FaultKind.LOST_CONTROLLER) if fault.how == how]


def _throw(engine: Switches, fault: Fault) -> None:
    if fault.kind is FaultKind.LOST_INSTANCE:
        engine.fail(LOST)
    elif fault.kind is FaultKind.SLOW_INSTANCE:
        engine.slow(fault.amount)
    else:
        engine.mute()
