"""Small real tokenizers, with chat templates of the kinds that are in use."""

from functools import cache
from string import printable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TERSE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Qwen3: thoughts stay while the agent uses tools, and go when the user speaks again.
FORGETS_THOUGHTS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_TWO_ROUNDS = (
    "{% for m in messages[-4:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUMBERS_ROUNDS = (
    "{% for m in messages %}<|im_start|>{{ m.role if m.role == 'assistant' else m.role ~ loop.index }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END_TOKEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As Llama 3 (trims) and Gemma (knows neither system nor tool).
TRIMS_AND_ALTERNATES = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As GLM: a turn ends where the next speaker begins.
NEXT_SPEAKER_ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def _finished(backend: Tokenizer, template: str, *, lstrip: bool = False) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False, lstrip=lstrip)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def characters(template: str = CHATML, *, lstrip: bool = False) -> PreTrainedTokenizerFast:
    """One token per character; `lstrip`: the end token eats the white space before it."""
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(("<unk>", *printable))}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return _finished(backend, template, lstrip=lstrip)


@cache
def _trained() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    sentences = [
        "What is 3 + 4?\n\nThe answer is 7.\n",
        "user\nsystem\nassistant\ntool\n",
        "Let me count\n\n\n 12 12 12 calc(12*12)",
        "The verifier says: the answer is wrong,\nthe solver says: the answer is right.",
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(sentences * 4, trainer)
    return backend.to_str()


def byte_pairs(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few sentences: merges over line breaks and spaces, and partial characters."""
    return _finished(Tokenizer.from_str(_trained()), template)
