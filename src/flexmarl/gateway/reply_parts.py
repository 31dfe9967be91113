"""Decides how a sampled text becomes a reply of thought, text and calls, and how messages become those of a template.

    <think>12 dozen</think>I look it up. <tool_call>{"name": "find", "arguments": {"q": "gross"}}</tool_call>
    thought: 12 dozen       text: I look it up.       calls: find({"q": "gross"})

Calls are read only if the request offers tools. If one of them cannot be read, the whole is text. Text behind the first
call is left out of the reply; it stays in the turn, and in the prompt of a turn that continues it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexmarl.agents.chat import SaidCall
from flexmarl.agents.extension import Message
from flexmarl.gateway.dialects.base import OfferedTool, Refused, Said
from flexmarl.tools import Found, TagSyntax, ToolCall
from flexmarl.tools.arguments import BadArguments, fitted
from flexmarl.tools.syntax import Syntax

_PROBE = ToolCall("zqxname", {})
_OPENING, _CLOSING = "<think>", "</think>"
_HALF = "\ufffd"
"""A decoder writes this for a character whose bytes have not all come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyParts:
    """A reply as it is delivered."""

    text: str
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Their arguments are objects."""
    stopped_by: str = ""
    """The client's stop text at which it ends."""
    faulty: bool = False
    """True if it holds something that began as a call and is none."""


def read_reply(
    text: str,
    *,
    begun: str = "",
    hidden: int = 0,
    opened: bool = False,
    tools: Sequence[OfferedTool] = (),
    syntax: Syntax | None = None,
    stop: Sequence[str] = (),
) -> ReplyParts:
    """Reads a sampled text. `begun`: words before it that were given to the model; the first `hidden` characters of the
    whole are not delivered. `opened`: the prompt has begun a thought. `stop`: the client's stop texts, which the reply
    does not hold."""
    text, stopped_by = _stopped(text, stop)
    whole = (begun + text)[hidden:]
    thought, begin = _thought(whole, before=begun[:hidden], opened=opened)
    spoken = whole[begin:]
    found = syntax.parse(spoken) if tools and syntax else ()
    calls = _objects(found, {tool.name: tool for tool in tools})
    if not found or calls is None:
        return ReplyParts(text=spoken, thought=thought, stopped_by=stopped_by, faulty=bool(found))
    prose = spoken[: calls[0].start].rstrip()
    return ReplyParts(text=prose, thought=thought, calls=tuple(calls), stopped_by=stopped_by)


def _begins(whole: str, before: str, *, opened: bool) -> tuple[bool, bool]:
    """Whether a reply begins with a thought: (surely, if it ends one). `before`: the client's own words before it."""
    _, mark, inside = before.rpartition(_OPENING)
    surely = bool(mark) and _CLOSING not in inside
    may = surely or (opened and _CLOSING not in before)
    return surely or whole.lstrip().startswith(_OPENING), may


def _thought(whole: str, *, before: str, opened: bool) -> tuple[str, int]:
    """The thought that a reply begins with, and the place behind it. One that has not ended has no place behind it.

    What the template has `opened` and the reply never ends was no thought: many a model writes none.
    """
    surely, may = _begins(whole, before, opened=opened)
    if not (surely or (may and _CLOSING in whole)):
        return "", 0
    inner, _, rest = whole.partition(_CLOSING)
    return _bare(inner), len(whole) - len(rest.lstrip("\n"))


def _bare(inner: str) -> str:
    return inner.strip().removeprefix(_OPENING).strip()


class Certain(NamedTuple):
    """The beginnings of a reply's thought and text."""

    thought: str = ""
    text: str = ""


def certain(
    text: str,
    *,
    begun: str = "",
    hidden: int = 0,
    opened: bool = False,
    tools: Sequence[OfferedTool] = (),
    syntax: Syntax | None = None,
    stop: Sequence[str] = (),
) -> Certain:
    """The part of a reply that is certain when so much of it was sampled: whatever follows, `read_reply` begins so.

    Held back is what may be the beginning of a stop text, a mark of a thought or a call, or of half a character, and
    white space that may be at the end.

    >>> certain("<think>12 dozen</th"), certain("<think>12 dozen</think>I look <tool")
    (Certain(thought='12 dozen', text=''), Certain(thought='12 dozen', text='I look <tool'))
    """
    whole = (begun + _certainly_before(stop, text))[hidden:]
    surely, may = _begins(whole, begun[:hidden], opened=opened)
    inner, closed, rest = whole.partition(_CLOSING)
    if closed and (surely or may):
        thought, spoken = _bare(inner), rest.lstrip("\n")
    elif surely:
        inner = _without_beginning_of((_CLOSING,), inner)
        return Certain() if _OPENING.startswith(inner.lstrip()) else Certain(_bare(inner))
    elif may or _OPENING.startswith(whole.lstrip()):
        return Certain()
    else:
        thought, spoken = "", whole
    if tools and syntax:
        spoken = _before_a_call(spoken, syntax)
    return Certain(thought, spoken)


def certain_of_plain(text: str, stop: Sequence[str] = ()) -> Certain:
    """The same for `plain_reply`."""
    return Certain(text=_certainly_before(stop, text))


def _certainly_before(stop: Sequence[str], text: str) -> str:
    """The text before all that is a stop text, or may be the beginning of one."""
    text = text.rstrip(_HALF)
    return min(_stopped(text, stop)[0], _without_beginning_of(stop, text), key=len)


def _before_a_call(spoken: str, syntax: Syntax) -> str:
    """The text before all that may be a call. Only in the syntax of tags can one be told from its first characters."""
    if not isinstance(syntax, TagSyntax):
        return ""
    before, found, _ = spoken.partition(syntax.opening)
    return (before if found else _without_beginning_of((syntax.opening,), before)).rstrip()


def _without_beginning_of(marks: Sequence[str], text: str) -> str:
    """The text without what may be the beginning of one of these, at its end."""
    longest = max(map(len, marks), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text


def plain_reply(text: str, stop: Sequence[str] = ()) -> ReplyParts:
    """A sampled text as it is, up to the client's first stop text."""
    text, stopped_by = _stopped(text, stop)
    return ReplyParts(text=text, stopped_by=stopped_by)


def _stopped(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before its first stop text, and that."""
    end, stopped_by = min(((text.find(one), one) for one in stop if one in text), default=(len(text), ""))
    return text[:end], stopped_by


def _objects(found: Sequence[Found], tools: Mapping[str, OfferedTool]) -> list[ToolCall] | None:
    """The calls, with objects as arguments; None if one of them cannot be read."""
    calls: list[ToolCall] = []
    for one in found:
        if not isinstance(one, ToolCall):
            return None
        arguments = one.arguments
        if one.name in tools:
            fit = fitted(arguments, tools[one.name].parameters)
            arguments = arguments if isinstance(fit, BadArguments) else fit
        if isinstance(arguments, str):
            return None
        calls.append(ToolCall(one.name, arguments, one.call_id, one.start))
    return calls


def forced_words(must_call: str, syntax: Syntax | None) -> str:
    """The beginning of a call that the reply must make: `must_call` names the tool, "" any.

    >>> forced_words("find", TagSyntax())
    '<tool_call>{"name": "find", "arguments": '

    Raises Refused for a syntax in which a call does not begin with its name.
    """
    if syntax is None or syntax.type != "tag":
        kind = syntax.type if syntax else "none"
        raise Refused(
            f"tool_choice: a call can be forced in the syntax 'tag' alone, and the seat's is {kind!r}; use auto",
            code="unsupported_tool_choice",
        )
    written = syntax.render(_PROBE)
    if must_call:
        return written[: written.rindex("{}")].replace(_PROBE.name, must_call)
    return written[: written.index(_PROBE.name)]


def as_messages(said: Sequence[Said], syntax: Syntax | None) -> list[Message]:
    """A history as chat templates take it: one system message at the start, the user's messages joined where several
    follow one another, calls numbered, their results with the tools' names."""
    messages: list[Message] = []
    numbers: dict[str, tuple[str, str]] = {}
    count = 0
    for one in said:
        role = "user" if one.role == "system" and any(message.role != "system" for message in messages) else one.role
        if role == "assistant":
            calls: list[SaidCall] = []
            for call in one.calls:
                numbers[call.call_id] = (f"{count:09d}", call.name)
                calls.append(SaidCall(call.name, _object(call.arguments), f"{count:09d}"))
                count += 1
            messages.append(_assistant(one, calls, syntax))
        elif role == "tool":
            call_id, name = numbers.get(one.call_id, ("000000000", ""))
            messages.append(Message("tool", one.text, call_id=call_id, name=name))
        elif messages and messages[-1].role == role:
            messages[-1] = messages[-1]._replace(content=f"{messages[-1].content}\n\n{one.text}")
        else:
            messages.append(Message(role, one.text))
    return messages


def _object(arguments: str) -> str:
    """The arguments, if they are a JSON object; "" stands for those that cannot be read."""
    try:
        return arguments if isinstance(json.loads(arguments), dict) else ""
    except (ValueError, RecursionError):
        return ""


def _assistant(one: Said, calls: Sequence[SaidCall], syntax: Syntax | None) -> Message:
    thought = f"<think>\n{one.thought.strip()}\n</think>\n\n" if one.thought and one.thought.strip() else ""
    prose = thought + one.text
    if not calls:
        return Message("assistant", prose)
    read = [ToolCall(call.name, json.loads(call.arguments) if call.arguments else {}) for call in calls]
    try:
        written = (syntax or TagSyntax()).render(*read)
    except (KeyError, ValueError):  # A syntax may have a place for some calls only.
        written = TagSyntax().render(*read)
    joined = f"{prose}\n{written}" if prose else written
    return Message("assistant", joined, calls=tuple(calls), prose=prose)
