"""A full disk is noticed before it is written to."""

from pathlib import Path

import pytest

from flexmarl.cluster.own_folder import require_space
from flexmarl.errors import CheckpointError


def test_what_fits_is_silent_and_what_does_not_names_the_path_what_it_needs_what_is_free_and_what_to_do(
    tmp_path: Path,
) -> None:
    require_space(tmp_path, 1, "a byte")
    with pytest.raises(CheckpointError) as raised:
        require_space(tmp_path, 8 * 10**18, "the state of policy 'solver'")
    text = str(raised.value)
    assert text.startswith(f"no room for the state of policy 'solver' in {tmp_path}: it takes about 8e+09 GB, ")
    assert text.endswith(" GB are free; free some there, or lower checkpoint.keep or checkpoint.budget_gb")
