"""Files of other nodes read by Mooncake's transfer engine, over TCP, between processes of this machine."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from flexmarl.cluster.node_agent import Offer
from flexmarl.errors import ConfigError

try:
    from flexmarl.cluster.backends import mooncake

    mooncake.engine_class()
except ConfigError as lacking:
    pytest.skip(str(lacking), allow_module_level=True)

HERE = "127.0.0.1"
MIB = 1 << 20


def source(path: Path, told: Connection) -> None:
    """Another node: offers a file, and withdraws it when it is told to."""
    memory = mooncake.MooncakeMemory(HERE)
    offer = memory.offer(path)
    told.send(offer)
    told.recv()
    memory.withdraw(offer.number)
    memory.withdraw(offer.number)
    told.send("withdrawn")
    told.recv()


class Source:
    """A process that offers a file."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=source, args=(path, theirs), daemon=True)
        self.process.start()
        assert self.pipe.poll(60)
        self.offer: Offer = self.pipe.recv()

    def withdraw(self) -> None:
        self.pipe.send("withdraw")
        assert self.pipe.recv() == "withdrawn"

    def close(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module")
def memory() -> Iterator[mooncake.MooncakeMemory]:
    memory = mooncake.MooncakeMemory(HERE)
    yield memory
    memory.close()


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    data = os.urandom(5 * MIB + 17)
    (tmp_path / "file").write_bytes(data)
    return data


@pytest.fixture
def there(data: bytes, tmp_path: Path) -> Iterator[Source]:
    source = Source(tmp_path / "file")
    yield source
    source.close()


def read(memory: mooncake.MooncakeMemory, offer: Offer, into: Path, *stretches: tuple[int, int]) -> bytes:
    descriptor = os.open(into, os.O_CREAT | os.O_RDWR)
    try:
        os.ftruncate(descriptor, offer.num_bytes)
        for start, size in stretches:
            memory.read(offer, descriptor, start, size)
        return into.read_bytes()
    finally:
        os.close(descriptor)


def test_the_bytes_of_another_process_arrive_whole_or_in_stretches(
    memory: mooncake.MooncakeMemory, there: Source, data: bytes, tmp_path: Path
) -> None:
    assert read(memory, there.offer, tmp_path / "whole", (0, len(data))) == data
    some = read(memory, there.offer, tmp_path / "some", (MIB, MIB), (4 * MIB, len(data) - 4 * MIB))
    assert some == bytes(MIB) + data[MIB : 2 * MIB] + bytes(2 * MIB) + data[4 * MIB :]


def test_what_was_withdrawn_cannot_be_read(memory: mooncake.MooncakeMemory, there: Source, tmp_path: Path) -> None:
    there.withdraw()
    with pytest.raises(OSError, match=rf"transfer from {there.offer.session} failed"):
        read(memory, there.offer, tmp_path / "late", (0, there.offer.num_bytes))


def test_a_source_that_was_killed_is_an_error(
    memory: mooncake.MooncakeMemory, there: Source, data: bytes, tmp_path: Path
) -> None:
    assert read(memory, there.offer, tmp_path / "before", (0, len(data))) == data
    os.kill(there.process.pid or 0, signal.SIGKILL)
    there.process.join()
    with pytest.raises(OSError, match=rf"transfer from {there.offer.session} failed"):
        read(memory, there.offer, tmp_path / "after", (0, len(data)))


def test_an_offer_leaves_no_descriptor_behind(memory: mooncake.MooncakeMemory, data: bytes, tmp_path: Path) -> None:
    memory.withdraw(memory.offer(tmp_path / "file").number)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        memory.withdraw(memory.offer(tmp_path / "file").number)
        with pytest.raises(FileNotFoundError):
            memory.offer(tmp_path / "none")
    assert len(os.listdir("/proc/self/fd")) == before
