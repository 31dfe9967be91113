"""The small config in a file."""

from pathlib import Path

import pytest

from tests.unit.config.configs import MINIMAL


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path
