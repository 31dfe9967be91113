"""Every example in a docstring of the package is true."""

import doctest
import importlib

import pytest

from tests.calls import a_call
from tests.docs.pages import ROOT

SOURCES = ROOT / "src"
MODULES = sorted(
    ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES.rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)
NAMES = {"a_call": a_call}
"""What examples use that their module does not import: a made-up event in place of ten lines."""


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_are_true(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module), extraglobs=NAMES).failed == 0
