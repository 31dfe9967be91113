"""Calls as Llama 3 writes them: a JSON object with `name` and `parameters`, `<|python_tag|>` before it or not."""

import json
import re
from typing import Literal

from flexmarl.tools.syntax import Found, Incomplete, Malformed, SyntaxBase, ToolCall, call_of_json, json_at

PYTHON_TAG = "<|python_tag|>"
_OBJECT = re.compile(r'\{\s*"(name|type|parameters|arguments|function)"\s*:')
_ARGUMENTS = {"parameters", "arguments"}


class LlamaSyntax(SyntaxBase):
    """Calls as Llama 3 writes them: JSON objects, separated by `;`, spaces or lines.

    An object counts as a call if it begins with `"name"` (or with `"type"`, as some fine-tuned models write) and has
    `parameters` or `arguments`; if it has these keys in another order; or if it holds such an object as its `function`.
    Behind `<|python_tag|>` nothing else may stand.

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
            start = opened.start()
            read = json_at(text, start)
            if isinstance(read, str):
                reason, end = f"the tool call is not JSON: {read}", _end(text, start)
                found.append(Malformed(reason) if end > 0 else Incomplete(reason))
                place = end if end > 0 else len(text)
                continue
            value, place = read
            if isinstance(value.get("function"), dict) and not _ARGUMENTS & value.keys():
                value = value["function"]  # As OpenAI's API has it.
            elif opened[1] not in ("name", "type") and "name" not in value:
                continue
            if _ARGUMENTS & value.keys() or value.keys() <= {"name", "type"}:
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


def _end(text: str, place: int) -> int:
    """The place behind the brace that closes the one at `place`; -1 if none does."""
    depth, quoted, escaped = 0, False, False
    for index in range(place, len(text)):
        character = text[index]
        if quoted:
            quoted = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            quoted = True
        else:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return index + 1
    return -1
