"""Cores that engines and trainers share: counts the busy ones, and says how much they slow each other down."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flexmarl.analysis.costs import SharedHost


class CpuShare:
    """The shared cores of one simulated machine.

    >>> host = CpuShare(SharedHost(engine_per_trainer=0.5))
    >>> with host.busy_trainer():
    ...     host.engine_factor()
    1.5
    """

    def __init__(self, shared: SharedHost | None = None) -> None:
        """Without `shared`, engines and trainers do not slow each other down."""
        self._shared = shared or SharedHost()
        self._engines: dict[Callable[[], None], None] = {}
        self._trainers = 0

    def engine_factor(self) -> float:
        """Returns how many times as long a busy engine's steps take as if it were alone."""
        others = max(0, len(self._engines) - 1)
        return 1.0 + self._shared.engine_per_trainer * self._trainers + self._shared.engine_per_engine * others

    def trainer_factor(self) -> float:
        """Returns how many times as long a busy trainer's work takes as if it were alone."""
        others = max(0, self._trainers - 1)
        return 1.0 + self._shared.trainer_per_engine * len(self._engines) + self._shared.trainer_per_trainer * others

    def engine_busy(self, on_change: Callable[[], None]) -> None:
        """Registers a busy engine. `on_change` is called whenever `engine_factor` has changed, until `engine_idle`."""
        with self._changing():
            self._engines[on_change] = None

    def engine_idle(self, on_change: Callable[[], None]) -> None:
        """Removes the engine that registered this `on_change`. Does nothing if there is none."""
        with self._changing():
            self._engines.pop(on_change, None)

    @contextmanager
    def busy_trainer(self) -> Iterator[None]:
        """Counts one more busy trainer inside the block."""
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
