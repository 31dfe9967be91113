"""Tools made of functions: `@tool` on a function makes it callable by name, with the schema of its signature.

    @tool
    async def convert(amount: float, to: Literal["EUR", "USD"] = "EUR") -> str:
        \"\"\"Converts an amount of yen.

        Args:
            amount: Yen.
            to: Currency of the result.
        \"\"\"

Types, defaults and limits (`Annotated[int, Field(ge=0)]`) become the JSON schema; the docstring's first part is the
description, and its section `Args:` describes the arguments.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError, create_model
from pydantic_core import to_json

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.settings import Settings
from flexmarl.tools.calculator import Calculator
from flexmarl.tools.interface import Observation, Tool, ToolContext


class Refusal(Exception):
    """Raised by a tool's function for a mistake of the model, which reads the text. Other errors fail the episode."""


class FunctionTool(Settings):
    """Base of the settings classes that `@tool` makes of functions. The function has no state per episode.

    A plain function runs in a thread, and several calls may run at once; a coroutine function, and one that is `pure`,
    runs in the event loop. What it returns is the observation: an Observation, a text, or any other value as JSON.
    """

    function: ClassVar[Callable[..., Any]]
    arguments: ClassVar[TypeAdapter[Any]]
    """Checks arguments against the signature."""
    pure: ClassVar[bool] = False
    """True for `@tool(pure=True)`: it computes in microseconds and waits for nothing, so simulations call it, too."""
    schema_of_arguments: ClassVar[Mapping[str, Any]]
    type: str
    name: str = Field(min_length=1)
    description: str
    max_parallel: int | None = Field(default=None, ge=1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the function and the settings. The class is made anew, since no module has it under a name."""
        return _received, (type(self).function, self.type, self.model_dump())

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the signature."""
        return self.schema_of_arguments

    def open(self, context: ToolContext) -> AbstractAsyncContextManager["FunctionTool"]:
        """The tool itself."""
        return nullcontext(self)

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Calls the function. Arguments that do not fit its signature give an observation that names them."""
        kind = type(self)
        try:
            positional, named = kind.arguments.validate_python(dict(arguments))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False)]
            return Observation("; ".join(faults), ok=False)
        try:
            if inspect.iscoroutinefunction(kind.function):
                result = await kind.function(*positional, **named)
            elif kind.pure:
                result = kind.function(*positional, **named)
            else:
                result = await asyncio.to_thread(kind.function, *positional, **named)
        except Refusal as refusal:
            return Observation(str(refusal), ok=False)
        if isinstance(result, Observation):
            return result
        if isinstance(result, bytes | bytearray):
            raise EpisodeError(f"the tool {self.name!r} returned bytes; return a text or a value that JSON can hold")
        return Observation(result if isinstance(result, str) else to_json(result).decode())


def is_pure(tool: Tool) -> bool:
    """True for a tool that only computes and never waits, so that it can be called in virtual time."""
    return isinstance(tool, Calculator) or (isinstance(tool, FunctionTool) and tool.pure)


@lru_cache(maxsize=1024)
def tool_of_function(function: Callable[..., Any], name: str) -> type[FunctionTool]:
    """The settings class of a function. Raises ConfigError if its signature or its docstring is not that of a tool."""
    where = f"the tool '{name}'"
    pure = getattr(function, "pure", False)
    if pure and inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{where}: pure=True is for a function that waits for nothing; write it with `def`, not `async`"
        )
    if not (function.__doc__ or "").strip():
        raise ConfigError(f"{where}: its function has no docstring; say in it what goes in and what comes out")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"{where}: '{parameter}' has no name that a model can give; name each argument")
        if parameter.annotation is parameter.empty:
            raise ConfigError(f"{where}: the argument '{parameter.name}' has no type; annotate it")

    @wraps(function)
    def arguments(*positional: Any, **named: Any) -> Any:
        return positional, named

    checked: Any = arguments
    try:
        adapter = TypeAdapter[Any](checked)
        schema = _without_titles(adapter.json_schema())
    except Exception as error:  # pydantic has many errors for types that have no schema.
        raise ConfigError(f"{where}: no JSON schema of its signature: {str(error).splitlines()[0]}") from error
    description, described = _docstring(function)
    for argument, text in described.items():
        if argument not in schema["properties"]:
            raise ConfigError(f"{where}: its docstring describes an argument '{argument}' that it does not have")
        schema["properties"][argument].setdefault("description", text)
    made = create_model(
        name,
        __base__=FunctionTool,
        __doc__=description,
        __module__=function.__module__,
        type=(Literal[name], name),  # type: ignore[valid-type]
        name=(str, Field(default=name, min_length=1)),
        description=(str, description),
    )
    made.__qualname__ = function.__qualname__
    # As a static method: a function that a class holds would get the tool as its first argument.
    made.function = staticmethod(function)
    made.arguments, made.schema_of_arguments, made.pure = adapter, schema, pure
    return made


def _docstring(function: Callable[..., Any]) -> tuple[str, Mapping[str, str]]:
    """Description of the function, and of its arguments by name."""
    text = inspect.getdoc(function) or ""
    if "Args:" not in text:
        return " ".join(text.partition("\nReturns:")[0].split()), {}
    # Only now, because it takes a second to import.
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    description, arguments, _ = parse_google_format_docstring(text)
    return " ".join((description or "").split()), arguments or {}


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """A schema without pydantic's titles, which only repeat the names. `names`: its keys are names of arguments."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=key in ("properties", "$defs") and not names)
        for key, value in schema.items()
        if names or key != "title"
    }


def _received(function: Callable[..., Any], name: str, values: Mapping[str, Any]) -> FunctionTool:
    return tool_of_function(function, name).model_validate(values)
