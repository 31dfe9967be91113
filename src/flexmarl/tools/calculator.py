"""Calculator for exact integers: its own grammar, its own limits, nothing evaluated by Python."""

import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Literal, NoReturn

from pydantic import Field

from flexmarl.settings import Settings
from flexmarl.tools.interface import Observation, ToolContext

_TOKEN = re.compile(r"\s*([0-9]+|\*\*|//|[-+*/%()])")
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 4}
_UNARY_BINDING = 3
"""Between `*` and `**`, as in Python: -2**2 is -4."""


class _Mistake(Exception):
    """The expression cannot be computed; the text goes back to the model."""


class Calculator(Settings):
    """Computes `+ - * / // % **`, parentheses and unary signs on integers, as Python does; `/` only where it is exact.

    >>> Calculator().compute("12*(3+4)").text, Calculator().compute("7/2").shown
    ('84', 'error: 7/2 is no integer; use // or %')
    """

    type: Literal["calculator"] = "calculator"
    name: str = Field(default="calculator", min_length=1)
    """Name that agents call it by."""
    description: str = "Computes an integer expression with + - * / // % ** and parentheses, e.g. 12*(3+4)."
    """Description that a model may be given."""
    max_parallel: int | None = Field(default=None, ge=1)
    """Calls of tools with this name that run at once in the run; others wait. null: no bound."""
    max_chars: int = Field(default=256, ge=1, le=4096)
    """Longest expression."""
    max_digits: int = Field(default=256, ge=1, le=4000)
    """Largest number, intermediate ones included. Python itself refuses to print more than 4300 digits."""
    max_depth: int = Field(default=50, ge=1, le=100)
    """Deepest nesting of parentheses, signs and exponents. Keeps the recursion far below Python's limit."""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """One text, `expression`."""
        expression = {"type": "string", "description": "The expression, e.g. 12*(3+4)."}
        return {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}

    def open(self, context: ToolContext) -> AbstractAsyncContextManager["Calculator"]:
        """The calculator itself, which has no state."""
        return nullcontext(self)

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Computes `expression`."""
        return self.compute(arguments["expression"])

    def compute(self, expression: str) -> Observation:
        """The same, without an event loop. No expression makes it raise or takes more than milliseconds."""
        try:
            return Observation(str(_Evaluation(expression, self).value()))
        except _Mistake as mistake:
            return Observation(str(mistake), ok=False)


class _Evaluation:
    """One pass over one expression: precedence climbing, computing on the way."""

    def __init__(self, expression: str, limits: Calculator) -> None:
        self.limits = limits
        self.bound: int = 10**limits.max_digits
        self.tokens = self._split(expression)
        self.position = 0

    def _split(self, expression: str) -> list[str]:
        if len(expression) > self.limits.max_chars:
            raise _Mistake(f"the expression has {len(expression)} characters; {self.limits.max_chars} are allowed")
        expression = expression.rstrip()
        tokens, position = [], 0
        while position < len(expression):
            token = _TOKEN.match(expression, position)
            if token is None:
                raise _Mistake(
                    f"{expression[position:].lstrip()[0]!r} is not allowed; use integers and + - * / // % ** ( )"
                )
            tokens.append(token[1])
            position = token.end()
        return tokens

    def value(self) -> int:
        value = self._operation(0, 1)
        if self.position < len(self.tokens):
            self._unexpected()
        return value

    def _operation(self, binding: int, depth: int) -> int:
        """Value of the longest operation from here on whose operators bind tighter than `binding`."""
        if depth > self.limits.max_depth:
            raise _Mistake(f"nested more than {self.limits.max_depth} deep")
        left = self._operand(depth)
        while (operator := self._next()) in _BINDING and _BINDING[operator] > binding:
            self.position += 1
            # Right-associative: the right side of ** may itself be a **.
            right = self._operation(_BINDING[operator] - (operator == "**"), depth + 1)
            left = self._bounded(self._apply(operator, left, right))
        return left

    def _operand(self, depth: int) -> int:
        token = self._next()
        self.position += 1
        if token in ("+", "-"):
            value = self._operation(_UNARY_BINDING, depth + 1)
            return -value if token == "-" else value
        if token == "(":
            value = self._operation(0, depth + 1)
            if self._next() != ")":
                self._unexpected()
            self.position += 1
            return value
        if not token.isdigit():
            self.position -= 1
            self._unexpected()
        return self._bounded(int(token) if len(token) <= 4000 else self.bound)

    def _apply(self, operator: str, left: int, right: int) -> int:
        if operator == "+":
            return left + right
        if operator == "-":
            return left - right
        if operator == "*":
            return left * right
        if operator == "**":
            return self._power(left, right)
        if right == 0:
            raise _Mistake("division by zero")
        if operator == "//":
            return left // right
        if operator == "%":
            return left % right
        if left % right:
            raise _Mistake(f"{left}/{right} is no integer; use // or %")
        return left // right

    def _power(self, base: int, exponent: int) -> int:
        if exponent < 0:
            raise _Mistake("negative exponents are not allowed")
        if base in (-1, 0, 1):
            return base ** (exponent % 2 if base == -1 else min(exponent, 1))
        # |base| >= 2**(bits - 1), so this refuses before the power is computed, and never one that fits.
        if (abs(base).bit_length() - 1) * exponent >= self.bound.bit_length():
            self._too_large()
        return base**exponent

    def _bounded(self, value: int) -> int:
        if abs(value) >= self.bound:
            self._too_large()
        return value

    def _too_large(self) -> NoReturn:
        raise _Mistake(f"a number has more than {self.limits.max_digits} digits")

    def _next(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _unexpected(self) -> NoReturn:
        raise _Mistake(f"unexpected {self._next()!r}" if self._next() else "the expression ends too early")
