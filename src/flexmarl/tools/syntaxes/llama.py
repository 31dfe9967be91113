"""Calls as Llama 3 writes them: a JSON object with `name` and `parameters`, `<|python_tag|>` before it or not."""

import json
import re
from typing import Literal

from flexmarl.tools.syntax import Found, Incomplete, Malformed, SyntaxBase, ToolCall, call_of_json, json_at

PYTHON_TAG = "<|python_tag|>"
_OBJECT = re.compile(r'\{\s*"(?:name|type)"\s*:')


class LlamaSyntax(SyntaxBase):
    """Calls as Llama 3 writes them: JSON objects, separated by `;`, spaces or lines.

    An object counts as a call if it begins with `"name"` (or with `"type"`, as some fine-tuned models write) and has
    `parameters` or `arguments`. Behind `<|python_tag|>` nothing else may stand.

    >>> LlamaSyntax().parse('{"name": "calculator", "parameters": {"expression": "6*7"}}')[0].arguments
    {'expression': '6*7'}
    """

    type: Literal["llama"] = "llama"

    @property
    def markers(self) -> tuple[str, ...]:
        """`<|python_tag|>`."""
        return (PYTHON_TAG,)

    def parse(self, text: str) -> tuple[Found, ...]:
        """The calls in the text."""
        found: list[Found] = []
        tag = text.find(PYTHON_TAG)
        place = 0
        while (opened := _OBJECT.search(text, place)) is not None:
            start = place = opened.start()
            read = json_at(text, place)
            if isinstance(read, str):
                cut = _depth(text[place:]) > 0
                reason = f"the tool call is not JSON: {read}"
                found.append(Incomplete(reason) if cut else Malformed(reason))
                break
            value, place = read
            if {"parameters", "arguments"} & value.keys() or value.keys() <= {"name", "type"}:
                begin = tag if 0 <= tag < start and not text[tag + len(PYTHON_TAG) : start].strip() else start
                found.append(call_of_json(value, arguments="parameters", start=begin))
        if not found and tag >= 0:
            rest = text[tag + len(PYTHON_TAG) :].strip()
            reason = f'write {{"name": ..., "parameters": {{...}}}} behind {PYTHON_TAG}'
            return (Incomplete(reason) if '{"name":'.startswith(rest) else Malformed(reason),)
        return tuple(found)

    def render(self, *calls: ToolCall) -> str:
        """JSON objects, joined by `; `, e.g. `{"name": "calculator", "parameters": {"expression": "6*7"}}`."""
        bodies = [{"name": call.name, "parameters": call.arguments} for call in calls]
        return "; ".join(json.dumps(body, ensure_ascii=False) for body in bodies)


def _depth(text: str) -> int:
    """Number of braces that are open at the end of a text that begins with one, or 1 inside a string."""
    depth, quoted, escaped = 0, False, False
    for character in text:
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        else:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return 0
    return max(depth, int(quoted))
