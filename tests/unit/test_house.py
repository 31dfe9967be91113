"""The checks of `checks/house.py` that read imports."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "checks"))
from house import circles, impure_rules


def rule(line: str, docstring: str = "Decides what is next.") -> list[str]:
    return list(
        impure_rules("credit/next.py", ast.parse(f'"""{docstring}"""\nfrom typing import TYPE_CHECKING\n{line}'))
    )


@pytest.mark.parametrize(
    "line",
    [
        "import asyncio",
        "from time import monotonic",
        "import torch.nn as nn",
        "def f():\n    import ray",
        "try:\n    import http.client\nfinally:\n    pass",
    ],
)
def test_a_rule_that_imports_a_clock_a_device_or_the_network_is_named(line: str) -> None:
    (breach,) = rule(line)
    assert breach.startswith("credit/next.py:")
    assert not rule(line, docstring="Runs what is next.")


@pytest.mark.parametrize("line", ["import math", "if TYPE_CHECKING:\n    import torch", "import torchlike"])
def test_a_rule_may_import_what_computes_and_types(line: str) -> None:
    assert not rule(line)


def test_a_circle_of_imports_is_named_and_types_and_late_imports_make_none() -> None:
    low, high = "from flexmarl.high import f", "from flexmarl import low"
    found = list(circles({"low.py": ast.parse(low), "high.py": ast.parse(high)}))
    assert len(found) == 1
    assert "flexmarl.low" in found[0]
    for harmless in (f"if TYPE_CHECKING:\n    {high}", f"def f():\n    {high}"):
        assert not list(circles({"low.py": ast.parse(low), "high.py": ast.parse(harmless)}))
