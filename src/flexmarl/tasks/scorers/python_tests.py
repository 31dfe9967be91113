"""Scorer of code by hidden tests: 1.0 if a function that the answer defines returns what every test expects.

    Task(..., scorer="python_tests", reference=reference_of("add", [((2, 3), 5), ((0, 0), 0)]))

The box of the answer is a fresh one and gets the arguments alone. What they should give stays in this process, which
compares it with the JSON that the box returns. So the answer may do in its box what it likes, forge replies included:
only a value that it computed counts.

An answer that ends its box, or is over its time without working, is tried again in another one. If that happens three
times in a row, and a control of ours holds in a fourth box, the answer did it, and its score is 0. If the control
fails, the machine is at fault, and there is no score.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexmarl.errors import EpisodeError
from flexmarl.events.safe_json import parse_json
from flexmarl.sandbox.interface import Box, Ended, Sandbox

RETURNED = "returned.json"
"""File in the box with what the tests returned."""
MOST_BYTES = 1 << 20
"""Longest such file; a longer one scores 0."""
TRIES = 3
"""Boxes that an answer may end. With fewer, two accidents in a row would be taken for a cheat."""
BUSY = 0.5
"""Share of its time that code over its time has worked; if it is less, the machine may have held it up."""
CLOSE = 1e-9
"""Difference at which a float is equal: to a whole number as it is, to another float also in relation to it."""
CALLS = """
def _call_the_function():
    import json
    returned = [{function}(*arguments) for arguments in json.loads({arguments!r})]
    with open({file!r}, "w") as file:
        json.dump(returned, file)
_call_the_function()
"""
"""The program that calls the function, in the session of the answer."""
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


class HiddenTest(BaseModel):
    """One call, and what it must return: values that JSON can hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arguments: list[Any]
    returns: Any


class HiddenTests(BaseModel):
    """The tests of a task, as the JSON of its reference."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: str = Field(pattern=r"^[A-Za-z_][A-Za-z_0-9]*$")
    """Name of the function that an answer defines."""
    tests: list[HiddenTest] = Field(min_length=1)
    timeout_s: float = Field(default=10.0, gt=0, le=600)
    """Longest time of all calls together, and of what the answer does before."""

    def passed(self, returned: Any) -> bool:
        """True if every test has what it expects."""
        return same([test.returns for test in self.tests], returned)


def reference_of(function: str, tests: Sequence[tuple[Sequence[Any], Any]], *, timeout_s: float = 10.0) -> str:
    """The reference of a task: arguments and what they must return, in pairs.

    >>> reference_of("double", [((2,), 4)], timeout_s=2.0)
    '{"function":"double","tests":[{"arguments":[2],"returns":4}],"timeout_s":2.0}'
    """
    listed = [HiddenTest(arguments=list(arguments), returns=returns) for arguments, returns in tests]
    return HiddenTests(function=function, tests=listed, timeout_s=timeout_s).model_dump_json()


@lru_cache(maxsize=1024)
def hidden_tests(reference: str) -> HiddenTests:
    """The tests that a reference names. Raises EpisodeError: a task without them cannot be scored."""
    try:
        return HiddenTests.model_validate_json(reference)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the reference"
        raise EpisodeError(
            f"python_tests: the reference {reference[:80]!r} holds no tests: {place}: {fault['msg']}; write "
            f'{{"function": "add", "tests": [{{"arguments": [2, 3], "returns": 5}}]}}'
        ) from None


def code_of(answer: str) -> str:
    """The code of an answer: its last fenced block, or all of it.

    >>> code_of("It is:\\n```python\\nx = 1\\n```\\nDone."), code_of("x = 1")
    ('x = 1\\n', 'x = 1')
    """
    blocks = _FENCED.findall(answer)
    return blocks[-1] if blocks else answer


def same(expected: Any, returned: Any) -> bool:
    """True if two JSON values are equal. Floats may differ in the last digits; True is not 1.

    >>> same([0.3, {"a": None}], [0.1 + 0.2, {"a": None}]), same(1, True), same(2, 2.0)
    (True, False, True)
    >>> same(0.3, 0.1 + 0.2), same(0.0, 0.1 + 0.2 - 0.3), same(10**12, 1e12 + 0.4)
    (True, True, False)
    """
    if isinstance(expected, bool) or isinstance(returned, bool):
        return expected is returned
    if isinstance(expected, list) and isinstance(returned, list):
        return len(expected) == len(returned) and all(map(same, expected, returned))
    if isinstance(expected, Mapping) and isinstance(returned, Mapping):
        return expected.keys() == returned.keys() and all(same(expected[key], returned[key]) for key in expected)
    if (
        isinstance(expected, int | float)
        and isinstance(returned, int | float)
        and float in map(type, (expected, returned))
    ):
        with suppress(OverflowError):  # A whole number that no float can hold equals none.
            return math.isclose(expected, returned, rel_tol=0 if isinstance(expected, int) else CLOSE, abs_tol=CLOSE)
        return False
    return type(expected) is type(returned) and expected == returned


class PythonTests:
    """The scorer `python_tests`."""

    def __call__(self, answer: str, reference: str) -> float:
        """Raises EpisodeError: code is scored in a box, which must be waited for."""
        raise EpisodeError("the scorer python_tests runs code in a box; write `await team.score(answer)`")

    def __reduce__(self) -> str:
        """Pickles by name, as a function."""
        return "python_tests"

    async def score_in_box(self, answer: str, reference: str, sandbox: Sandbox) -> float:
        """1.0 if the answer passes all tests, else 0.0. See `BoxedScorer`."""
        tests, code = hidden_tests(reference), code_of(answer)
        for _ in range(TRIES):
            try:
                return float(tests.passed(await _returned(code, tests, sandbox)))
            except BoxEnded:
                continue
        try:
            held = CONTROL.passed(await _returned(CONTROL_CODE, CONTROL, sandbox))
        except BoxEnded:
            held = False
        if not held:
            raise EpisodeError(
                "python_tests: boxes end or stand still by themselves on this machine; see `flexmarl sandbox probe`"
            )
        return 0.0


python_tests = PythonTests()
CONTROL_CODE = "def control(n):\n    return n + 1"
CONTROL = HiddenTests(function="control", tests=[HiddenTest(arguments=[1], returns=2)])


class BoxEnded(Exception):
    """The box ended while it was used, or took its time without working: by its code, or by others on the machine."""


async def _returned(code: str, tests: HiddenTests, sandbox: Sandbox) -> Any:
    """The results of the tests in a fresh box; None if the code returned nothing that counts. Raises BoxEnded."""
    arguments = json.dumps([test.arguments for test in tests.tests])
    calls = CALLS.format(function=tests.function, arguments=arguments, file=RETURNED)
    async with sandbox.open() as box:
        for part in (code, calls):
            outcome = await box.run(part, timeout_s=tests.timeout_s)
            idle = outcome.ended is Ended.TIMED_OUT and outcome.cpu_s < tests.timeout_s * BUSY
            if idle or (outcome.lost and outcome.ended is Ended.KILLED):
                raise BoxEnded
            if outcome.ended is not Ended.EXITED:
                return None
        return await _read(box) if outcome.ok else None


async def _read(box: Box) -> Any:
    try:
        written = await box.read(RETURNED)
    except FileNotFoundError:
        return None
    except EpisodeError:
        raise BoxEnded from None
    try:
        return parse_json(written.decode()) if len(written) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        return None
