"""Calls as Qwen3-Coder writes them: a tag for the function and one for each argument."""

import json
from typing import Literal

from flexmarl.tools.syntax import Found, Incomplete, Malformed, SyntaxBase, ToolCall

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


class XmlSyntax(SyntaxBase):
    """Calls as Qwen3-Coder writes them: values are plain text on lines of their own. A message may hold several.

    >>> text = "<tool_call><function=add><parameter=a>\\n3\\n</parameter></function></tool_call>"
    >>> XmlSyntax().parse(text)[0].arguments
    {'a': '3'}
    """

    type: Literal["xml"] = "xml"

    @property
    def markers(self) -> tuple[str, ...]:
        """The tags around a call."""
        return OPENING, CLOSING

    def parse(self, text: str) -> tuple[Found, ...]:
        """The calls in the text. A function outside the tags, and a closing tag by itself, cannot be read."""
        found: list[Found] = []
        place = 0
        while (start := text.find(OPENING, place)) >= 0:
            found += _stray(text[place:start])
            calls, place = self._calls(text, start)
            found += calls
        return (*found, *_stray(text[place:]))

    def _calls(self, text: str, start: int) -> tuple[list[Found], int]:
        """The functions between the tags that begin here, mostly one, and the place behind them."""
        found: list[Found] = []
        begin = start + len(OPENING)
        while True:
            function, end = self._function(text, begin, start)
            found.append(function)
            if isinstance(function, Incomplete):
                return found, len(text)
            closing = text.find(CLOSING, end)
            until = closing if closing >= 0 else None
            begin = text.find(FUNCTION, end, until) if isinstance(function, ToolCall) else -1
            if begin < 0 and closing < 0:
                return [*found[:-1], Incomplete(f"{OPENING} without {CLOSING}")], len(text)
            if begin < 0:
                return found, closing + len(CLOSING)
            start = begin

    def _function(self, text: str, place: int, start: int) -> tuple[Found, int]:
        """The function and its arguments, and the place behind them."""
        body = text[place:].lstrip()
        place = len(text) - len(body)
        if not body.startswith(FUNCTION):
            cut = FUNCTION.startswith(body) or CLOSING not in body
            reason = f"write {FUNCTION}name> behind {OPENING}"
            return (Incomplete(reason) if cut else Malformed(reason)), place
        name, opened, _ = text[place + len(FUNCTION) :].partition(">")
        if not opened:
            return Incomplete(f"{FUNCTION} without >"), place
        place += len(FUNCTION) + len(name) + 1
        arguments: dict[str, str] = {}
        while True:
            while text[place : place + 1].isspace():
                place += 1
            if text.startswith(FUNCTION_END, place):
                return ToolCall(name.strip(), arguments, start=start), place + len(FUNCTION_END)
            if not text.startswith(PARAMETER, place):
                rest = text[place : place + len(FUNCTION_END)]
                cut = FUNCTION_END.startswith(rest) or PARAMETER.startswith(rest)
                reason = f"only {PARAMETER}name> and {FUNCTION_END} may stand here, got {rest!r}"
                return (Incomplete(reason) if cut else Malformed(reason)), place
            closing = text.find(PARAMETER_END, place)
            if closing < 0:
                return Incomplete(f"{PARAMETER} without {PARAMETER_END}"), place
            key, opened, value = text[place + len(PARAMETER) : closing].partition(">")
            if not opened:
                return Malformed(f"{PARAMETER} without >"), place
            arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
            place = closing + len(PARAMETER_END)

    def render(self, *calls: ToolCall) -> str:
        """The function and its arguments, on lines of their own. Raises ValueError for an argument without a name."""
        return "\n".join(map(_rendered, calls))


def _stray(between: str) -> list[Found]:
    lost = next((tag for tag in (FUNCTION, CLOSING) if tag in between), "")
    return [Malformed(f"{lost} without {OPENING}")] if lost else []


def _rendered(call: ToolCall) -> str:
    if isinstance(call.arguments, str):
        raise ValueError(f"the syntax names each argument, got the text {call.arguments!r}; give a mapping")
    lines = [OPENING, f"{FUNCTION}{call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"{PARAMETER}{name}>", text, PARAMETER_END]
    return "\n".join((*lines, FUNCTION_END, CLOSING))
