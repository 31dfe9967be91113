"""Laws of every settings class that a config can hold."""

import ast
import inspect
import subprocess
import sys
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from flexmarl.config import RunSettings


def below(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from below(field.annotation)
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
    assert RunSettings in TREE


@pytest.mark.parametrize("settings", TREE, ids=lambda settings: settings.__name__)
def test_a_settings_class_refuses_unknown_keys_cannot_change_and_says_what_each_key_means(settings):
    assert settings.model_config.get("extra") == "forbid"
    assert settings.model_config.get("frozen") is True
    assert settings.__doc__
    described = {name for name, field in settings.model_fields.items() if field.description}
    nested = {name for name, field in settings.model_fields.items() if any(True for _ in below(field.annotation))}
    assert set(settings.model_fields) - described - documented(settings) - nested - {"type"} == set()


def test_settings_need_neither_torch_nor_transformers():
    code = "import sys, flexmarl.cli; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
