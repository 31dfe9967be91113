"""Decides whether a chat template lets a conversation grow by its new tokens alone.

A conversation may be extended after a response by a message of some role if, for any earlier messages,

1. the text of the longer conversation begins with the shorter one's and the response (nothing is rewritten or dropped),
2. the rest of the text, the suffix, depends on the new message alone,
3. the suffix begins with a special token, and has the same ids alone and behind the response.

Templates are programs, so this is tried, not proved: with and without a system message, over several rounds of user and
tool messages, with plain responses and with thoughts. Some templates trim white space around a response; this does not
count as rewriting, because the prompt keeps the sampled ids.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from flexmarl.errors import ConfigError

Role = Literal["system", "user", "assistant", "tool"]


class SaidCall(NamedTuple):
    """A tool call in an assistant's message, as templates take it in `tool_calls`."""

    name: str
    arguments: str
    """JSON object; empty if the call could not be read."""
    call_id: str
    """Id by which a result refers to the call."""


class Message(NamedTuple):
    """One message of a conversation."""

    role: Role
    content: str
    """Text; of an assistant all that it wrote, calls included."""
    calls: tuple[SaidCall, ...] = ()
    """The tool calls in an assistant's message."""
    prose: str = ""
    """Text of an assistant's message before its calls."""
    call_id: str = ""
    """Id of the call that a tool's message answers."""
    name: str = ""
    """Name of the tool that answers."""


Render = Callable[[list[dict[str, Any]], bool], str]
"""(messages, with generation prompt) -> text: a tokenizer's chat template."""

SYSTEM = Message("system", "Be brief.")
QUESTION = Message("user", "What is 3 + 4?")
RESPONSE = "zqxresponsezqx"
"""Placeholder for a sampled response: a word that no template contains."""
ROUNDS = ("u", "t", "uuuuuu", "tttttt", "tu", "ttutu", "utut", "T", "TuTt")
"""Messages after each response in the conversations that are tried: u(ser), t(ool), or the results of T(wo) calls."""
PROBE = SaidCall("zqxtool", '{"zqxname": "zqxvalue"}', "000000000")
"""A call that shows how a template writes calls. Some templates take only ids of nine letters and digits."""
RESPONSES: Mapping[bool, str] = {
    False: "The answer\nis {}.",
    True: "<think>\nLet me count {}.\n</think>\n\nThe answer is {}.",
}
"""Forms of a response; the key is True if it holds a thought."""
SPLIT: Sequence[tuple[Role, ...]] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "tool"),
)
"""Roles of the conversations for which the template runs only at start-up, if it does no more than fill in contents."""
PROBES = ("", " a{0}\n", "<think>\nb{0}\n</think>\n\nc{0}", "<tool_response>d{0}</tool_response>")
"""Contents that some templates are known to treat specially."""


class Template:
    """A chat template that gives text. Tool results and the role prompt use the user's role if it has none for them."""

    def __init__(
        self, render: Render, name: str = "", *, special: Set[str] = frozenset(), native: bool = False
    ) -> None:
        """`special`: texts of the special tokens. `native`: the agent's calls have the form in which the template
        writes calls, so that the template writes those of the history."""
        self._render, self._name, self._special = render, name, special
        self.native = native
        self._has_system = self._renders((SYSTEM, QUESTION), SYSTEM.content)
        answer = Message("assistant", RESPONSE)
        result = Message("tool", "zqxresultzqx", call_id=PROBE.call_id, name=PROBE.name)
        self._takes_text = self._renders((QUESTION, answer, result, answer, QUESTION), result.content)
        self._has_tool = native or self._takes_text
        two = tuple(SaidCall(PROBE.name, f'{{"zqxname": "{value}"}}', f"00000000{value}") for value in (1, 2))
        several = Message("assistant", "", calls=two)
        results = [Message("tool", "zqxresultzqx", call_id=call.call_id, name=call.name) for call in two]
        self._takes_several = native and self._renders((QUESTION, several, *results, answer), result.content)
        if not self._renders((QUESTION,), QUESTION.content):
            raise ConfigError(
                f"the chat template of {name!r} cannot render {self._plain([QUESTION])!r}; "
                "it must render the `content` string of a message with role `user`"
            )
        # Running the template is the slowest part of a call, and most calls have one of a few shapes.
        self._splits = {roles: literals for roles in SPLIT if (literals := self._split(roles))}
        self._end = _leading(self._behind(answer, Message("user", "next")), special)

    def text(self, messages: Sequence[Message]) -> str:
        """Text of the conversation, with the generation prompt."""
        literals = self._splits.get(tuple(message.role for message in messages))
        if literals is None or any(message.calls for message in messages):
            return self._rendered(messages)
        return _filled(literals, [message.content for message in messages])

    def written(self, *calls: SaidCall) -> str:
        """Text in which the template writes an assistant's calls, end of turn included; empty if it writes none."""
        asked = [{"role": "user", "content": QUESTION.content}]
        try:
            before = self._render(asked, True)
            text = self._render([*asked, _structured(Message("assistant", "", calls=calls))], False)
        except Exception:  # Templates that know no calls may raise anything.
            return ""
        body = text.removeprefix(before) if text.startswith(before) else text.rpartition(QUESTION.content)[2]
        return body if all(call.name in body for call in calls) else ""

    def structures(self, message: Message) -> bool:
        """True if the template writes the calls of this message itself; else the message stays the text it was."""
        if not (self.native and message.calls):
            return False
        read = all(call.arguments for call in message.calls)
        return not self._takes_text or (read and (len(message.calls) == 1 or self._takes_several))

    def _split(self, roles: Sequence[Role]) -> list[str] | None:
        """Texts around the contents of a conversation of these roles; None if the template does more than fill in."""
        slots = [f"zqxslot{index}zqx" for index in range(len(roles))]
        try:
            text = self._rendered([*map(Message, roles, slots)])
            literals = re.split("|".join(slots), text)
            if _filled(literals, slots) != text:
                return None
            for probe in PROBES:
                contents = [probe.format(index) for index in range(len(roles))]
                if self._rendered([*map(Message, roles, contents)]) != _filled(literals, contents):
                    return None
        except ConfigError:
            return None
        return literals

    def example(self) -> str:
        """Text with messages of every role, without the generation prompt: shows the tokens around messages."""
        answer, result = Message("assistant", RESPONSE), Message("tool", "7", call_id=PROBE.call_id, name=PROBE.name)
        called = answer._replace(calls=(PROBE,)) if self.native else answer
        plain = self._rendered((SYSTEM, QUESTION, answer, QUESTION), generate=False)
        try:
            text = self._rendered((QUESTION, called, result), generate=False)
        except ConfigError:
            return plain
        return plain + text.partition(QUESTION.content if self.native else RESPONSE)[2]

    def _rendered(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        try:
            return self._render(self._plain(messages), generate)
        except Exception as error:  # A template is a program and may raise anything.
            raise ConfigError(
                f"the chat template of {self._name!r} cannot render the roles "
                f"{[message.role for message in messages]}: {type(error).__name__}: {error}"
            ) from error

    def suffix(self, *answers: Message) -> str:
        """Text after a response: the end of its turn, what answers it, and the generation prompt."""
        said = self._placeholder(answers)
        text = self._behind(said, *answers)
        # Behind a call there may be the end of its JSON or of its tag, which belongs to the response.
        return text[max(0, text.find(self._end)) :] if self.structures(said) else text

    def behind(self, before: Sequence[Message], answers: Sequence[Message]) -> str:
        """Text behind a response in the conversation `before`, up to the next one. Empty if the template writes the
        conversation in another way once it is longer, or no special token ends the response.

        Raises ConfigError if the template cannot render these roles.
        """
        start, said = self.text(before), self._placeholder(answers)
        text = self.text([*before, said, *answers])
        if not text.startswith(start if self.structures(said) else start + RESPONSE):
            return ""
        rest = text[len(start) :].split(RESPONSE, max(1, len(said.calls)))[-1]
        rest = rest[max(0, rest.find(self._end)) :] if self.structures(said) else rest
        return rest if _leading(rest, self._special) else ""

    def _placeholder(self, answers: Sequence[Message]) -> Message:
        """A response that made the calls which `answers` hold the results of."""
        results = [answer for answer in answers if answer.role == "tool"] if self.native else []
        calls = (SaidCall(PROBE.name, f'{{"zqxname": "{RESPONSE}"}}', result.call_id) for result in results)
        return Message("assistant", RESPONSE, calls=tuple(calls))

    def _behind(self, said: Message, *answers: Message) -> str:
        """Text behind the response in a conversation of a question, a message with it, and the answers to this."""
        times = len(said.calls) if self.structures(said) else 1
        pieces = self.text((QUESTION, said, *answers)).split(RESPONSE, times)
        return pieces[-1] if len(pieces) > times else ""

    def _renders(self, messages: Sequence[Message], content: str) -> bool:
        try:
            return content in self._render([self._as_is(message) for message in messages], True)
        except Exception:  # Templates usually raise for a role that they lack.
            return False

    def _as_is(self, message: Message) -> dict[str, Any]:
        """One message in the roles that it has."""
        if message.role == "assistant" and message.calls:
            return _structured(message)
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if self.native and message.role == "tool":
            plain |= {"tool_call_id": message.call_id, "name": message.name}
        return plain

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        plain: list[dict[str, Any]] = []
        role_prompt, before = "", ""
        for message in messages:
            role, content = message.role, message.content
            if role == "system" and not self._has_system:
                role_prompt = f"{content}\n\n"
            elif role == before == "tool" and not self._has_tool:
                plain[-1]["content"] += f"\n{content}"  # Templates that alternate roles take one message.
            elif role == "user" or (role == "tool" and not self._has_tool):
                plain.append({"role": "user", "content": role_prompt + content})
                role_prompt = ""
            elif role == "assistant" and not self.structures(message):
                plain.append({"role": role, "content": content})
            else:
                plain.append(self._as_is(message))
            before = role
        return plain


def _structured(message: Message) -> dict[str, Any]:
    """An assistant's message with calls. One that could not be read has a name and arguments in its place."""
    calls = [
        {
            "type": "function",
            "id": call.call_id,
            "function": {"name": call.name or "unreadable", "arguments": json.loads(call.arguments or "{}")},
        }
        for call in message.calls
    ]
    return {"role": "assistant", "content": message.prose, "tool_calls": calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """The result of the check of one tokenizer and its template."""

    refused: Mapping[tuple[str, bool], str]
    """(role of the next message, whether a response held a thought) -> why the prompt must be rendered anew."""
    end_ids: frozenset[int]
    """The special tokens that end an assistant's turn."""

    def why_not(self, role: str, *, thinking: bool = False) -> str:
        """Why a message of this role cannot extend the conversation; empty if it can."""
        return self.refused.get((role, thinking), "")

    @property
    def summary(self) -> str:
        """One line for `flexmarl check` and the journal."""
        cases: dict[str, list[str]] = {}
        for (role, thinking), why in self.refused.items():
            cases.setdefault(why, []).append(f"{role} message{' after a thought' if thinking else ''}")
        rerendered = "; ".join(f"{', '.join(refused)} ({why})" for why, refused in cases.items())
        return f"rendered anew: {rerendered}" if rerendered else "every prompt extends the one before"


def check_extension(template: Template, encode: Callable[[str], list[int]], special: Set[str]) -> Extension:
    """Tries the template on conversations of `ROUNDS`.

    `encode`: text -> ids, without added ones; `special`: the texts of the special tokens.
    """
    encode = cache(encode)  # The conversations share most of their texts, and a tool agent waits for this check.
    refused: dict[tuple[str, bool], str] = {}
    for thinking in (False, True):
        for start in ((QUESTION,), (SYSTEM, QUESTION)):
            tried = set[str]()
            for rounds in ROUNDS:
                _try_rounds(template, encode, special, start, rounds, thinking, refused, tried)
    return Extension(refused=refused, end_ids=frozenset(_ends(template, encode, special)))


def _ends(template: Template, encode: Callable[[str], list[int]], special: Set[str]) -> Iterator[int]:
    for role in ("user", "tool"):
        if end := _leading(template.suffix(Message(role, "next", call_id=PROBE.call_id, name=PROBE.name)), special):
            yield encode(end)[0]


def _try_rounds(
    template: Template,
    encode: Callable[[str], list[int]],
    special: Set[str],
    start: Sequence[Message],
    rounds: str,
    thinking: bool,
    refused: dict[tuple[str, bool], str],
    tried: set[str],
) -> None:
    """Adds to `refused`. `tried`: beginnings of conversations that were tried; those of this one are added."""
    messages = [*start]
    for index, kind in enumerate(rounds):
        said, answers = _round(index, kind, thinking, native=template.native)
        key, beginning = (answers[0].role, thinking), rounds[: index + 1]
        new = key not in refused and beginning not in tried
        if new and (why := _difference(template, encode, special, messages, said, answers)):
            refused[key] = why
        tried.add(beginning)
        messages = [*messages, said, *answers]


def _round(index: int, kind: str, thinking: bool, *, native: bool) -> tuple[Message, list[Message]]:
    """A response and what follows it."""
    response = RESPONSES[thinking].format(index, index)
    if kind == "u":
        return Message("assistant", response), [Message("user", f"It says {index}.")]
    ids = [f"{index:08d}{call}" for call in range(2 if kind == "T" else 1)]
    calls = tuple(SaidCall(PROBE.name, f'{{"zqxname": "{index}"}}', call_id) for call_id in ids)
    answers = [Message("tool", f"It says {index}.", call_id=call_id, name=PROBE.name) for call_id in ids]
    if not native:
        return Message("assistant", response), answers
    return Message("assistant", response, calls=calls, prose=response if thinking else ""), answers


def _difference(
    template: Template,
    encode: Callable[[str], list[int]],
    special: Set[str],
    messages: Sequence[Message],
    said: Message,
    answers: Sequence[Message],
) -> str:
    try:
        before, after = template.text(messages), template.text([*messages, said, *answers])
        suffix = template.suffix(*answers)
    except ConfigError as error:
        return str(error)
    if template.structures(said):  # The template writes the response: it is what stands between the two.
        response = after[len(before) : len(after) - len(suffix)]
        if not after.startswith(before) or said.prose.strip() not in response:
            return "the template rewrites the conversation before it"
    else:
        response = said.content
        if not after.startswith(before + response):
            return "the template rewrites the conversation before it"
    before += response
    if after != before + suffix:
        return "the template's text after a response depends on more than the message"
    if not _leading(suffix, special):
        return "no special token ends the response, so the ids would depend on its last words"
    if any(encode(before + space + suffix) != encode(before + space) + encode(suffix) for space in ("", " ", "\n")):
        return "the ids after a response depend on its last words"
    return ""


def _leading(text: str, special: Set[str]) -> str:
    """The special token that a text begins with; the longest, if several fit."""
    return max((token for token in special if token and text.startswith(token)), key=len, default="")


def _filled(literals: Sequence[str], contents: Sequence[str]) -> str:
    """Joins literal, content, literal, ..., literal. Returns "", which equals no text, if the numbers do not fit."""
    if len(literals) != len(contents) + 1:
        return ""
    return "".join([piece for pair in zip(literals, contents, strict=False) for piece in pair]) + literals[-1]
