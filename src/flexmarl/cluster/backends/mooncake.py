"""Files of other nodes by one-sided reads, through Mooncake's transfer engine: over RDMA where there is some, else TCP.

    source's agent   offer(path) ──► maps the file and offers its memory; from then on its process has no part
    other agent      read(offer) ──► the engine copies it into the file that is to come

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

from flexmarl.cluster.node_agent import Offer
from flexmarl.errors import ConfigError, described

CHUNK_BYTES = 256 << 20
"""Most bytes of one transfer: a fetch that is cancelled waits for one at most."""


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

    def offer(self, path: Path) -> Offer:
        """Offers a file. It is locked for reading until `withdraw`, so that its block is not written again."""
        mapped = MappedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        try:
            fcntl.flock(mapped.descriptor, fcntl.LOCK_SH)
            self._register(mapped)
        except BaseException:
            mapped.close()
            raise
        number = next(self._numbers)
        self._offered[number] = mapped
        session = f"{self._address}:{self._engine.get_rpc_port()}"
        return Offer(number=number, session=session, address=mapped.address, num_bytes=mapped.num_bytes)

    def withdraw(self, number: int) -> None:
        """Ends an offer. An unknown one is ignored."""
        if mapped := self._offered.pop(number, None):
            self._engine.unregister_memory(mapped.address)
            mapped.close()

    def read(self, offer: Offer, descriptor: int, start: int, num_bytes: int) -> None:
        """Copies bytes of an offered file into an open file of its size. Raises OSError if that fails."""
        mapped = MappedFile(os.dup(descriptor))
        try:
            self._register(mapped)
            try:
                failed = self._engine.transfer_sync_read(
                    offer.session, mapped.address + start, offer.address + start, num_bytes
                )
            finally:
                self._engine.unregister_memory(mapped.address)
            if failed:
                raise OSError(f"Mooncake's transfer from {offer.session} failed ({failed})")
        finally:
            mapped.close()

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of one transfer."""
        return CHUNK_BYTES

    def close(self) -> None:
        """Ends all offers."""
        for number in list(self._offered):
            self.withdraw(number)

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
