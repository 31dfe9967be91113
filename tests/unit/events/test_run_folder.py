from datetime import datetime

import pytest

from flexmarl.errors import ConfigError
from flexmarl.events.run_folder import RunFolder, make_run_folder

NOON = datetime(2026, 1, 31, 12, 0, 5)


def test_a_run_gets_a_folder_of_its_own(tmp_path):
    folder = make_run_folder(tmp_path / "runs", "math_team", NOON)
    assert folder.path == tmp_path / "runs" / "math_team-20260131-120005"
    assert folder.checkpoints.is_dir()
    assert folder == RunFolder(folder.path)
    names = [folder.config, folder.journal, folder.metrics, folder.tensorboard, folder.summary, folder.curve]
    names += [folder.timeline, folder.store]
    assert [path.name for path in names] == [
        "config.yaml", "journal.jsonl", "metrics.jsonl", "tensorboard", "summary.json", "curve.png",
        "timeline.json", "experience.sqlite",
    ]  # fmt: skip


def test_two_runs_of_one_second_do_not_share(tmp_path):
    folders = [make_run_folder(tmp_path, "a", NOON).path.name for _ in range(3)]
    assert folders == ["a-20260131-120005", "a-20260131-120005-2", "a-20260131-120005-3"]


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "a/b", "a\n"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="name must be"):
        make_run_folder(tmp_path, name, NOON)
    assert list(tmp_path.iterdir()) == []
