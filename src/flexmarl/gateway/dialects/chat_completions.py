"""Decides how `POST /v1/chat/completions` is read and answered (OpenAI's first API, which most programs speak)."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from flexmarl.agents.chat import SaidCall
from flexmarl.gateway.dialects.base import (
    MOST_CHOICES,
    Answer,
    Ask,
    Body,
    Content,
    Cut,
    Frame,
    Refused,
    ReplyChoice,
    Said,
    SampledBody,
    asked_of,
    checked,
    ignored_fields,
    offered,
    text_of_parts,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatMessage(Body):
    """One message of the body."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str = ""
    reasoning_content: str | None = None


class ChatBody(SampledBody):
    """The fields that are read."""

    model: str = ""
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    audio: Any = None
    modalities: list[str] | None = None


class OpenAiDialect:
    """OpenAI's errors, and what is sent while a client waits."""

    heartbeat = ": waiting\n\n"

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an error."""
        kind = "invalid_request_error" if refused.status < 500 else "server_error"
        return {"error": {"message": refused.text, "type": kind, "param": None, "code": refused.code}}

    def error_frame(self, refused: Refused) -> str:
        """An event that the SDK raises."""
        return Frame(self.error(refused)).text


class ChatCompletions(OpenAiDialect):
    """The dialect of chat completions."""

    name = "chat"
    body = ChatBody

    def ask(self, body: Any) -> Ask:
        """Reads a body."""
        read = checked(ChatBody, body)
        if read.top_logprobs:
            raise Refused("top_logprobs: the engines report the sampled tokens alone; use 0, or leave it out")
        if (read.response_format or {}).get("type", "text") != "text":
            raise Refused(
                f"response_format: {read.response_format!r} needs an engine with grammars, and none has them; use text"
            )
        if read.audio is not None or "audio" in (read.modalities or ()):
            raise Refused("audio: is not served; use modalities ['text']")
        tools = tuple(_tool(tool, f"tools.{place}") for place, tool in enumerate(read.tools or ()))
        may_call, must_call = chosen(read.tool_choice, [tool.name for tool in tools])
        stop = [read.stop] if isinstance(read.stop, str) else read.stop or []
        limits = [limit for limit in (read.max_tokens, read.max_completion_tokens) if limit is not None]
        return Ask(
            model=read.model,
            messages=tuple(_message(one, place) for place, one in enumerate(read.messages)),
            tools=tools if may_call else (),
            must_call=must_call,
            max_tokens=min(limits, default=None),
            stop=tuple(text for text in stop if text),
            n=read.n or 1,
            stream=bool(read.stream),
            usage=bool((read.stream_options or {}).get("include_usage")),
            logprobs=bool(read.logprobs),
            ids=bool(read.return_token_ids),
            asked=asked_of(body, tuple(SampledBody.model_fields)),
            ignored=ignored_fields(ChatBody, body),
        )

    def whole(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The object `chat.completion`."""
        choices = [
            {
                "index": index,
                "message": _said(choice),
                "finish_reason": finish_of(choice),
                "logprobs": _logprobs(choice) if ask.logprobs else None,
                **({"token_ids": [*choice.ids]} if ask.ids else {}),
            }
            for index, choice in enumerate(answer.choices)
        ]
        ids = {"prompt_token_ids": [*answer.prompt_ids]} if ask.ids else {}
        return {**_head(answer, "chat.completion"), "choices": choices, "usage": usage_of(answer), **ids}

    def frames(self, ask: Ask, answer: Answer, cut: Cut) -> Iterator[Frame]:
        """The chunks, each choice after the other, then the usage if it was asked for, then `[DONE]`."""
        head = _head(answer, "chat.completion.chunk")

        def chunk(index: int, delta: Mapping[str, Any], characters: int = 0, **more: Any) -> Frame:
            choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None, **more}
            return Frame({**head, "choices": [choice]}, characters=characters)

        for index, choice in enumerate(answer.choices):
            yield chunk(index, {"role": "assistant", "content": ""})
            for piece in cut(choice.thought):
                yield chunk(index, {"reasoning_content": piece}, len(piece))
            for piece in cut(choice.text):
                yield chunk(index, {"content": piece}, len(piece))
            for place, call in enumerate(choice.calls):
                begun = {"index": place, "id": call.call_id, "type": "function"}
                yield chunk(index, {"tool_calls": [begun | {"function": {"name": call.name, "arguments": ""}}]})
                for piece in cut(call.arguments):
                    part = {"index": place, "function": {"arguments": piece}}
                    yield chunk(index, {"tool_calls": [part]}, len(piece))
            more: dict[str, Any] = {"finish_reason": finish_of(choice)}
            if ask.logprobs:
                more["logprobs"] = _logprobs(choice)
            if ask.ids:
                more["token_ids"] = [*choice.ids]
            yield chunk(index, {}, **more)
        if ask.usage:
            yield Frame({**head, "choices": [], "usage": usage_of(answer)})
        yield Frame("[DONE]")


def chosen(choice: Any, names: list[str]) -> tuple[bool, str | None]:
    """The meaning of `tool_choice`: (whether tools may be called, the tool that must be)."""
    if choice in (None, "auto"):
        return True, None
    if choice == "none":
        return False, None
    if choice in ("required", "any"):
        named = ""
    else:
        function = choice.get("function", choice) if isinstance(choice, Mapping) else {}
        named = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(named, str) or named not in names:
            raise Refused(f"tool_choice: {choice!r} names none of the tools; there are: {', '.join(names) or 'none'}")
    if not names:
        raise Refused(f"tool_choice: {choice!r}, but there are no tools")
    return True, named


def usage_of(answer: Answer) -> dict[str, Any]:
    """Tokens of prompt and replies."""
    sampled = sum(choice.tokens for choice in answer.choices)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.reused_tokens},
    }


def finish_of(choice: ReplyChoice) -> str:
    """OpenAI's reason why the reply ended."""
    return "tool_calls" if choice.calls else choice.finish


def function_of(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The function of a tool. Raises Refused for a hosted tool."""
    if tool.get("type", "function") != "function":
        raise Refused(f"{where}: a tool of type {tool.get('type')!r} runs at its provider; offer a function")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise Refused(f"{where}.function: must be an object")
    return function


def _tool(tool: Mapping[str, Any], where: str) -> Any:
    function = function_of(tool, where)
    return offered(function.get("name"), function.get("description"), function.get("parameters"), where)


def _message(message: ChatMessage, place: int) -> Said:
    if message.role == "function":
        raise Refused(f"messages.{place}.role: 'function' is out of use; answer calls with role 'tool'")
    return Said(
        role=_ROLES[message.role],  # type: ignore[arg-type]
        text=text_of_parts(message.content, f"messages.{place}.content"),
        thought=message.reasoning_content,
        calls=tuple([_call(*one, place) for one in enumerate(message.tool_calls)]) if message.tool_calls else (),
        call_id=message.tool_call_id,
    )


def _call(number: int, call: Mapping[str, Any], place: int) -> SaidCall:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(f"messages.{place}.tool_calls.{number}.function: needs a name and arguments")
    return SaidCall(function["name"], str(function.get("arguments", "")), str(call.get("id", "")))


def _said(choice: ReplyChoice) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": choice.text if choice.text or not choice.calls else None}
    if choice.thought:
        said["reasoning_content"] = choice.thought
    if choice.calls:
        said["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return said


def _logprobs(choice: ReplyChoice) -> dict[str, Any]:
    tokens = [
        {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}
        for text, logprob in choice.pieces
    ]
    return {"content": tokens, "refusal": None}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.name}", "object": kind, "created": answer.created, "model": answer.model}
