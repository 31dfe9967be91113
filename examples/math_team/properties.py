"""What a seed model of the math team does, sampled at temperature 1: a table to tune the cold start by."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from examples.math_team.demonstrations import Message, called, check, estimate, said, solve
from examples.math_team.tasks import LEVELS, draw, evaluate
from examples.math_team.workflow import misread, question, review


def properties(
    model: Any, tokenizer: PreTrainedTokenizerBase, rng: random.Random, number: int = 400
) -> Iterator[tuple[str, float]]:
    """(what, share of `number` tries), level by level."""
    torch.manual_seed(rng.getrandbits(32))
    for level in LEVELS:
        asked = [draw(rng, level) for _ in range(number)]
        right = [str(evaluate(prompt)) for prompt in asked]
        begun = [solve(question(prompt)) for prompt in asked]
        said_first = sample(model, tokenizer, begun)
        calls = [text.startswith("calc(") for text in said_first]
        direct = [text == value for text, value, call in zip(said_first, right, calls, strict=True) if not call]
        yield f"{level}: calls the calculator", share(calls)
        yield f"{level}: direct answer is right", share(direct)
        copies = [
            text == f"calc({prompt})" for text, prompt, call in zip(said_first, asked, calls, strict=True) if call
        ]
        yield f"{level}: call repeats the question", share(copies)
        told = [
            [*messages, said(f"calc({prompt})"), {"role": "tool", "content": value}]
            for messages, prompt, value in zip(begun, asked, right, strict=True)
        ]
        yield f"{level}: answer repeats the result", agreement(sample(model, tokenizer, told), right)
        for case, approve, reviews in cases(rng, asked):
            verdicts = sample(model, tokenizer, [check(text) for text in reviews])
            yield f"{level}: verdict is right, {case}", agreement(verdicts, ["yes" if approve else "no"] * len(reviews))


def cases(rng: random.Random, asked: Sequence[str]) -> Iterator[tuple[str, bool, list[str]]]:
    """What a verifier may see: (case, whether the answer is right, reviews)."""
    unworked = [(prompt, str(evaluate(prompt)), estimate(prompt)) for prompt in asked]
    yield "right answer", True, [review(prompt, [], right) for prompt, right, _ in unworked]
    yield "estimate", False, [review(prompt, [], guess) for prompt, right, guess in unworked if guess != right]
    worked = [(prompt, called(prompt), called(misread(rng, prompt))) for prompt in asked]
    yield "right call", True, [review(prompt, [use], use.result) for prompt, use, _ in worked]
    yield "wrong call", False, [review(prompt, [slip], slip.result) for prompt, _, slip in worked]
    yield "result badly copied", False, [review(prompt, [use], misread(rng, use.result)) for prompt, use, _ in worked]


@torch.no_grad()
def sample(model: Any, tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """What a Hugging Face model says next in each of them, up to the end of its turn or of a call."""
    if not conversations:
        return []
    prompts = [
        str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
        for messages in conversations
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(")")]
    length = batch["input_ids"].shape[1]
    ids = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=16, eos_token_id=ends)
    return tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)


def agreement(texts: Sequence[str], wanted: Sequence[str]) -> float:
    """Share of equal ones."""
    return share([text == want for text, want in zip(texts, wanted, strict=True)])


def share(events: Sequence[bool]) -> float:
    """Mean; NaN if there are none."""
    return sum(events) / len(events) if events else float("nan")
