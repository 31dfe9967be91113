"""Imports of large packages: without collections, and with them again afterwards."""

import asyncio
import gc
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from flexmarl.cluster.host import Host, answer, packed
from flexmarl.imports import Lazy, collected_later


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_go_on_after_the_block_as_before(enabled: bool) -> None:
    try:
        if not enabled:
            gc.disable()
        with suppress(ImportError), collected_later():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        gc.enable()


def test_collections_go_on_when_the_last_of_overlapping_blocks_has_ended() -> None:
    first, second = collected_later(), collected_later()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled(), "the other block has not ended"
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_collections_go_on_after_blocks_of_many_threads() -> None:
    found: list[bool] = []

    def enter_often() -> None:
        for _ in range(2_000):
            with collected_later():
                found.append(gc.isenabled())

    threads = [threading.Thread(target=enter_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(found)
    assert gc.isenabled()


SPY = "import gc\nenabled = gc.isenabled()\ndef make(): return gc.isenabled()\n"


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that knows whether it was imported while objects are collected."""
    (tmp_path / "spy_of_imports.py").write_text(SPY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spy_of_imports", raising=False)
    return "spy_of_imports"


def test_a_lazy_module_is_imported_without_collections(spy: str) -> None:
    assert Lazy(spy).enabled is False
    assert gc.isenabled()


def test_a_resident_imports_without_collections_and_is_made_with_them(spy: str) -> None:
    host, make = Host(), packed(import_module(spy).make)
    del sys.modules[spy]
    answer(asyncio.run(host.make_hosted(make)))
    assert host.hosted is True, "made while objects are collected"
    assert sys.modules[spy].enabled is False
