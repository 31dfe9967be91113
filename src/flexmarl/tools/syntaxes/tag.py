"""Calls as Hermes and Qwen models write them: JSON between tags."""

import json
from typing import Literal

from pydantic import Field

from flexmarl.events.safe_json import parse_json
from flexmarl.tools.syntax import Found, Incomplete, Malformed, SyntaxBase, ToolCall, call_of_json

MOST_CLOSINGS = 4
"""Closing tags that are tried for one call: an argument may hold the tag as text. Bounds the work for hostile texts."""


class TagSyntax(SyntaxBase):
    """Calls as Hermes and Qwen models write them: JSON between tags. A message may hold several.

    >>> TagSyntax().parse('<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>')[0].name
    'calculator'
    """

    type: Literal["tag"] = "tag"
    opening: str = Field(default="<tool_call>", min_length=1)
    """Text before the JSON."""
    closing: str = Field(default="</tool_call>", min_length=1)
    """Text behind the JSON."""
    one_call: bool = False
    """True: generation stops at the closing tag, so that a message has one call. For small models that do not end their
    turn by themselves."""

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing tag, if a message has one call only."""
        return (self.closing,) if self.one_call else ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Both tags."""
        return self.opening, self.closing

    def parse(self, text: str) -> tuple[Found, ...]:
        """The calls in the text. A closing tag by itself ends a call that cannot be read."""
        found: list[Found] = []
        place = 0
        while (start := text.find(self.opening, place)) >= 0:
            found += self._stray(text[place:start])
            one, place = self._one(text, start)
            found.append(one)
        return (*found, *self._stray(text[place:]))

    def _stray(self, between: str) -> list[Found]:
        return [Malformed(f"{self.closing} without {self.opening}")] if self.closing in between else []

    def _one(self, text: str, start: int) -> tuple[Found, int]:
        """The call that begins here, and the place behind it."""
        begin = start + len(self.opening)
        end, fault, behind = begin, "", len(text)
        for _ in range(MOST_CLOSINGS):
            end = text.find(self.closing, end)
            if end < 0:
                break
            try:
                call = call_of_json(parse_json(text[begin:end]), arguments="arguments", start=start)
                return call, end + len(self.closing)
            except ValueError as error:
                if not fault:  # Of the shortest body, which is the likeliest.
                    fault, behind = str(error), end + len(self.closing)
            end += len(self.closing)
        if not fault:
            return Incomplete(f"{self.opening} without {self.closing}"), behind
        return Malformed(f"the tool call is not JSON: {fault}"), behind

    def render(self, *calls: ToolCall) -> str:
        """E.g. `<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>`."""
        bodies = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return "\n".join(f"{self.opening}{json.dumps(body, ensure_ascii=False)}{self.closing}" for body in bodies)
