"""Cores that engines and trainers share: who is busy on them, and how much slower that makes the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flexmarl.simulator.costs import SharedHost


class CpuShare:
    """One machine of the simulated world.

    >>> host = CpuShare(SharedHost(engine_per_trainer=0.5))
    >>> with host.busy_trainer():
    ...     host.engine_factor()
    1.5
    """

    def __init__(self, shared: SharedHost | None = None) -> None:
        """By default nobody shares anything: every device is its owner's alone."""
        self._shared = shared or SharedHost()
        self._engines: dict[Callable[[], None], None] = {}
        self._trainers = 0

    def engine_factor(self) -> float:
        """Times what a busy engine's steps would take if it were alone."""
        others = max(0, len(self._engines) - 1)
        return 1.0 + self._shared.engine_per_trainer * self._trainers + self._shared.engine_per_engine * others

    def trainer_factor(self) -> float:
        """Times what a busy trainer's work would take if it were alone."""
        others = max(0, self._trainers - 1)
        return 1.0 + self._shared.trainer_per_engine * len(self._engines) + self._shared.trainer_per_trainer * others

    def engine_busy(self, on_change: Callable[[], None]) -> None:
        """An engine has begun to work; it is told whenever `engine_factor` has changed, until it is idle."""
        with self._changing():
            self._engines[on_change] = None

    def engine_idle(self, on_change: Callable[[], None]) -> None:
        """The engine that gave this `on_change` has stopped; one that was idle is no error."""
        with self._changing():
            self._engines.pop(on_change, None)

    @contextmanager
    def busy_trainer(self) -> Iterator[None]:
        """A trainer works inside the block."""
        with self._changing():
            self._trainers += 1
        try:
            yield
        finally:
            with self._changing():
                self._trainers -= 1

    @contextmanager
    def _changing(self) -> Iterator[None]:
        before = self.engine_factor()
        yield
        if self.engine_factor() != before:
            for on_change in list(self._engines):
                on_change()
