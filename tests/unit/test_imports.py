"""Imports of large packages: without collections, with them again afterwards, and how torch's threads wait."""

import asyncio
import gc
import os
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from flexmarl.cluster.host import Host, answer, packed
from flexmarl.imports import Lazy, collected_later

ROOT = Path(__file__).parents[2]


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


COMMAND = (
    "import sys; from flexmarl.__main__ import main; sys.argv = ['flexmarl', 'check', 'examples/relay/cpu.yaml']; "
)
STARTS = {
    "the command line": COMMAND + "main()",
    "a resident": "from flexmarl.cluster.host import Host; Host(threads=2); import torch",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("chosen", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_torch_sleep_while_they_wait_unless_told_otherwise(
    start: str, chosen: str | None, expected: str
) -> None:
    """By what OpenMP prints when torch loads it."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": chosen} if chosen else {})
    done = subprocess.run(
        [sys.executable, "-c", STARTS[start]], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"OMP_WAIT_POLICY = '(\w+)'", done.stderr) == [expected]
