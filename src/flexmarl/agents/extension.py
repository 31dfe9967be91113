"""Decides whether a chat template lets a conversation grow by its new tokens alone.

A conversation may be extended after a response by a message of some role if, for any earlier messages,

1. the text of the longer conversation begins with the shorter one's and the response (nothing is rewritten or dropped),
2. the rest of the text, the suffix, depends on the new message alone,
3. the suffix begins with a special token, and has the same ids alone and behind the response.

Templates are programs, so this is tried, not proved: with and without a system message, over several rounds of user and
tool messages, with plain responses and with thoughts. Some templates trim white space around a response; this does not
count as rewriting, because the prompt keeps the sampled ids.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flexmarl.errors import ConfigError

Role = Literal["system", "user", "assistant", "tool"]


class Message(NamedTuple):
    """One message of a conversation."""

    role: Role
    content: str


Render = Callable[[list[dict[str, Any]], bool], str]
"""(messages, with generation prompt) -> text: a tokenizer's chat template."""

SYSTEM = Message("system", "Be brief.")
QUESTION = Message("user", "What is 3 + 4?")
RESPONSE = "zqxresponsezqx"
"""Placeholder for a sampled response: a word that no template contains."""
ROUNDS = ("u", "t", "uuuuuu", "tttttt", "tu", "ttutu", "utut")
"""Roles of the messages after each response, u(ser) or t(ool), in the conversations that are tried."""
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

    def __init__(self, render: Render, name: str = "") -> None:
        self._render = render
        self._name = name
        self._has_system = self._renders((SYSTEM, QUESTION), SYSTEM.content)
        result = Message("tool", "zqxresultzqx")
        self._has_tool = self._renders((QUESTION, Message("assistant", RESPONSE), result), result.content)
        if not self._renders((QUESTION,), QUESTION.content):
            raise ConfigError(
                f"the chat template of {name!r} cannot render {self._plain([QUESTION])!r}; "
                "it must render the `content` string of a message with role `user`"
            )
        # Running the template is the slowest part of a call, and most calls have one of a few shapes.
        self._splits = {roles: literals for roles in SPLIT if (literals := self._split(roles))}

    def text(self, messages: Sequence[Message]) -> str:
        """Text of the conversation, with the generation prompt."""
        literals = self._splits.get(tuple(message.role for message in messages))
        if literals is None:
            return self._rendered(messages)
        return _filled(literals, [message.content for message in messages])

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
        answer = Message("assistant", RESPONSE)
        plain = self._rendered((SYSTEM, QUESTION, answer, QUESTION), generate=False)
        try:
            result = self._rendered((QUESTION, answer, Message("tool", "7")), generate=False)
        except ConfigError:
            return plain
        return plain + result.partition(RESPONSE)[2]

    def _rendered(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        try:
            return self._render(self._plain(messages), generate)
        except Exception as error:  # A template is a program and may raise anything.
            raise ConfigError(
                f"the chat template of {self._name!r} cannot render the roles "
                f"{[message.role for message in messages]}: {type(error).__name__}: {error}"
            ) from error

    def suffix(self, message: Message) -> str:
        """Text after a response: the end of its turn, the message, the generation prompt."""
        return self.text((QUESTION, Message("assistant", RESPONSE), message)).partition(RESPONSE)[2]

    def _renders(self, messages: Sequence[Message], content: str) -> bool:
        try:
            plain = [{"role": message.role, "content": message.content} for message in messages]
            return content in self._render(plain, True)
        except Exception:  # Templates usually raise for a role that they lack.
            return False

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        plain: list[dict[str, Any]] = []
        role_prompt = ""
        for role, content in messages:
            if role == "system" and not self._has_system:
                role_prompt = f"{content}\n\n"
            elif role == "user" or (role == "tool" and not self._has_tool):
                plain.append({"role": "user", "content": role_prompt + content})
                role_prompt = ""
            else:
                plain.append({"role": role, "content": content})
        return plain


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
    refused: dict[tuple[str, bool], str] = {}
    for thinking in (False, True):
        for start in ((QUESTION,), (SYSTEM, QUESTION)):
            for rounds in ROUNDS:
                _try_rounds(template, encode, special, start, rounds, thinking, refused)
    return Extension(refused=refused, end_ids=frozenset(_ends(template, encode, special)))


def _ends(template: Template, encode: Callable[[str], list[int]], special: Set[str]) -> Iterator[int]:
    for role in ("user", "tool"):
        if end := _leading(template.suffix(Message(role, "next")), special):
            yield encode(end)[0]


def _try_rounds(
    template: Template,
    encode: Callable[[str], list[int]],
    special: Set[str],
    start: Sequence[Message],
    rounds: str,
    thinking: bool,
    refused: dict[tuple[str, bool], str],
) -> None:
    messages = [*start]
    for index, kind in enumerate(rounds):
        response = RESPONSES[thinking].format(index, index)
        message = Message("user" if kind == "u" else "tool", f"It says {index}.")
        longer = [*messages, Message("assistant", response), message]
        key = (message.role, thinking)
        if key not in refused and (why := _difference(template, encode, special, messages, response, message, longer)):
            refused[key] = why
        messages = longer


def _difference(
    template: Template,
    encode: Callable[[str], list[int]],
    special: Set[str],
    messages: Sequence[Message],
    response: str,
    message: Message,
    longer: Sequence[Message],
) -> str:
    try:
        before, after, suffix = template.text(messages) + response, template.text(longer), template.suffix(message)
    except ConfigError as error:
        return str(error)
    if not after.startswith(before):
        return "the template rewrites the conversation before it"
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
