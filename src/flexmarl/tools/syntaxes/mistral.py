"""Calls as Mistral models write them: `[TOOL_CALLS]`, which is a special token, and what is called."""

import json
import re
from typing import Any, Literal

from flexmarl.tools.syntax import Found, Incomplete, Malformed, SyntaxBase, ToolCall, call_of_json, json_at

MARK, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID = re.compile(r"[A-Za-z0-9]{9}")
"""The only form of an id that the templates accept."""
_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\]\s*")


class MistralSyntax(SyntaxBase):
    """Calls as Mistral models write them: a JSON list behind `[TOOL_CALLS]`. The template gives each call an id.

    Models of 2025 write `[TOOL_CALLS]name[ARGS]{...}` for each call; this is read too.

    >>> MistralSyntax().parse('[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "6*7"}}]')[0].arguments
    {'expression': '6*7'}
    """

    type: Literal["mistral"] = "mistral"

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens of calls."""
        return MARK, ARGUMENTS, CALL_ID

    def parse(self, text: str) -> tuple[Found, ...]:
        """The calls in the text."""
        found: list[Found] = []
        place = 0
        while (start := text.find(MARK, place)) >= 0 and not (found and isinstance(found[-1], Incomplete)):
            place = start + len(MARK)
            named = _NAMED.match(text, place)
            begin = named.end() if named else len(text) - len(text[place:].lstrip())
            read = json_at(text, begin)
            if isinstance(read, str):
                following = text.find(MARK, place)
                cut = following < 0 and not text[begin:].rstrip().endswith(("}", "]"))
                reason = f"the tool calls behind {MARK} are not JSON: {read}"
                found.append(Incomplete(reason) if cut else Malformed(reason))
                place = len(text) if following < 0 else following
            elif named:
                body = {"name": named[1], "arguments": read[0], "id": named[2]}
                found.append(_call(body, start))
                place = read[1]
            else:
                entries = read[0] if isinstance(read[0], list) else [read[0]]
                found += [_call(entry, start) for entry in entries] or [Malformed(f"no call behind {MARK}")]
                place = read[1]
        return tuple(found)

    def render(self, *calls: ToolCall) -> str:
        """E.g. `[TOOL_CALLS][{"name": "calculator", "arguments": {"expression": "6*7"}}]`."""
        bodies = [
            {"name": call.name, "arguments": call.arguments} | ({"id": call.call_id} if call.call_id else {})
            for call in calls
        ]
        return MARK + json.dumps(bodies, ensure_ascii=False)


def _call(entry: Any, start: int) -> ToolCall | Malformed:
    given = entry.get("id") if isinstance(entry, dict) else None
    call_id = given if isinstance(given, str) and ID.fullmatch(given) else ""
    return call_of_json(entry, arguments="arguments", call_id=call_id, start=start)
