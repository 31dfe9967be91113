"""The last line of a benchmark is strict JSON, whatever was measured."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import json_line


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


@given(st.dictionaries(st.text(), st.floats()))
def test_a_figure_that_is_not_finite_is_null(figures: dict[str, float]) -> None:
    found = json.loads(json_line(figures), parse_constant=refuse)["figures"]
    assert set(found) == set(figures)
    for name, value in figures.items():
        assert found[name] == (round(value, 3) if math.isfinite(value) else None)
