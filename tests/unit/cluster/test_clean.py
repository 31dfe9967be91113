"""`flexmarl clean` removes what a dead run left, and nothing of a live one."""

from pathlib import Path
from typing import Any

from flexmarl.cli.runs import cleaned


def test_what_a_live_run_holds_is_not_touched(doomed: Any, tmp_path: Path) -> None:
    assert list(cleaned(tmp_path / "root", dry_run=False)) == []
    assert doomed.worker.is_running()
    assert doomed.shared.is_dir()


def test_what_a_dead_run_left_is_named_and_then_removed(doomed: Any, tmp_path: Path) -> None:
    doomed.warden.kill()
    doomed.controller.kill()
    doomed.controller.wait()
    expected = ["what the run doomed left:", f"  process {doomed.worker.pid}", doomed.folder, doomed.shared]
    for dry_run in (True, True, False):
        said = list(cleaned(tmp_path / "root", dry_run=dry_run))
        assert all(str(thing) in line for thing, line in zip(expected, said, strict=True)), said
    assert list(cleaned(tmp_path / "root", dry_run=False)) == []
    assert not doomed.folder.exists()
    assert not doomed.shared.exists()
