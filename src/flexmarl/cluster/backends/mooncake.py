"""Files of other nodes by one-sided reads, over TCP, through Mooncake's transfer engine.

    source's agent   offer(path) ──► maps the file and offers its memory; from then on its process has no part
    other agent      read(offer) ──► the engine copies it into the file that is to come

The package is `mooncake-transfer-engine-non-cuda`, which needs libibverbs.
"""

import ctypes
import fcntl
import importlib
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from flexmarl.cluster.node_agent import Offer
from flexmarl.errors import ConfigError, described

CHUNK_BYTES = 256 << 20
"""Most bytes of one transfer: a fetch that is cancelled waits for one at most, or 30 s if its source is silent."""


class MooncakeMemory:
    """This process's end of the transfers: a OneSidedMemory."""

    def __init__(self, address: str) -> None:
        """`address` is this node's, where other nodes reach it. Raises ConfigError if the engine cannot be used."""
        self._address = address
        self._engine: Any = engine_class()()
        if self._engine.initialize(address, "P2PHANDSHAKE", "tcp", ""):
            raise ConfigError(
                f"cluster.transport is 'mooncake', whose engine cannot listen on {address}; see what it wrote on "
                f"stderr, or use cluster.transport=ray"
            )
        self._offered: dict[int, ExitStack] = {}
        """By number; each ends when it is closed."""

    def offer(self, path: Path, number: int) -> Offer:
        """Locks, maps and registers a file. Raises OSError."""
        with ExitStack() as offered:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            offered.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Who writes to it has it because it was dropped.
            status = os.fstat(descriptor)
            if os.stat(path).st_ino != status.st_ino:
                raise FileNotFoundError(f"{path} was dropped")
            address = offered.enter_context(self._registered(descriptor, 0, status.st_size))
            self._offered[number] = offered.pop_all()
        session = f"{self._address}:{self._engine.get_rpc_port()}"
        return Offer(session=session, address=address, num_bytes=status.st_size)

    def withdraw(self, number: int) -> None:
        """Ends an offer. An unknown one is ignored. A transfer from it that is under way fails."""
        if offered := self._offered.pop(number, None):
            offered.close()

    def read(self, offer: Offer, descriptor: int, start: int, num_bytes: int) -> None:
        """Copies bytes of an offered file into an open file of its size. Raises OSError if that fails."""
        with self._registered(descriptor, start, num_bytes) as address:
            failed = self._engine.transfer_sync_read(offer.session, address, offer.address + start, num_bytes)
        if failed:
            raise OSError(f"Mooncake's transfer from {offer.session} failed ({failed}); it wrote why on stderr")

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of one transfer."""
        return CHUNK_BYTES

    def close(self) -> None:
        """Ends all offers."""
        for number in list(self._offered):
            self.withdraw(number)

    @contextmanager
    def _registered(self, descriptor: int, start: int, num_bytes: int) -> Iterator[int]:
        """Maps a part of an open file. Yields its address, which the engine transfers from and to in the context."""
        with mmap.mmap(descriptor, num_bytes, offset=start) as mapped:
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            if failed := self._engine.register_memory(address, num_bytes):
                raise OSError(f"Mooncake's engine refuses {num_bytes:,} bytes of memory ({failed})")
            try:
                yield address
            finally:
                self._engine.unregister_memory(address)


def engine_class() -> Any:
    """The class of Mooncake's engine. Raises ConfigError if it cannot be imported."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"cluster.transport is 'mooncake', whose engine cannot be imported ({described(error)}): pip install "
            f"'flexmarl[mooncake]', on Debian also apt-get install libibverbs1; or use cluster.transport=ray"
        ) from error
