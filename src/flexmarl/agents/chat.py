"""Chat prompts on a Hugging Face tokenizer, token by token.

A prompt that continues a conversation is never tokenised again. It is three runs of ids, end to end:

    previous prompt | sampled response | suffix: end of turn, new message, generation prompt
    as it was sent  | as it was sampled| the only part that is tokenised now

`extension.py` checks at start-up for which messages the chat template would say the same; for the others the prompt is
rendered anew. In both, what a message spells is text: `control_tokens.py`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flexmarl.agents.control_tokens import ControlTokens
from flexmarl.agents.extension import Extension, Message, Role, Template, check_extension
from flexmarl.errors import ConfigError
from flexmarl.records import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEMBERED = 4096
"""Rendered prompts and suffixes kept per renderer: the samples of a group share theirs; older ones are made again."""


class ChatRenderer:
    """Prompt ids of conversations on one tokenizer. Stateless apart from a cache; shared by all agents of a policy."""

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
        added, around = tokenizer.added_tokens_decoder.values(), self._template.around()
        special = {token.content for token in added if token.special}
        # Some mark who speaks by tokens that are not called special, as DeepSeek's `<｜User｜>`.
        control = special | {token.content for token in added if token.content in around}
        backend: Any = tokenizer.backend_tokenizer
        self._tokens = ControlTokens(backend, control, whose=name)
        self.extension: Extension = check_extension(self._template, self.encode, special)
        """Which messages may extend a conversation, and why the others may not."""
        eos: Any = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(sorted(self.extension.end_ids.union([] if eos is None else [eos])))
        """The ids on which sampling must stop: those that end a turn in the template, and the tokenizer's end."""
        if not self.stop_ids:
            raise ConfigError(f"the tokenizer {name!r} has no end token; set its `eos_token`")
        self._prompt = lru_cache(REMEMBERED)(self._render)
        self._suffix = lru_cache(REMEMBERED)(self._render_suffix)

    def __reduce__(self) -> "tuple[type[ChatRenderer], tuple[PreTrainedTokenizerBase]]":
        """Another process makes it anew from the tokenizer."""
        return ChatRenderer, (self._tokenizer,)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; control tokens written in it become their ids, none is added."""
        return self._tokens.encode(text)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Text of ids without special tokens."""
        return self._tokens.decode(ids.tolist() if isinstance(ids, np.ndarray) else ids)

    def render(self, messages: Sequence[Message], *, trust_special: bool = False) -> IntArray:
        """[P] prompt of a conversation, rendered anew, with the generation prompt. Do not write to it.

        What contents spell is text, never a control token, unless `trust_special`.
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
        """[P'] previous prompt + sampled response + suffix; None where the template would say something else.

        `thinking`: some response of the conversation holds a thought (see `holds_thought`), which many templates strip.
        """
        if self.extension.why_not(message.role, thinking=thinking):
            return None
        suffix = self._suffix(message, trust_special)
        last = int(response_ids[-1]) if len(response_ids) else None
        if last == suffix[0]:
            suffix = suffix[1:]
        elif last in self.stop_ids:  # Another end than the template's: nothing it would write.
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
    """Whether a response holds a thought in the form that chat templates know, which they may strip from history."""
    return "</think>" in text


__all__ = ["ChatRenderer", "Message", "Role", "holds_thought"]
