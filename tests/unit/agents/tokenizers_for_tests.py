"""Small real tokenizers, with chat templates of the kinds that are in use."""

from functools import cache
from pathlib import Path
from string import printable
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flexmarl.agents.chat import ChatRenderer


@cache
def with_renderer(tokenizer: PreTrainedTokenizerFast) -> tuple[ChatRenderer, PreTrainedTokenizerFast]:
    """Makes the renderer when a test first asks for it: every process of the tests reads every file."""
    return ChatRenderer(tokenizer), tokenizer


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
# As Qwen: results of tools lie in the user's turn, between marks; and all in one expression, as many templates have it.
RESULTS_IN_USER_TURN = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>user\n<|tool|>\n' + m.content + '\n</tool>' + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Nothing between the role prompt and the question: a spelling may lie across the two.
SIDE_BY_SIDE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% else %}"
    "{{ m.content }}<|{{ m.role }}|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DATA = Path(__file__).parents[2] / "data" / "chat_templates"
SPECIAL = ("<|im_start|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
ADDED = ("</tool>", "<think>", "</think>")


def _finished(
    backend: Tokenizer, template: str, *, lstrip: bool = False, normalized: bool = False
) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(name, special=True, normalized=normalized) for name in SPECIAL])
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=normalized, lstrip=lstrip)])
    # As Qwen's and DeepSeek's: not special, but of those the templates write all but the thought around messages.
    backend.add_tokens([AddedToken(name, special=False, normalized=normalized) for name in ADDED])
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


def pieces(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Unigram with spaces as SentencePiece has them. Its model has control tokens too, and would choose them first."""
    scored = [
        ("<unk>", 0.0),
        ("<|im_end|>", 0.0),
        ("</tool>", 0.0),
        ("\u2581", -2.0),
        ("the", -3.0),
        ("\u2581the", -3.5),
    ]
    backend = Tokenizer(models.Unigram([*scored, *((c, -5.0) for c in printable if c != " ")], unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return _finished(backend, template)


def lower_case(template: str = CHATML) -> PreTrainedTokenizerFast:
    """WordPiece that lowers all it reads before it looks for control tokens, so `<|IM_END|>` is one too."""
    letters = sorted({*printable.lower()} - {*" \t\n\r\x0b\x0c"})
    vocabulary = {piece: i for i, piece in enumerate(("[UNK]", *letters, *(f"##{letter}" for letter in letters)))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _finished(backend, template, normalized=True)


def words(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A vocabulary of words, one of which is the end token."""
    vocabulary = {word: i for i, word in enumerate(("<unk>", "<|im_end|>", *"ab1.", "user", "system", "assistant"))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(backend, template)


class Family(NamedTuple):
    """A family of models: its real chat template, and the tokens of its tokenizer that play a part in calls."""

    template: str
    """File in tests/data/chat_templates, without its ending."""
    special: tuple[str, ...]
    end: str
    """The tokenizer's end token."""
    added: tuple[str, ...] = ()
    """Tokens that are not flagged as special."""
    begin: str | None = None


FAMILIES = {
    "qwen3": Family(
        "qwen3",
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        "<|im_end|>",
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    "qwen3_coder": Family(
        "qwen3_coder",
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        "<|im_end|>",
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    # As Hermes 2 Pro on Llama 3 has them: the marks of calls are special tokens, which plain decoding leaves out.
    "hermes_marks": Family(
        "qwen3", ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"), "<|im_end|>", ("<think>", "</think>")
    ),
    "llama3": Family(
        "llama3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|begin_of_text|>"),
        "<|eot_id|>",
        begin="<|begin_of_text|>",
    ),
    "mistral": Family(
        "mistral_nemo",
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[TOOL_CALLS]",
        ),
        "</s>",
        begin="<s>",
    ),
    "smollm2": Family("smollm2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    # Gemma's tokenizer calls <eos> its end; the model ends its turns as the template does.
    "gemma2": Family("gemma2", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", begin="<bos>"),
}


def family(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a family's template and tokens."""
    of = FAMILIES[name]
    backend = Tokenizer.from_str(_trained())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in of.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in of.added])
    template = (DATA / f"{of.template}.jinja").read_text("utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=of.end, bos_token=of.begin, chat_template=template
    )
