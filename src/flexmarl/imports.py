"""Imports of large packages, when they are needed. Blocks without garbage collection, as imports should be.

Torch and transformers make hundreds of thousands of objects that stay. A collector that looks through them again and
again takes a fifth of the time: 1.2 of 5.4 s in the controller, and as much in the process of each resident.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_ENTERED: list[bool] = []
"""For each block of `collected_later` that is entered now, in any thread: True if objects were collected before it."""
_LOCK = threading.RLock()  # A collection may begin while it is held, and anything may run then.


@contextmanager
def collected_later() -> Iterator[None]:
    """Suspends garbage collection until this block, and those of other threads at this time, have ended."""
    with _LOCK:
        _ENTERED.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            if _ENTERED.pop() and not _ENTERED:  # The last one gets what the first one saw.
                gc.enable()


class Lazy:
    """Stands for a module, and imports it when one of its names is used.

    Not importlib's LazyLoader: that leaves an unloaded module in `sys.modules`, and torch looks into all of them while
    it loads.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        with collected_later():
            module = import_module(self._name)
        return getattr(module, attribute)
