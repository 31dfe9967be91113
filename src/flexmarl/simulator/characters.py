"""Chat on a tokenizer with one token per character, for policies whose model is not on this machine."""

from functools import cache
from string import printable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flexmarl.agents import ChatRenderer

END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def character_renderer() -> ChatRenderer:
    """What a prompt costs can be counted by eye; a character that is not printable ASCII is the unknown token."""
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(("<unk>", *printable))}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    marks = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", END)
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return ChatRenderer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, chat_template=CHAT_TEMPLATE))
