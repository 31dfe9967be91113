"""Tokenizer for the math team: one token per printable ASCII character, one per role, and one that ends a message."""

from string import printable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"
SPECIAL = (PAD, END, *ROLES, UNKNOWN)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{{ '%-10s' % message.content if message.role == 'tool' else message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Only ever appends, so the prompt of a later turn extends the ids of the earlier ones. Results of tools have a fixed
width, so that each digit of an answer is at one distance from the digit it copies: much easier for so small a model."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, ready to be saved beside the model."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *sorted(printable[:95])))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )
