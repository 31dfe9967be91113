"""Files of other nodes read by Mooncake's transfer engine, over TCP, between processes of this machine."""

import fcntl
import mmap
import multiprocessing
import os
import signal
import threading
import time
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
    offer = memory.offer(path, 7)
    told.send(offer)
    told.recv()
    memory.withdraw(7)
    memory.withdraw(7)
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


def test_a_source_that_is_killed_in_the_middle_is_an_error(memory: mooncake.MooncakeMemory, tmp_path: Path) -> None:
    size = 512 * MIB
    with (tmp_path / "large").open("wb") as large:
        os.posix_fallocate(large.fileno(), 0, size)
        os.pwrite(large.fileno(), b"end", size - 3)
    there = Source(tmp_path / "large")
    into = tmp_path / "half"

    def kill_when_bytes_arrive() -> None:
        while not into.exists() or not into.stat().st_size:
            time.sleep(0.001)
        with into.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as arriving:
            while arriving[0] != 1:
                time.sleep(0.001)
        os.kill(there.process.pid or 0, signal.SIGKILL)

    with (tmp_path / "large").open("r+b") as large:
        os.pwrite(large.fileno(), b"\x01", 0)
    killer = threading.Thread(target=kill_when_bytes_arrive)
    killer.start()
    try:
        with pytest.raises(OSError, match=rf"transfer from {there.offer.session} failed"):
            read(memory, there.offer, into, (0, size))
        with into.open("rb") as file:
            assert os.pread(file.fileno(), 1, 0) == b"\x01", "witness: it had begun"
            assert os.pread(file.fileno(), 3, size - 3) == bytes(3), "witness: it had not ended"
    finally:
        killer.join()
        there.close()


def descriptors_and_maps() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("/test_offers")


def test_offers_and_reads_leave_nothing_behind(
    memory: mooncake.MooncakeMemory, there: Source, data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_bytes(data)

    def all_of_it() -> None:
        memory.offer(tmp_path / "mine", 1)
        memory.withdraw(1)
        with pytest.raises(FileNotFoundError):
            memory.offer(tmp_path / "none", 2)
        with (tmp_path / "mine").open("rb") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            with pytest.raises(BlockingIOError):
                memory.offer(tmp_path / "mine", 3)
        wrong = Offer(session=there.offer.session, address=4096, num_bytes=len(data))
        with pytest.raises(OSError, match="failed"):
            read(memory, wrong, tmp_path / "wrong", (0, len(data)))

    all_of_it()
    before = descriptors_and_maps()
    for _ in range(5):
        all_of_it()
    assert descriptors_and_maps() == before


def test_a_file_that_is_offered_is_locked_until_it_is_withdrawn(
    memory: mooncake.MooncakeMemory, data: bytes, tmp_path: Path
) -> None:
    memory.offer(tmp_path / "file", 1)
    with (tmp_path / "file").open("rb") as writer:
        with pytest.raises(BlockingIOError):
            fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        memory.withdraw(1)
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_engine_that_cannot_listen_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = mooncake.engine_class()
    # Its real one fails so when there is no port left.
    monkeypatch.setattr(mooncake, "engine_class", lambda: type("Engine", (real,), {"initialize": lambda *_: -1}))
    with pytest.raises(ConfigError, match=r"'mooncake', whose engine cannot listen on 127\.0\.0\.1"):
        mooncake.MooncakeMemory(HERE)
