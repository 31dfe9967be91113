"""The base of every settings class. It refuses unknown keys, and values that are not of the type they look like.

| a field of type | takes                                         | refuses                                      |
|-----------------|-----------------------------------------------|----------------------------------------------|
| int             | 8, 8.0 and 1e3, which are whole               | true, '8' (a text), 0.5, more than 64 bits   |
| float           | 0.5, 8                                        | true, '0.5' (a text), inf, nan               |
| bool            | true, false (in YAML also yes, no, on, off)   | 1, 0, 'true' (a text)                        |
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError

LEAST, MOST = -(2**63), 2**63 - 1
"""Range of any whole number: SQLite, numpy and torch take no more."""


def _exact(schema: Any) -> Any:
    """A pydantic schema in which a field for numbers or bools, at any depth, takes no other type."""
    if isinstance(schema, list):
        return [_exact(item) for item in schema]
    if not isinstance(schema, dict) or schema.get("function") in _CHECKS:  # The latter: nested settings, done.
        return schema
    inner: dict[str, Any] = schema
    match inner.get("type"):
        case "bool":
            return inner | {"strict": True}
        case "int":
            bounds = {} if inner.keys() & {"le", "lt"} else {"le": MOST}
            bounds |= {} if inner.keys() & {"ge", "gt"} else {"ge": LEAST}
            return {"type": "function-before", "function": _CHECKS[0], "schema": inner | bounds}
        case "float":
            return {"type": "function-before", "function": _CHECKS[1], "schema": inner}
        case _:
            return {key: value if key in _NO_SCHEMA else _exact(value) for key, value in inner.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("int_type")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise PydanticKnownError("float_type")
    return value


_CHECKS = ({"type": "no-info", "function": _whole}, {"type": "no-info", "function": _number})
_NO_SCHEMA = ("default", "metadata", "serialization", "function")
"""Keys of a schema whose values are not schemas."""


class Settings(BaseModel):
    """Settings of one part: frozen, without unknown keys, with finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema that pydantic makes, except that fields for numbers take numbers only."""
        return _exact(handler(source))
