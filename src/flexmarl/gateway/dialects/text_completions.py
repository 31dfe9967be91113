"""Decides how `POST /v1/completions` is read and answered: a prompt in words or in ids, which the model continues.

It is for programs that write their prompts themselves, token by token. Nothing is rendered, and a reply is the text of
the sampled ids, calls and thoughts included.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from flexmarl.errors import is_unicode
from flexmarl.gateway.dialects.base import (
    MOST_CHOICES,
    Answer,
    Ask,
    Cut,
    Frame,
    Refused,
    ReplyChoice,
    SampledBody,
    asked_of,
    checked,
    ignored_fields,
)
from flexmarl.gateway.dialects.chat_completions import OpenAiDialect, usage_of


class CompletionBody(SampledBody):
    """The fields that are read."""

    model: str = ""
    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None


class TextCompletions(OpenAiDialect):
    """The dialect of completions."""

    name = "completions"
    body = CompletionBody

    def ask(self, body: Any) -> Ask:
        """Reads a body."""
        read = checked(CompletionBody, body)
        if read.logprobs:
            raise Refused("logprobs: the engines report the sampled tokens alone; use 0, or leave it out")
        if read.echo:
            raise Refused("echo: the prompt is not sent back; use false")
        if read.suffix:
            raise Refused("suffix: models continue a prompt; leave it out")
        if (read.best_of or 1) > (read.n or 1):
            raise Refused(f"best_of: {read.best_of} replies would be sampled for {read.n or 1}; use n")
        stop = [read.stop] if isinstance(read.stop, str) else read.stop or []
        return Ask(
            model=read.model,
            prompt=_prompt(read.prompt),
            max_tokens=read.max_tokens,
            stop=tuple(text for text in stop if text),
            n=read.n or 1,
            stream=bool(read.stream),
            usage=bool((read.stream_options or {}).get("include_usage")),
            logprobs=read.logprobs is not None,
            ids=bool(read.return_token_ids),
            store=False,
            asked=asked_of(body, tuple(SampledBody.model_fields)),
            ignored=ignored_fields(CompletionBody, body),
        )

    def whole(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The object `text_completion`."""
        choices = [
            {
                "index": index,
                "text": choice.text,
                "finish_reason": choice.finish,
                "logprobs": _logprobs(choice) if ask.logprobs else None,
                **({"token_ids": [*choice.ids]} if ask.ids else {}),
            }
            for index, choice in enumerate(answer.choices)
        ]
        ids = {"prompt_token_ids": [*answer.prompt_ids]} if ask.ids else {}
        return {**_head(answer), "choices": choices, "usage": usage_of(answer), **ids}

    def frames(self, ask: Ask, answer: Answer, cut: Cut) -> Iterator[Frame]:
        """The pieces of each choice after the other, then the usage if it was asked for, then `[DONE]`."""
        head = _head(answer)

        def chunk(index: int, text: str, **more: Any) -> Frame:
            choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None, **more}
            return Frame({**head, "choices": [choice]}, characters=len(text))

        for index, choice in enumerate(answer.choices):
            for piece in cut(choice.text):
                yield chunk(index, piece)
            more: dict[str, Any] = {"finish_reason": choice.finish}
            if ask.logprobs:
                more["logprobs"] = _logprobs(choice)
            if ask.ids:
                more["token_ids"] = [*choice.ids]
            yield chunk(index, "", **more)
        if ask.usage:
            yield Frame({**head, "choices": [], "usage": usage_of(answer)})
        yield Frame("[DONE]")


def _prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | tuple[int, ...]:
    """The one prompt of a body. Raises Refused."""
    one: str | list[int] = prompt  # type: ignore[assignment]
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
        if len(prompt) > 1:
            raise Refused(f"prompt: a request has one prompt, got {len(prompt)}; send them one by one")
        one = prompt[0]  # type: ignore[assignment]
    if not one:
        raise Refused("prompt: must not be empty")
    if isinstance(one, str):
        if not is_unicode(one):
            raise Refused("prompt: holds half a surrogate pair, which is no character")
        return one
    return tuple(one)


def _logprobs(choice: ReplyChoice) -> Mapping[str, Any]:
    offsets, place = [], 0
    for text, _ in choice.pieces:
        offsets.append(place)
        place += len(text)
    return {
        "tokens": [text for text, _ in choice.pieces],
        "token_logprobs": [logprob for _, logprob in choice.pieces],
        "text_offset": offsets,
        "top_logprobs": None,
    }


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"cmpl-{answer.name}", "object": "text_completion", "created": answer.created, "model": answer.model}
