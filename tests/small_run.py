"""A folder with all that a small run needs: a tiny random model, tasks, a workflow, and the config."""

from pathlib import Path
from string import printable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<end>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<unk>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

CODE = '''
from flexmarl.agents import workflow
from flexmarl.records import Task
from flexmarl.tasks import task_generator


@task_generator("sums")
def sums(seed, index, split, *, leak=False):
    number = index if split == "train" or leak else -index - 1
    return Task(input_id=f"{split}-{index}", prompt=f"{number + 1}+{abs(number) + 1}", reference=str(index))


@workflow("echo")
async def echo(task, team):
    """Who says more digits is better: a random model has something to learn from the first step."""
    reply = None
    for seat in team:
        reply = await seat.act(task.prompt)
        seat.reward(sum(letter.isdigit() for letter in reply.text) / 8)
    team.report(success=sum(letter.isdigit() for letter in reply.text) / 8)


@workflow("talk")
async def talk(task, team):
    """As echo, but each speaks twice; who has a memory goes on with its conversation."""
    digits = 0
    for seat in team:
        texts = [(await seat.act(task.prompt)).text for _ in range(2)]
        digits = sum(letter.isdigit() for text in texts for letter in text)
        seat.reward(digits / 16)
    team.report(success=digits / 16)
'''

CONFIG = """
name: sums
seed: 3
steps: 2
code: [tasks.py]
tasks: {type: generator, name: sums}
policies:
  one: &policy
    model: model
    engine: {type: embedded, slots: 16, max_len: 64}
    training: {micro_batch: 16, optimizer: {learning_rate: 1e-2}}
team:
  workflow: {type: custom, name: echo}
  agents:
    solver: {policy: one, system: solve, sampling: {max_tokens: 8}}
batch: {groups: 4, episodes: 4}
rollout: {inter_query: 4, intra_query: 4}
evaluate: {tasks: 4}
checkpoint: {every: 1}
"""


def character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *sorted(printable[:95])))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=CHAT_TEMPLATE,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[2:6]),
    )


def write_model(folder: Path, **shape: int) -> None:
    """Writes a random model and its tokenizer. `shape` replaces sizes of the model."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 48, **shape}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            **sizes,
            vocab_size=len(tokenizer),
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def write_team(folder: Path) -> Path:
    """Returns the config."""
    write_model(folder / "model")
    (folder / "tasks.py").write_text(CODE, encoding="utf-8")
    config = folder / "run.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    return config
