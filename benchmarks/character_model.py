"""A tiny model with a character tokenizer whose end token is outside of its vocabulary: it never ends early."""

from pathlib import Path

from common import tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"


def save_character_model(folder: Path) -> None:
    """Saves model and tokenizer; the end token is one past the model's vocabulary, so it is never sampled."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {
        token: index for index, token in enumerate(["<|pad|>", "<|user|>", "<|assistant|>", *characters, END])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=(
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
            "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )
    tiny_model(len(vocabulary) - 1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
