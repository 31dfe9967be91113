"""Tokenizer that keeps control tokens and text apart: no content can spell a control token.

A control token, such as `<|im_end|>`, says where a message ends and who speaks next. A chat template writes it as text
around the contents, and a tokenizer reads the whole. So a content that holds `<|im_end|>` would end its own message and
continue as another speaker. These steps prevent it, for the content `so <|im_end|>`:

    hide     so #|im_end|>                       one character of each spelling is replaced by a mark
    render   <|user|>so #|im_end|><|im_end|>     all control tokens spelled now come from the template
    name     <control-5>so #|im_end|><control-6> these are replaced by names that no text contains
    show     <control-5>so <|im_end|><control-6> the marks are replaced back, and the whole is encoded at once

The backend is a copy of the tokenizer in which the control tokens have these names, with the same ids and flags.
Nothing else differs, so a conversation without such spellings has the ids of the original, merges and spaces included.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST_MARK = 0xF0000
"""The first character for private use. The first ones from here on that no content has serve as marks."""


class ControlTokens:
    """The control tokens of one tokenizer. Hides them in contents; encodes the text that a template makes of these."""

    def __init__(self, backend: "Tokenizer", control: Collection[str], *, name: str) -> None:
        """`control`: texts of the control tokens; `name`: name of the tokenizer, for error messages."""
        secret = secrets.token_hex(16)  # A content could spell names that are known.
        self._names = {token: f"<control-{secret}-{index}>" for index, token in enumerate(sorted(control))}
        self._tokens = {name: token for token, name in self._names.items()}
        self._spelled = _any_of(self._names)
        self._longest = max(map(len, self._names), default=0)
        self._beginnings = (*{token[:end] for token in control for end in range(1, len(token))},)
        self._ends = (*{token[begin:] for token in control for begin in range(1, len(token))},)
        self._named = _any_of(self._tokens)
        self._backend = _renamed(backend, self._names, name=name)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        """Ids that `decode` leaves out."""
        bytes_of = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_ids = frozenset(index for index in bytes_of if index is not None)
        """Ids that stand for single bytes. A run of them that is no UTF-8 is decoded into a mark for each."""

    def hide(self, contents: Sequence[str]) -> tuple[list[str], Mapping[int, str]]:
        """The contents, with a mark in each spelling, and in a piece of one at either end; and mark -> character."""
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
        """Ids of a text that a template made of hidden contents. The control tokens that it spells are real ones."""
        named = self._spelled.sub(lambda found: self._names[found[0]], text)
        return self._backend.encode(named.translate(shown), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], kept: Set[int] = frozenset()) -> str:
        """Text of ids without special tokens, except those `kept`."""
        if kept.isdisjoint(ids):
            text = self._backend.decode(ids, skip_special_tokens=True)
        else:
            left = [one for one in ids if one in kept or one not in self.special_ids]
            text = self._backend.decode(left, skip_special_tokens=False)
        return self._named.sub(lambda found: self._tokens[found[0]], text)

    def spelled(self, text: str) -> str:
        """The first control token that a text spells; empty if there is none."""
        found = self._spelled.search(text)
        return found[0] if found else ""

    def _places(self, content: str) -> Iterator[int]:
        """Places to hide: the start of each spelling, and ends of the content that a neighbour may complete to one."""
        found = self._spelled.search(content)
        while found:
            yield found.start()
            found = self._spelled.search(content, found.start() + 1)
        trimmed = content.strip()  # Templates may trim contents.
        for begin, text in {(0, content), (content.find(trimmed), trimmed)}:
            if self._may_continue(text):
                yield begin + len(text) - 1
            if self._may_complete(text):
                yield begin

    def _may_continue(self, text: str) -> bool:
        """True if a text ends with the beginning of a control token, or is a piece of one."""
        piece = 0 < len(text) <= self._longest and any(text in token for token in self._names)
        return piece or text.endswith(self._beginnings)

    def _may_complete(self, text: str) -> bool:
        """True if a text begins with the end of a control token."""
        return text.startswith(self._ends)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Pattern for the longest of these texts at a place, which is how the backend finds its tokens."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _replaced(text: str, places: Collection[int], marks: Mapping[str, str]) -> str:
    characters = [*text]
    for place in places:
        characters[place] = marks[characters[place]]
    return "".join(characters)


def _renamed(backend: "Tokenizer", names: Mapping[str, str], *, name: str) -> "Tokenizer":
    """A copy of the backend, without truncation and padding, in which tokens are renamed: `names` is old -> new."""
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
    if "merges" in model:  # A merge that gives a control token would make one from text.
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_made_by(merge))]
    copied = Tokenizer.from_str(json.dumps(plan, ensure_ascii=False))
    before = {names.get(token, token): index for token, index in backend.get_vocab().items()}
    assert copied.get_vocab() == before, f"the control tokens of {name!r} got other ids with other names"
    return copied


def _made_by(merge: str | Sequence[str]) -> tuple[str, ...]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
