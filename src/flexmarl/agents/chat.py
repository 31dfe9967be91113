"""Chat prompts on a Hugging Face tokenizer, token by token.

ChatRenderer makes prompt ids. Conversation holds one agent's messages and the exact ids of its last call.

A prompt that continues a conversation is never tokenised again. It is three runs of ids, end to end:

    previous prompt | sampled response | suffix: end of turn, new message, generation prompt
    as it was sent  | as it was sampled| the only part that is tokenised now

`extension.py` checks at start-up for which messages the chat template would write the same; for the others the prompt
is rendered anew. In both cases, control tokens that a message spells stay text: `control_tokens.py`.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flexmarl.agents.control_tokens import ControlTokens
from flexmarl.agents.extension import Extension, Message, Role, Template, check_extension
from flexmarl.errors import ConfigError
from flexmarl.records import IntArray, SampleId, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CACHED_TEXTS = 4096
"""Rendered prompts, and suffixes, that a renderer caches. The samples of a group share theirs."""


class ChatRenderer:
    """Makes prompt ids with one tokenizer. Stateless apart from a cache; shared by all agents of a policy."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer {name!r} has no chat template; set `tokenizer.chat_template` and save it")
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"the tokenizer {name!r} has no `tokenizers` backend; save it as tokenizer.json first")
        self._template = Template(
            lambda messages, generate: str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
            ),
            name=name,
        )
        added, example = tokenizer.added_tokens_decoder.values(), self._template.example()
        special = {token.content for token in added if token.special}
        # Some templates mark the speaker by tokens that are not flagged as special, such as DeepSeek's `<｜User｜>`.
        control = special | {token.content for token in added if token.content in example}
        backend: Any = tokenizer.backend_tokenizer
        self._tokens = ControlTokens(backend, control, name=name)
        self.extension: Extension = check_extension(self._template, self.encode, special)
        """Says which messages may extend a conversation, and why the others may not."""
        eos: Any = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(sorted(self.extension.end_ids.union([] if eos is None else [eos])))
        """The ids on which sampling must stop: those that end a turn in the template, and the tokenizer's end token."""
        if not self.stop_ids:
            raise ConfigError(f"the tokenizer {name!r} has no end token; set its `eos_token`")
        self._prompt = lru_cache(CACHED_TEXTS)(self._render)
        self._suffix = lru_cache(CACHED_TEXTS)(self._render_suffix)

    def __reduce__(self) -> "tuple[type[ChatRenderer], tuple[PreTrainedTokenizerBase]]":
        """Pickles the tokenizer only; another process makes the renderer anew from it."""
        return ChatRenderer, (self._tokenizer,)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Control tokens written in it become their ids; none is added."""
        return self._tokens.encode(text)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Text of ids without special tokens."""
        return self._tokens.decode(ids.tolist() if isinstance(ids, np.ndarray) else ids)

    def render(self, messages: Sequence[Message], *, trust_special: bool = False) -> IntArray:
        """[P] prompt of a conversation, rendered anew, with the generation prompt. The array is read-only.

        A control token that the contents spell stays text, unless `trust_special`.
        """
        return self._prompt(tuple(messages), trust_special)

    def extend(
        self,
        prompt_ids: IntArray,
        response_ids: IntArray,
        message: Message,
        *,
        thinking: bool = False,
        trust_special: bool = False,
    ) -> IntArray | None:
        """[P'] previous prompt + sampled response + suffix; None if the template would write something else.

        `thinking`: some response of the conversation holds a thought (see `holds_thought`), which many templates strip.
        """
        if self.extension.why_not(message.role, thinking=thinking):
            return None
        suffix = self._suffix(message, trust_special)
        last = int(response_ids[-1]) if len(response_ids) else None
        if last == suffix[0]:
            suffix = suffix[1:]
        elif last in self.stop_ids:  # The template would write another end token.
            return None
        return np.concatenate((prompt_ids, response_ids, suffix))

    def _render(self, messages: tuple[Message, ...], trust_special: bool) -> IntArray:
        return self._encoded(self._template.text, messages, trust_special)

    def _render_suffix(self, message: Message, trust_special: bool) -> IntArray:
        return self._encoded(lambda messages: self._template.suffix(*messages), (message,), trust_special)

    def _encoded(
        self, render: Callable[[Sequence[Message]], str], messages: Sequence[Message], trust_special: bool
    ) -> IntArray:
        contents, shown = [message.content for message in messages], {}
        if not trust_special:
            contents, shown = self._tokens.hide(contents)
        text = render([Message(one.role, content) for one, content in zip(messages, contents, strict=True)])
        ids = np.asarray(self._tokens.encode(text, shown), dtype=np.int32)
        ids.flags.writeable = False
        return ids


def holds_thought(text: str) -> bool:
    """True if a response holds a thought in the form that chat templates know and may strip from the history."""
    return "</think>" in text


__all__ = ["ChatRenderer", "Message", "Role", "holds_thought"]


_NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


class Conversation:
    """One agent's conversation. It holds the prompt of the next call and the turn that this prompt extends."""

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        next_branch: Callable[[], int],
        *,
        trust_special: bool = False,
    ) -> None:
        """`next_branch` gives the number of a new branch. `trust_special`: messages may spell control tokens."""
        self.messages = [*messages]
        self.prompt_ids = _NO_IDS
        """[P] prompt of the next call."""
        self.parent: SampleId | None = None
        """The turn whose prompt and response the next prompt extends; None for a prompt that was rendered anew."""
        self.branch = -1
        """Number of the branch. A prompt that is rendered anew starts a new one; -1 before the first prompt."""
        self._renderer = renderer
        self._next_branch = next_branch
        self._trust_special = trust_special
        self._last: Turn | None = None
        self._thinking = any(message.role == "assistant" and holds_thought(message.content) for message in messages)

    def copy(self, next_branch: Callable[[], int]) -> "Conversation":
        """A copy that grows independently and takes the numbers of its branches from `next_branch`."""
        twin = copy(self)
        twin.messages, twin._next_branch = [*self.messages], next_branch
        return twin

    def receive(self, message: Message) -> None:
        """Adds a message of someone else, and sets `prompt_ids` and `parent` for the agent's next call.

        Where the prompt is rendered anew, `parent` is None and a new `branch` begins.
        """
        last, trust = self._last, self._trust_special
        extended = last and self._renderer.extend(
            last.prompt_ids, last.response_ids, message, thinking=self._thinking, trust_special=trust
        )
        self.messages.append(message)
        if last is not None and extended is not None:
            self.prompt_ids, self.parent = extended, last.sample_id
        else:
            self.prompt_ids, self.parent = self._renderer.render(self.messages, trust_special=trust), None
            self.branch = self._next_branch()

    def answer(self, turn: Turn) -> None:
        """Adds the turn of the agent's call. Until `receive` or `end_message`, the next call continues the message."""
        self._last = turn
        self.parent = turn.sample_id
        self.prompt_ids = np.concatenate((turn.prompt_ids, turn.response_ids))

    def end_message(self, text: str) -> None:
        """Adds `text`, the agent's message, which its last calls have completed."""
        self.messages.append(Message("assistant", text))
        self._thinking = self._thinking or holds_thought(text)
