"""Runs a plan of faults beside a run, and notes each one that strikes as the event `fault` of the journal.

consumes     a FaultPlan
waits for    the instant of each fault that comes by time; the others come with what they befall
produces     thrown switches of engines, and answers to those who ask what befalls them now
unblocked by time
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from flexmarl.events.hub import Events
from flexmarl.events.run_events import FaultStruck
from flexmarl.testing.faults.fault_plan import Fault, FaultKind, FaultPlan

BY_TIME = (FaultKind.LOST_INSTANCE, FaultKind.SLOW_INSTANCE, FaultKind.ENGINE_SILENCE)
"""Kinds that befall an engine at a second of the run; a node is lost by time too."""
LOST = "it was lost, as planned"


class Switches(Protocol):
    """An engine that can be broken."""

    def fail(self, because: str, /) -> None:
        """Dies: every call, running ones too, raises EngineError."""
        ...

    def slow(self, factor: float) -> None:
        """Takes so many times as long from now on."""
        ...

    def mute(self) -> None:
        """Never answers again."""
        ...


class Injection:
    """One plan over all lives of a run: what has struck in one life does not strike in the next."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self._struck = set[Fault]()
        self._noted = set[Fault]()
        self._counts = Counter[tuple[FaultKind, str]]()
        self._events: Events | None = None
        self._die: Callable[[], None] = lambda: None

    def begin(self, events: Events, die: Callable[[], None]) -> None:
        """Begins a life of the run: seconds and counts begin anew. `die` ends it as kill -9 would."""
        self._events, self._die = events, die
        self._counts.clear()
        self._noted.clear()

    async def watch(
        self,
        engines: Callable[[], Mapping[str, Switches]],
        lose: Callable[[str, str], None],
        lose_node: Callable[[str, str], object] = lambda node, because: None,
    ) -> None:
        """Strikes by time, until nothing is left to strike; an instance that is not there any more is spared.

        `lose` is given an instance whose process is seen to end, idle or not, and why; `lose_node` a node.
        """
        waiting = [f for f in self.plan.of(*BY_TIME, FaultKind.LOST_NODE) if f not in self._struck]
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
            engine = engines().get(fault.target)
            if engine is not None:
                self._strike(fault)
                _throw(engine, fault)
                if fault.how == "at_once":
                    lose(fault.target, LOST)

    def occurs(self, kind: FaultKind, target: str = "") -> Fault | None:
        """Counts one more occurrence of what a fault of this kind waits for; returns the fault, if it comes due."""
        self._counts[kind, target] += 1
        for fault in self.plan.of(kind):
            if fault.target == target and fault not in self._struck and self._counts[kind, target] == fault.after:
                self._strike(fault)
                return fault
        return None

    def stricken(self, kind: FaultKind, target: str = "") -> Fault | None:
        """As `occurs`, for a fault that lasts: `amount` occurrences from number `after` on."""
        self._counts[kind, target] += 1
        count = self._counts[kind, target]
        for fault in self.plan.of(kind):
            begins = fault not in self._struck and count == fault.after
            if fault.target == target and (begins or (fault in self._noted and count < fault.after + fault.amount)):
                self._strike(fault)
                return fault
        return None

    def store_called(self) -> None:
        """Ends the life if it was to end with this call of the store."""
        self._counts[FaultKind.LOST_CONTROLLER, ""] += 1
        for fault in self._controller("store_calls"):
            if fault not in self._struck and self._counts[FaultKind.LOST_CONTROLLER, ""] == fault.after:
                self._strike(fault)
                self._die()

    def befalls(self, kind: FaultKind, input_id: str) -> bool:
        """Whether a task is poisoned, or hangs in its first play; strikes whenever it is asked for such a task."""
        fault = next((fault for fault in self.plan.of(kind) if fault.target == input_id), None)
        if fault is not None:
            self._strike(fault)
        return fault is not None

    def flattens(self, position: int) -> bool:
        """Whether the task at a position teaches nothing."""
        for fault in self.plan.of(FaultKind.ALL_FILTERED):
            if fault.after <= position < fault.after + fault.amount:
                self._strike(fault)
                return True
        return False

    def exhausts(self, position: int) -> bool:
        """Whether the source has no task at a position."""
        for fault in self.plan.of(FaultKind.SOURCE_EXHAUSTED):
            if position >= fault.after:
                self._strike(fault)
                return True
        return False

    def tears(self) -> Fault | None:
        """The fault that befalls the newest checkpoint now that the run has died; strikes when it is resumed."""
        fault = next((f for f in self.plan.of(FaultKind.TORN_CHECKPOINT) if f not in self._struck), None)
        if fault is not None:
            self._struck.add(fault)
        return fault

    def note(self, fault: Fault) -> None:
        """Emits that a fault struck; of one that lasts, the first strike in each life."""
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
