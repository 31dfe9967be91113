"""Overrides from Python: a value by dotted key means what it is, whatever characters it has."""

from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.config import load_run
from flexmarl.config.load import as_override, parse_override
from flexmarl.errors import ConfigError

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXTS
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(SCALARS | NUMBERS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8)


@given(value=VALUES)
def test_a_value_written_as_an_override_is_read_back(value):
    assert parse_override(as_override("a.b", value)) == (["a", "b"], value)


def test_paths_tuples_and_enums_are_what_they_stand_for():
    class Colour(Enum):
        RED = "red"

    value = {"path": Path("a b"), "pair": (1, 2), "colour": Colour.RED}
    assert parse_override(as_override("a", value))[1] == {"path": "a b", "pair": [1, 2], "colour": "red"}


@pytest.mark.parametrize("value", [object(), float("nan"), float("inf"), {1, 2}, b"x", "\ud800", "\0"])
def test_a_value_that_no_setting_can_have_is_named(value):
    with pytest.raises(ConfigError, match=r"override 'team\.x"):
        parse_override(as_override("team.x", value))


def test_a_key_with_an_equals_sign_is_refused():
    with pytest.raises(ConfigError, match="dotted key without '='"):
        as_override("a=b", 1)


def test_values_and_texts_give_the_same_settings_and_the_same_errors(small_run):
    asked = {"batch.groups": 8, "name": "other", "evaluate": {"tasks": 0}}
    texts = ["batch.groups=8", "name=other", "evaluate={tasks: 0}"]
    assert load_run(small_run, asked) == load_run(small_run, texts)
    errors = []
    for overrides in ({"batch.groups": "many"}, ["batch.groups=many"]):
        with pytest.raises(ConfigError) as wrong:
            load_run(small_run, overrides)
        errors.append(str(wrong.value))
    assert errors[0] == errors[1]
    assert "batch.groups" in errors[0]
