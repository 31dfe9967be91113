"""Decides how `POST /v1/messages` is read and answered (Anthropic's API, which Claude Code speaks)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, WithJsonSchema

from flexmarl.agents.chat import SaidCall
from flexmarl.gateway.dialects.base import (
    Answer,
    Ask,
    Body,
    Content,
    Cut,
    Frame,
    Refused,
    ReplyChoice,
    Said,
    asked_of,
    checked,
    ignored_fields,
    offered,
    text_of_parts,
)
from flexmarl.gateway.dialects.chat_completions import chosen

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ROLES = {"system": "system", "ctx": "system", "developer": "system", "user": "user", "msg": "user"}
"""Claude Code sends `system`, `ctx` and `msg` in the middle of the list too."""


MessageObject = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": TypeAdapter(Content).json_schema()},
            "required": ["role", "content"],
        }
    ),
]
"""A message, by its usual form."""


class MessagesBody(Body):
    """The fields that are read."""

    model: str = ""
    messages: list[MessageObject] = Field(min_length=1)
    system: Content = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class Messages:
    """The dialect of Anthropic's messages."""

    name = "messages"
    body = MessagesBody
    heartbeat = 'event: ping\ndata: {"type": "ping"}\n\n'

    def ask(self, body: Any) -> Ask:
        """Reads a body."""
        read = checked(MessagesBody, body)
        messages: list[Said] = []
        if system := text_of_parts(read.system, "system"):
            messages.append(Said(role="system", text=system))
        for place, message in enumerate(read.messages):
            messages += _messages(message, f"messages.{place}")
        prefill = ""
        if messages and messages[-1].role == "assistant" and not messages[-1].calls:
            prefill = messages.pop().text
        if not any(message.role != "system" for message in messages):
            raise Refused("messages: must hold a message of the user")
        tools = tuple(_tool(tool, f"tools.{place}") for place, tool in enumerate(read.tools or ()))
        choice = read.tool_choice or {}
        asks = {"auto": None, "any": "required", "none": "none", "tool": {"name": choice.get("name")}}
        if (kind := choice.get("type", "auto")) not in asks:
            raise Refused(f"tool_choice.type: {kind!r} is none of {', '.join(asks)}")
        may_call, must_call = chosen(asks[kind], [tool.name for tool in tools])
        if prefill and must_call is not None:
            raise Refused("tool_choice: a reply cannot both begin with the last message and call a tool")
        return Ask(
            model=read.model,
            messages=tuple(messages),
            tools=tools if may_call else (),
            must_call=must_call,
            prefill=prefill,
            max_tokens=read.max_tokens,
            stop=tuple(text for text in read.stop_sequences or () if text),
            stream=bool(read.stream),
            asked=asked_of(body, ("temperature", "top_p", "top_k")),
            ignored=ignored_fields(MessagesBody, body),
        )

    def whole(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The object `message`."""
        (choice,) = answer.choices
        blocks: list[dict[str, Any]] = []
        if choice.thought:
            blocks.append({"type": "thinking", "thinking": choice.thought, "signature": choice.signature})
        if choice.text or not choice.calls:
            blocks.append({"type": "text", "text": choice.text})
        blocks += [{**_use(call), "input": json.loads(call.arguments)} for call in choice.calls]
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": choice.tokens}
        return _head(answer) | _end(choice) | {"content": blocks, "usage": usage}

    def frames(self, ask: Ask, answer: Answer, cut: Cut) -> Iterator[Frame]:
        """`message_start` with the usage, blocks with their deltas, `message_delta`, `message_stop`."""
        (choice,) = answer.choices
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        begun = _head(answer) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=begun)
        for place, (block, deltas) in enumerate(_blocks(choice, cut)):
            yield _event("content_block_start", index=place, content_block=block)
            for delta, characters in deltas:
                yield _event("content_block_delta", characters, index=place, delta=delta)
            yield _event("content_block_stop", index=place)
        yield _event("message_delta", delta=_end(choice), usage={"output_tokens": choice.tokens})
        yield _event("message_stop")

    def error(self, refused: Refused) -> dict[str, Any]:
        """Anthropic's error."""
        kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        text = refused.text
        if refused.too_long:  # Claude Code compacts its history on these words.
            text = "prompt is too long: {} tokens > {} maximum".format(*refused.too_long)
        return {"type": "error", "error": {"type": kind, "message": text}}

    def error_frame(self, refused: Refused) -> str:
        """The event `error`."""
        return Frame(self.error(refused), "error").text


def _blocks(choice: ReplyChoice, cut: Cut) -> Iterator[tuple[dict[str, Any], list[tuple[dict[str, Any], int]]]]:
    """Each block as it begins, with the deltas that fill it and their characters."""
    if choice.thought:
        deltas = [({"type": "thinking_delta", "thinking": piece}, len(piece)) for piece in cut(choice.thought)]
        signed = ({"type": "signature_delta", "signature": choice.signature}, 0)
        yield {"type": "thinking", "thinking": "", "signature": ""}, [*deltas, signed]
    if choice.text or not choice.calls:
        yield (
            {"type": "text", "text": ""},
            [({"type": "text_delta", "text": piece}, len(piece)) for piece in cut(choice.text)],
        )
    for call in choice.calls:
        parts = [({"type": "input_json_delta", "partial_json": piece}, len(piece)) for piece in cut(call.arguments)]
        yield {**_use(call), "input": {}}, parts


def _event(kind: str, characters: int = 0, **fields: Any) -> Frame:
    return Frame({"type": kind, **fields}, kind, characters)


def _use(call: SaidCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.call_id, "name": call.name}


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model}


def _end(choice: ReplyChoice) -> dict[str, Any]:
    if choice.stopped_by:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if choice.calls else {"stop": "end_turn", "length": "max_tokens"}[choice.finish]
    return {"stop_reason": reason, "stop_sequence": choice.stopped_by or None}


def _tool(tool: Mapping[str, Any], where: str) -> Any:
    if tool.get("type", "custom") != "custom":
        raise Refused(f"{where}: a tool of type {tool.get('type')!r} runs at its provider; offer one with input_schema")
    return offered(tool.get("name"), tool.get("description"), tool.get("input_schema"), where)


def _messages(message: Mapping[str, Any], where: str) -> list[Said]:
    """The messages that one of Anthropic's stands for: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return [_assistant(content, where)]
    if role not in _ROLES:
        raise Refused(f"{where}.role: {role!r} is none of user, assistant, {', '.join(_ROLES)}")
    said: list[Said] = []
    texts: list[Any] = []
    for block in _blocks_of(content):
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            text = text_of_parts(block.get("content"), f"{where}.content")
            text = f"error: {text}" if block.get("is_error") else text
            said.append(Said(role="tool", text=text, call_id=str(block.get("tool_use_id", ""))))
        else:
            texts.append(block)
    if texts:
        said.append(Said(role=_ROLES[role], text=text_of_parts(texts, f"{where}.content")))  # type: ignore[arg-type]
    return said


def _assistant(content: Any, where: str) -> Said:
    texts: list[Any] = []
    calls: list[SaidCall] = []
    thought, issued = None, ""
    for block in _blocks_of(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "thinking":
            thought, issued = str(block.get("thinking", "")), str(block.get("signature", ""))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
            calls.append(SaidCall(str(block.get("name", "")), arguments, str(block.get("id", ""))))
        elif kind != "redacted_thinking":
            texts.append(block)
    text = text_of_parts(texts, f"{where}.content")
    return Said(role="assistant", text=text, thought=thought, calls=tuple(calls), issued=issued)


def _blocks_of(content: Any) -> Sequence[Any]:
    is_list = isinstance(content, Sequence) and not isinstance(content, str)
    return content if is_list else [{"type": "text", "text": content}]
