"""Chat prompts on a Hugging Face tokenizer, token by token.

A prompt that continues a conversation is never tokenised again. It is three runs of ids, end to end:

    previous prompt | sampled response | suffix: end of turn, new message, generation prompt
    as it was sent  | as it was sampled| the only part that is tokenised now

`extension.py` checks at start-up for which messages the chat template would say the same; for the others the prompt is
rendered anew.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flexmarl.agents.extension import Extension, Message, Role, Template, check_extension
from flexmarl.errors import ConfigError
from flexmarl.records import IntArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

REMEMBERED = 4096
"""Rendered prompts and suffixes kept per renderer: the samples of a group share theirs; older ones are made again."""


class ChatRenderer:
    """Prompt ids of conversations on one tokenizer. Stateless apart from a cache; shared by all agents of a policy."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise ConfigError(f"the tokenizer {name!r} has no chat template; set `tokenizer.chat_template` and save it")
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"the tokenizer {name!r} has no `tokenizers` backend; save it as tokenizer.json first")
        # A copy: truncation and padding are state of the backend, and others may set them on theirs.
        backend: Any = tokenizer.backend_tokenizer
        self._backend: Tokenizer = copy.deepcopy(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._template = Template(
            lambda messages, generate: str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
            ),
            name=name,
        )
        self.extension: Extension = check_extension(self._template, self.encode, special)
        """Which messages may extend a conversation, and why the others may not."""
        eos: Any = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(sorted(self.extension.end_ids.union([] if eos is None else [eos])))
        """The ids on which sampling must stop: those that end a turn in the template, and the tokenizer's end."""
        if not self.stop_ids:
            raise ConfigError(f"the tokenizer {name!r} has no end token; set its `eos_token`")
        self._prompt = lru_cache(REMEMBERED)(self._render)
        self._suffix = lru_cache(REMEMBERED)(self._render_suffix)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written in it become their ids, none is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Text of ids without special tokens."""
        return self._backend.decode(ids.tolist() if isinstance(ids, np.ndarray) else ids, skip_special_tokens=True)

    def render(self, messages: Sequence[Message]) -> IntArray:
        """[P] prompt of a conversation, rendered anew, with the generation prompt. Do not write to it."""
        return self._prompt(tuple(messages))

    def extend(
        self, prompt_ids: IntArray, response_ids: IntArray, message: Message, *, thinking: bool = False
    ) -> IntArray | None:
        """[P'] previous prompt + sampled response + suffix; None where the template would say something else.

        `thinking`: some response of the conversation holds a thought (see `holds_thought`), which many templates strip.
        """
        if self.extension.why_not(message.role, thinking=thinking):
            return None
        suffix = self._suffix(message)
        last = int(response_ids[-1]) if len(response_ids) else None
        if last == suffix[0]:
            suffix = suffix[1:]
        elif last in self.stop_ids:  # Another end than the template's: nothing it would write.
            return None
        return np.concatenate((prompt_ids, response_ids, suffix))

    def _render(self, messages: tuple[Message, ...]) -> IntArray:
        return self._frozen(self._template.text(messages))

    def _render_suffix(self, message: Message) -> IntArray:
        return self._frozen(self._template.suffix(message))

    def _frozen(self, text: str) -> IntArray:
        ids = np.asarray(self.encode(text), dtype=np.int32)
        ids.flags.writeable = False
        return ids


def holds_thought(text: str) -> bool:
    """Whether a response holds a thought in the form that chat templates know, which they may strip from history."""
    return "</think>" in text


__all__ = ["ChatRenderer", "Message", "Role", "holds_thought"]
