"""Chat renderer on a tokenizer with one token per character, for policies whose model is not on this machine."""

from collections.abc import Sequence
from functools import cache, lru_cache
from string import printable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexmarl.agents import ChatRenderer
from flexmarl.records import IntArray

END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REMEMBERED = 4096
"""Decoded texts that are kept: replies of one length are often equal, and decoding takes a twentieth of a turn."""


class CharacterRenderer(ChatRenderer):
    """A renderer that keeps the texts it has decoded."""

    stands_in = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(tokenizer)
        self._text = lru_cache(REMEMBERED)(self._decode)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process has a renderer of its own."""
        return (character_renderer, ()) if self._base is self else super().__reduce__()

    def decode(self, ids: Sequence[int] | IntArray, kept: frozenset[int] = frozenset()) -> str:
        """Returns the text of the ids, without special tokens, except those `kept`."""
        return super().decode(ids, kept) if kept else self._text(np.asarray(ids, np.int32).tobytes())

    def _decode(self, ids: bytes) -> str:
        return super().decode(np.frombuffer(ids, np.int32))


@cache
def character_renderer() -> ChatRenderer:
    """Returns the renderer, whose tokens can be counted by eye. Only printable ASCII is known to its tokenizer."""
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(("<unk>", *printable))}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    marks = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", END)
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return CharacterRenderer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=CHAT_TEMPLATE)
    )
