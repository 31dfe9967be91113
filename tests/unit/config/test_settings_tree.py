"""Laws of every settings class that a config can hold."""

import ast
import inspect
import math
import subprocess
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from flexmarl.config import RunSettings
from flexmarl.credit import ESTIMATORS
from flexmarl.plugins import SettingsTable
from flexmarl.settings import Settings
from flexmarl.simulator.plan import Distribution


def below(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, FieldInfo):
        annotation = Annotated[annotation.annotation, "", *annotation.metadata]
    if isinstance(annotation, SettingsTable):
        for name in annotation.built_in:
            yield from below(annotation[name])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from below(field)
    for argument in typing.get_args(annotation):
        yield from below(argument)


TREE = sorted(set(below(RunSettings)), key=lambda settings: settings.__name__)


def documented(settings: type[BaseModel]) -> set[str]:
    """Fields followed by a docstring, in the class or the one it comes from."""
    found: set[str] = set()
    for origin in settings.__mro__:
        if issubclass(origin, BaseModel) and origin is not BaseModel:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(origin))).body
            assert isinstance(body, ast.ClassDef)
            for field, said in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(said, ast.Expr):
                    found.add(ast.unparse(field.target))
    return found


def test_the_tree_is_walked():
    assert len(TREE) > 20
    assert {RunSettings, *(ESTIMATORS[name] for name in ESTIMATORS.built_in)} <= {*TREE}


@pytest.mark.parametrize("settings", TREE, ids=lambda settings: settings.__name__)
def test_a_settings_class_refuses_unknown_keys_cannot_change_and_says_what_each_key_means(settings):
    assert settings.model_config.get("extra") == "forbid"
    assert settings.model_config.get("frozen") is True
    assert settings.__doc__
    described = {name for name, field in settings.model_fields.items() if field.description}
    nested = {name for name, field in settings.model_fields.items() if any(True for _ in below(field))}
    assert set(settings.model_fields) - described - documented(settings) - nested - {"type"} == set()


def test_settings_need_neither_torch_nor_transformers():
    code = "import sys, flexmarl.cli; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_misspelt_key_is_told_before_torch_is_loaded(tmp_path: Path, command: str) -> None:
    (tmp_path / "run.yaml").write_text("stepps: 2\n")
    code = (
        f"import sys; from flexmarl.cli import main; sys.argv = ['flexmarl', '{command}', 'run.yaml']\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "stepps is not a setting (its value: 2); did you mean 'steps'?" in said.stderr
    assert "AssertionError" not in said.stderr


class Numbers(Settings):
    whole: int = 1
    some: tuple[int, ...] | int = 1
    bounded: int = Field(default=1, ge=1, le=9)
    real: float | None = None
    reals: Mapping[str, list[float]] = {}
    switch: bool = False
    word: str = ""


class Nested(Settings):
    numbers: Numbers = Numbers()
    by_name: Mapping[str, Numbers] = {}


NO_WHOLE = (True, "1", "1.0", "", 0.5, 10**23, -(10**23), math.inf, math.nan, None, [1])
NO_REAL = (True, "1", "1e-3", math.inf, -math.inf, math.nan, [1.0])
NO_SWITCH = (1, 0, 1.0, "true", "yes", "", None)


@pytest.mark.parametrize(
    ("field", "refused"),
    [("whole", NO_WHOLE), ("bounded", (*NO_WHOLE, 10)), ("real", NO_REAL), ("switch", NO_SWITCH), ("word", (1, True))],
)
def test_a_value_that_only_looks_right_is_refused_at_any_depth(field, refused):
    for value in refused:
        for config in ({"numbers": {field: value}}, {"by_name": {"a": {field: value}}}):
            with pytest.raises(ValidationError, match=field):
                Nested.model_validate(config)


def test_a_value_that_only_looks_right_is_refused_inside_of_lists_mappings_and_alternatives():
    for config in ({"some": [True]}, {"some": True}, {"some": "1"}, {"reals": {"a": [1.0, math.nan]}}):
        with pytest.raises(ValidationError):
            Numbers.model_validate(config)


def test_a_whole_number_may_be_written_as_a_float():
    assert Numbers.model_validate({"whole": 1e3, "some": [8.0], "real": 2}) == Numbers(whole=1000, some=(8,), real=2.0)


def takes(annotation: Any, kind: type) -> bool:
    """Whether a plain value of the kind is one of the alternatives."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(takes(argument, kind) for argument in typing.get_args(annotation))
    return annotation is kind


@pytest.mark.parametrize("settings", TREE, ids=lambda settings: settings.__name__)
def test_every_default_that_a_run_folder_says_is_read_as_itself(settings):
    fields: dict[str, Any] = {
        name: (field.annotation, field) for name, field in settings.model_fields.items() if not field.is_required()
    }
    alone = create_model("Alone", __base__=Settings, **fields)
    assert alone.model_validate(alone().model_dump(mode="json")) == alone()


@pytest.mark.parametrize("settings", TREE, ids=lambda settings: settings.__name__)
def test_every_number_of_every_settings_class_is_a_finite_number_and_no_truth_value(settings):
    assert issubclass(settings, Settings)
    for name, field in settings.model_fields.items():
        odd: list[object] = [True, "1", math.inf, math.nan] if takes(field.annotation, float) else []
        if (settings, name) == (Distribution, "cap"):
            odd.remove(math.inf)  # Run folders of older versions say so for no cap.
        odd += [True, "1", 10**23] if takes(field.annotation, int) else []
        odd += [1, "true"] if takes(field.annotation, bool) else []
        for value in odd:
            if type(value) is str and takes(field.annotation, str):
                continue
            with pytest.raises(ValidationError) as error:
                settings.model_validate({name: value})
            assert any(detail["loc"][:1] == (name,) for detail in error.value.errors()), (name, value)
