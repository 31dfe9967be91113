"""Files of other nodes by one-sided reads, through Mooncake's transfer engine: over RDMA where there is some, else TCP.

    source's agent   window(path) ──► maps the file and offers its memory; from then on its process has no part
    other agent      read(window) ──► the engine copies it into the file that is to come

The package is `mooncake-transfer-engine-non-cuda`, which needs libibverbs.
"""

import ctypes
import fcntl
import importlib
import itertools
import mmap
import os
from pathlib import Path
from typing import Any

from flexmarl.cluster.node_agent import Window
from flexmarl.errors import ConfigError, described

CHUNK_BYTES = 256 << 20
"""Bytes of one transfer: a fetch that is cancelled waits for one at most."""


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
        self._numbers = itertools.count()
        self._offered: dict[int, MappedFile] = {}

    def window(self, path: Path) -> Window:
        """Offers a file. It is locked for reading until `shut`, so that its block is not written again."""
        mapped = MappedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        fcntl.flock(mapped.descriptor, fcntl.LOCK_SH)
        self._register(mapped)
        number = next(self._numbers)
        self._offered[number] = mapped
        session = f"{self._address}:{self._engine.get_rpc_port()}"
        return Window(number=number, session=session, address=mapped.address, num_bytes=mapped.num_bytes)

    def shut(self, number: int) -> None:
        """Ends an offer. An unknown one is ignored."""
        if mapped := self._offered.pop(number, None):
            self._engine.unregister_memory(mapped.address)
            mapped.close()

    def read(self, window: Window, descriptor: int, start: int) -> None:
        """Copies the bytes of a window from `start` on, as many as one transfer takes, into an open file."""
        mapped = MappedFile(os.dup(descriptor))
        try:
            self._register(mapped)
            size = min(CHUNK_BYTES, window.num_bytes - start)
            failed = self._engine.transfer_sync_read(
                window.session, mapped.address + start, window.address + start, size
            )
            self._engine.unregister_memory(mapped.address)
            if failed:
                raise OSError(f"Mooncake's transfer from {window.session} failed ({failed})")
        finally:
            mapped.close()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one transfer."""
        return CHUNK_BYTES

    def close(self) -> None:
        """Ends all offers."""
        for number in list(self._offered):
            self.shut(number)

    def _register(self, mapped: "MappedFile") -> None:
        if failed := self._engine.register_memory(mapped.address, mapped.num_bytes):
            raise OSError(f"Mooncake's engine refuses {mapped.num_bytes:,} bytes of memory ({failed})")


class MappedFile:
    """A file in this process's memory."""

    def __init__(self, descriptor: int) -> None:
        """Closes the descriptor at its end. The file must not be empty."""
        self.descriptor = descriptor
        self.num_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Unmaps it."""
        self._map.close()
        os.close(self.descriptor)


def engine_class() -> Any:
    """The class of Mooncake's engine. Raises ConfigError if it cannot be imported."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"cluster.transport is 'mooncake', whose engine cannot be imported ({described(error)}): pip install "
            f"'flexmarl[mooncake]', on Debian also apt-get install libibverbs1; or use cluster.transport=ray"
        ) from error
