"""An update that ruins the weights ends the run, and what is served and saved is what was there before it."""

import subprocess
import sys
from pathlib import Path

import yaml

from flexmarl.events.journal import read_journal
from flexmarl.events.training_events import Published

FLEXMARL = (sys.executable, "-c", "from flexmarl.cli import main; main()")


def test_after_an_update_that_ruins_the_weights_the_checkpoints_are_those_before_and_the_last_is_named(
    small_run: Path, tmp_path: Path
) -> None:
    def train(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*FLEXMARL, "train", *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert train(str(small_run), "steps=1", "evaluate.tasks=0").returncode == 0
    (folder,) = tmp_path.glob("runs/*")
    good = {file: file.read_bytes() for file in folder.glob("checkpoints/**/*") if file.is_file()}
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["policies"]["one"]["training"]["optimizer"]["learning_rate"] = 1e38
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    failed = train(str(folder / "config.yaml"), "steps=3", "--resume", str(folder))
    assert failed.returncode == 1
    assert "policy 'one' at version 1: after update 2 these weights are not finite" in failed.stderr
    assert "training.optimizer.learning_rate, 1e+38" in failed.stderr
    assert f"Last good checkpoint: {folder / 'checkpoints' / 'step-00001'}" in failed.stderr
    assert {file: file.read_bytes() for file in folder.glob("checkpoints/**/*") if file.is_file()} == good
    published = [event.version for event in read_journal(folder / "journal.jsonl") if isinstance(event, Published)]
    assert max(published) == 1
