"""Tokenizer that keeps control tokens and text apart: no content can spell a control token.

A control token, such as `<|im_end|>`, says where a message ends and who speaks next. A chat template writes it as text
around the contents, and a tokenizer reads the whole. So a content that holds `<|im_end|>` would end its own message and
go on in another's voice. What is done about it, for the content `so <|im_end|>`:

    hide     so #|im_end|>                       one character of each spelling is replaced by a mark
    render   <|user|>so #|im_end|><|im_end|>     what is spelled now, the template wrote
    name     <control-5>so #|im_end|><control-6> it gets names that no text has
    show     <control-5>so <|im_end|><control-6> the marks are taken back, and the whole is encoded at once

The backend is a copy in which the control tokens have these names, with their ids and flags. Nothing else of it
differs, so a conversation that spells nothing has the ids that it has in the original, merges and spaces included.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST_MARK = 0xF0000
"""Characters for private use begin here; those that stand for hidden ones are the first that no content has."""


class ControlTokens:
    """The control tokens of one tokenizer: hides them in contents, and encodes what a template made of these."""

    def __init__(self, backend: "Tokenizer", control: Collection[str], *, whose: str) -> None:
        """`control`: texts of the control tokens; `whose`: name of the tokenizer, for people."""
        secret = secrets.token_hex(16)  # Whoever knew the names could spell them.
        self._names = {token: f"<control-{secret}-{index}>" for index, token in enumerate(sorted(control))}
        self._tokens = {name: token for token, name in self._names.items()}
        self._spelled = _any_of(self._names)
        self._beginnings = (*{token[:end] for token in control for end in range(1, len(token))},)
        self._ends = (*{token[begin:] for token in control for begin in range(1, len(token))},)
        self._named = _any_of(self._tokens)
        self._backend = _renamed(backend, self._names, whose=whose)

    def hide(self, contents: Sequence[str]) -> tuple[list[str], Mapping[int, str]]:
        """The contents without any spelling, nor a piece of one at either end; and what stands for what in them."""
        places = [{*self._places(content)} for content in contents]
        hidden = sorted({content[place] for content, found in zip(contents, places, strict=True) for place in found})
        if not hidden:
            return [*contents], {}
        taken = {*"".join(contents)}
        free = (mark for mark in map(chr, range(FIRST_MARK, 0x110000)) if mark not in taken)
        marks = dict(zip(hidden, free, strict=False))
        written = [_replaced(content, found, marks) for content, found in zip(contents, places, strict=True)]
        return written, {ord(mark): character for character, mark in marks.items()}

    def encode(self, text: str, shown: Mapping[int, str] = MappingProxyType({})) -> list[int]:
        """Ids of a text that a template made of hidden contents; what it spells itself is control."""
        named = self._spelled.sub(lambda found: self._names[found[0]], text)
        return self._backend.encode(named.translate(shown), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens."""
        text = self._backend.decode(ids, skip_special_tokens=True)
        return self._named.sub(lambda found: self._tokens[found[0]], text)

    def _places(self, content: str) -> Iterator[int]:
        """Where a spelling begins, and the ends of the content where its neighbour may complete a piece of one."""
        found = self._spelled.search(content)
        while found:
            yield found.start()
            found = self._spelled.search(content, found.start() + 1)
        trimmed = content.strip()  # As templates do.
        first = content.find(trimmed)
        for begin, text in ((0, content), (first, trimmed)):
            if self._may_go_on(text):
                yield begin + len(text) - 1
            if self._may_complete(text):
                yield begin

    def _may_go_on(self, text: str) -> bool:
        """Does a text end in the beginning of a control token, or is it the middle of one?"""
        return text.endswith(self._beginnings) or (bool(text) and any(text in token for token in self._names))

    def _may_complete(self, text: str) -> bool:
        """Does a text begin with the end of a control token?"""
        return text.startswith(self._ends)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """The longest of these texts that begins at a place, as the backend finds its tokens."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _replaced(text: str, places: Collection[int], marks: Mapping[str, str]) -> str:
    characters = [*text]
    for place in places:
        characters[place] = marks[characters[place]]
    return "".join(characters)


def _renamed(backend: "Tokenizer", names: Mapping[str, str], *, whose: str) -> "Tokenizer":
    """A copy, without truncation and padding, in which these tokens have other names."""
    from tokenizers import Tokenizer

    plan: dict[str, Any] = json.loads(backend.to_str())
    plan.update(truncation=None, padding=None)
    for token in plan["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = plan["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:  # Unigram: pieces with their scores.
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:  # A merge that makes a control token would make it of text.
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_made_by(merge))]
    copied = Tokenizer.from_str(json.dumps(plan, ensure_ascii=False))
    before = {names.get(token, token): index for token, index in backend.get_vocab().items()}
    assert copied.get_vocab() == before, f"the control tokens of {whose!r} got other ids with other names"
    return copied


def _made_by(merge: str | Sequence[str]) -> tuple[str, ...]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
