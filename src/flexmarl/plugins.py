"""Tables of what a config may name: built in, registered by a decorator, or offered by an installed package.

    @scorer("close_enough")              Registry: functions by name
    def close_enough(answer, reference): ...

    @tool                                SettingsTable: settings classes by the default of their field `type`;
    class Clock(Settings): ...           some tables make such a class of a function

A table grows in two ways (docs/howto/plugins.md):

code           the decorators of a file that a config lists under `code`. `load_code` imports it before the config is
               checked, and in every process of the run.
entry points   those of an installed package in the table's group, e.g. `flexmarl.tools`. One is imported when a config
               names it, and not before.

Two things of one kind cannot have one name, whether built in, registered or offered.
"""

import difflib
import hashlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar, overload

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, SchemaValidator, core_schema

from flexmarl.errors import ConfigError, count_as_users, described
from flexmarl.settings import Settings

T = TypeVar("T")
D = TypeVar("D")


class Entry(NamedTuple):
    """One thing of a table."""

    thing: Any
    place: str
    """`file:line` of its decorator, or the package that offers it."""
    typed_in: bool = False
    """True if its code is in no file, as that of a notebook's cell."""

    @property
    def definition(self) -> tuple[str, str]:
        """File and name of its code. A file may be imported twice, also after a change, and a cell be run again."""
        file = "" if self.typed_in else self.place.rpartition(":")[0]
        return file, "" if self.typed_in else getattr(self.thing, "__qualname__", self.place)


class NameTable(ABC, Generic[T]):
    """Things of one kind by name."""

    def __init__(self, kind: str, *, setting: str, group: str, built_in: Mapping[str, str] = {}) -> None:
        """`setting`: the config key that names a thing, for errors. `group`: the last word of the entry point group.

        `built_in`: the path `module:name` of each thing that is imported when it is first asked for.
        """
        self.kind = kind
        self.group = f"flexmarl.{group}"
        self.built_in = built_in
        self._setting = setting
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[str]:
        """All names: built-in ones first, then the others, sorted. Imports nothing."""
        yield from self.built_in
        yield from sorted({*self._entries, *(offer.name for offer in self._offers())} - {*self.built_in})

    def __getitem__(self, name: str) -> T:
        """The thing of that name.

        Raises ConfigError with the nearest name and all names if there is none, with both places if there are two, with
        the package and the reason if it cannot be imported.
        """
        for offer in self._offers().select(name=name):
            self._add(name, self._load(offer))
        if name in self._entries:
            return self._entries[name].thing
        if name in self.built_in:
            return pkgutil.resolve_name(self.built_in[name])
        near = difflib.get_close_matches(name, list(self), n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        known = ", ".join(self) or "none; list the file that has it under `code`"
        raise ConfigError(f"{self._setting}: there is no {self.kind} '{name}'; {hint}there are: {known}")

    def _add(self, name: str, entry: Entry) -> None:
        """Adds a thing. Raises ConfigError naming both places if another thing has its name."""
        there = self._entries.get(name)
        if there is None and name in self.built_in:
            there = Entry(None, f"flexmarl's own ({self.built_in[name]})")
        if there is not None and entry.thing is not there.thing and entry.definition != there.definition:
            raise ConfigError(
                f"two {self.kind}s are called '{name}': {there.place} and {entry.place}; give yours another name"
            )
        self._entries[name] = entry

    def _offers(self) -> EntryPoints:
        return _installed(self.group, tuple(sys.path))

    def _load(self, offer: EntryPoint) -> Entry:
        """Imports what a package offers. Its module may register it by a decorator, too."""
        package = f"the package {offer.dist.name} {offer.dist.version}" if offer.dist else "an installed package"
        try:
            thing = self._checked(offer.name, offer.load())
            count_as_users(sys.modules[offer.module.partition(".")[0]])
        except Exception as error:  # Whatever a foreign module raises while it is imported.
            raise ConfigError(
                f"the {self.kind} '{offer.name}' of {package} cannot be used ({offer.value}): {described(error)}"
            ) from error
        there = self._entries.get(offer.name)
        return there if there and there.thing is thing else Entry(thing, f"{package} ({offer.value})")

    def _checked(self, name: str, thing: Any) -> Any:
        """The thing. Raises ConfigError if it cannot be of this kind and name."""
        if not callable(thing):
            raise ConfigError(f"the {self.kind} '{name}' must be a function, got {thing!r}")
        return thing


@lru_cache(maxsize=64)
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Entry points of a group, of all packages on the search path."""
    return entry_points(group=group)


class Registry(NameTable[T]):
    """Functions of one kind by name."""

    def register(self, name: str) -> Callable[[D], D]:
        """Decorator that registers a function. Raises ConfigError if another one has the name."""

        def add(function: D) -> D:
            self._add(name, _defined_here(self._checked(name, function)))
            return function

        return add


class SettingsTable(NameTable[type[T]]):
    """Settings classes of one kind by the default of their field `type`; as metadata, the pydantic type of a field.

    AnyTool = Annotated[Tool, TOOLS]: any settings of a class in TOOLS, chosen by `type`. The class is looked up when a
    value is validated, so that the table may grow. Errors and their locations are those of pydantic's tagged unions.
    """

    def __init__(
        self,
        kind: str,
        *,
        setting: str,
        group: str,
        interface: Sequence[type],
        built_in: Mapping[str, str],
        of_function: Callable[[Callable[..., Any], str], type[Settings]] | None = None,
    ) -> None:
        """`interface`: base classes of which one must be a class's base, or Protocols of which one must be met.

        `of_function`: makes the settings class of a function and a name, if functions may be registered too.
        """
        super().__init__(kind, setting=setting, group=group, built_in=built_in)
        self._interface = interface
        self._of_function = of_function
        self._validators: dict[type, SchemaValidator] = {}

    @overload
    def register(self, thing: str | None = None, *, pure: bool = False) -> Callable[[D], D]: ...

    @overload
    def register(self, thing: D) -> D: ...

    def register(self, thing: Any = None, *, pure: bool = False) -> Any:
        """Decorator that registers a settings class, or a function if the table takes functions.

        Given a name, or `pure`, it is a decorator for a function of that name. `pure` is for a function that computes
        in microseconds and waits for nothing; `of_function` finds it as the function's attribute `pure`. Raises
        ConfigError if the thing cannot be of this kind, or if another one has its name.
        """
        if thing is None or isinstance(thing, str):
            return lambda function: self._registered(function, thing, pure=pure)
        return self._registered(thing)

    def _registered(self, thing: Any, name: str | None = None, *, pure: bool = False) -> Any:
        function = self._of_function is not None and inspect.isfunction(thing)
        if pure and not function:
            raise ConfigError(f"the {self.kind} {thing!r}: pure=True is for functions; leave it out")
        if pure:
            vars(thing)["pure"] = True
        called = (thing.__name__ if function else _type_of(thing)) if name is None else name
        self._add(called, _defined_here(self._checked(called, thing)))
        return thing

    def _checked(self, name: str, thing: Any) -> Any:
        what = f"the {self.kind} '{name}'"
        if self._of_function is not None and inspect.isfunction(thing):
            return self._of_function(thing, name)
        if not inspect.isclass(thing) or not issubclass(thing, Settings):
            raise ConfigError(f"{what} must be a subclass of flexmarl.settings.Settings, got {thing!r}")
        if _type_of(thing) != name or not name:
            raise ConfigError(
                f"{what}: its class {thing.__qualname__} must have the field `type: Literal['{name or 'my_name'}'] = "
                f"'{name or 'my_name'}'`, got {_type_of(thing)!r}"
            )
        lacking = [_lacks(thing, interface) for interface in self._interface]
        if all(lacking):
            raise ConfigError(f"{what}: its class {thing.__qualname__} {', or '.join(lacking)}")
        return thing

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a field that holds settings of any class in the table."""
        return core_schema.no_info_plain_validator_function(self._validated)

    def _validated(self, value: Any) -> Any:
        """The settings that a mapping with a `type` stands for, or that were given as such."""
        if not isinstance(value, Mapping | BaseModel):
            raise PydanticKnownError("model_attributes_type")
        name = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        if name is None:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'type'"})
        if name not in list(self):
            known = ", ".join(map(repr, self))
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": "'type'", "tag": str(name), "expected_tags": known}
            )
        try:
            settings = self[name]
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if settings not in self._validators:
            self._validators[settings] = _validator(name, settings)
        return self._validators[settings].validate_python(value)


def _validator(name: str, settings: Any) -> SchemaValidator:
    """Validates as a tagged union with one member does: the name is in the location of an error."""
    settings.model_rebuild()
    return SchemaValidator(core_schema.tagged_union_schema({name: settings.__pydantic_core_schema__}, "type"))


def _type_of(settings: Any) -> str:
    """The default of the class's field `type`; "" if it has none."""
    field = getattr(settings, "model_fields", {}).get("type")
    return field.default if field is not None and isinstance(field.default, str) else ""


def _lacks(settings: type[BaseModel], interface: Any) -> str:
    """The members of an interface that a class lacks, as the end of a sentence; "" if none."""
    if not getattr(interface, "_is_protocol", False):
        missing = sorted(getattr(settings, "__abstractmethods__", ()))
        if not issubclass(settings, interface):
            return f"must be a subclass of {interface.__module__}.{interface.__qualname__}"
    else:
        there = {name for base in settings.__mro__ for name in vars(base)} | settings.model_fields.keys()
        protocols = [base for base in interface.__mro__ if getattr(base, "_is_protocol", False)]
        members = {name for base in protocols for name in (*vars(base), *base.__annotations__)}
        missing = sorted(name for name in members - there if not name.startswith("_") or name == "__call__")
    return f"lacks {', '.join(missing)} of {interface.__module__}.{interface.__qualname__}" if missing else ""


def _defined_here(thing: Any) -> Entry:
    """An entry whose place is the code outside this file that called into it: a decorator's line."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return Entry(thing, f"{file}:{frame.f_lineno}", typed_in=not Path(file).is_file())


def load_code(path: str | Path) -> ModuleType:
    """Imports a user's file by its path, once per process. A config can then name what the file registers.

    Raises ConfigError that names the file and the line if that fails.
    """
    path = Path(path).resolve()
    # The module is named by its path: two files called team.py are two modules, and what they define can be pickled.
    name = f"flexmarl_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(
            f"code: {str(path)!r} is no Python file; give the path of a .py file. A relative one starts from `base`, "
            f"the folder of the config that was given, not of one that it extends"
        )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ConfigError(f"code: {path}:{_line(error, path)}: {described(error)}") from error
    return module


def _line(error: Exception, path: Path) -> int:
    """The last line of the file through which the error passed; 1 if there is none."""
    if isinstance(error, SyntaxError):
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if frame.filename == str(path)), 1)


class CodeFiles(tuple[Path, ...]):
    """Paths of a user's files. Unpickling them imports the files.

    What is pickled behind them in one tuple may refer to what the files define: a pickle is read from front to back.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (tuple(map(str, self)),)


def _imported(paths: Sequence[str]) -> CodeFiles:
    for path in paths:
        load_code(path)
    return CodeFiles(map(Path, paths))
