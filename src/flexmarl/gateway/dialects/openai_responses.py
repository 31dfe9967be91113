"""Decides how `POST /v1/responses` is read and answered (OpenAI's second API, which its Agents SDK and Codex speak)."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from flexmarl.agents.chat import SaidCall
from flexmarl.gateway.dialects.base import (
    Answer,
    Ask,
    Body,
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
from flexmarl.gateway.dialects.chat_completions import OpenAiDialect, chosen, function_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ResponsesBody(Body):
    """The fields that are read."""

    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    temperature: float | None = None
    top_p: float | None = None


class Responses(OpenAiDialect):
    """The dialect of OpenAI's responses."""

    name = "responses"
    body = ResponsesBody

    def ask(self, body: Any) -> Ask:
        """Reads a body."""
        read = checked(ResponsesBody, body)
        if ((read.text or {}).get("format") or {}).get("type", "text") != "text":
            raise Refused(f"text.format: {read.text!r} needs an engine with grammars, and none has them; use text")
        if read.background or read.conversation is not None:
            raise Refused("background, conversation: are not served; send the items, or previous_response_id")
        tools = tuple(_tool(tool, f"tools.{place}") for place, tool in enumerate(read.tools or ()))
        may_call, must_call = chosen(read.tool_choice, [tool.name for tool in tools])
        items = [{"role": "user", "content": read.input}] if isinstance(read.input, str) else read.input
        system = [Said(role="system", text=read.instructions)] if read.instructions else []
        messages = (*system, *_messages(items))
        if not any(message.role != "system" for message in messages):
            raise Refused("input: must hold a message of the user")
        return Ask(
            model=read.model,
            messages=messages,
            tools=tools if may_call else (),
            must_call=must_call,
            max_tokens=read.max_output_tokens,
            stream=bool(read.stream),
            previous=read.previous_response_id or "",
            store=read.store is not False,
            asked=asked_of(body, ("temperature", "top_p")),
            ignored=ignored_fields(ResponsesBody, body),
        )

    def whole(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The object `response`."""
        (choice,) = answer.choices
        return self._response(ask, answer, choice, items_of(answer, choice))

    def frames(self, ask: Ask, answer: Answer, cut: Cut) -> Iterator[Frame]:
        """`response.created`, the items with their deltas, `response.completed` or `response.incomplete`."""
        (choice,) = answer.choices
        items, number = items_of(answer, choice), 0

        def made(kind: str, characters: int = 0, **fields: Any) -> Frame:
            nonlocal number
            number += 1
            return Frame({"type": kind, "sequence_number": number - 1, **fields}, kind, characters)

        begun = self._response(ask, answer, choice, []) | {"status": "in_progress", "usage": None}
        yield made("response.created", response=begun)
        yield made("response.in_progress", response=begun)
        for place, item in enumerate(items):
            at = {"output_index": place, "item_id": item["id"]}
            yield made("response.output_item.added", output_index=place, item=_begun(item))
            if item["type"] == "message":
                (part,) = item["content"]
                inside = {**at, "content_index": 0}
                yield made("response.content_part.added", **inside, part={**part, "text": ""})
                for piece in cut(part["text"]):
                    yield made("response.output_text.delta", len(piece), **inside, delta=piece, logprobs=[])
                yield made("response.output_text.done", **inside, text=part["text"], logprobs=[])
                yield made("response.content_part.done", **inside, part=part)
            elif item["type"] == "function_call":
                for piece in cut(item["arguments"]):
                    yield made("response.function_call_arguments.delta", len(piece), **at, delta=piece)
                yield made(
                    "response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"]
                )
            yield made("response.output_item.done", output_index=place, item=item)
        whole = self._response(ask, answer, choice, items)
        yield made(f"response.{whole['status']}", response=whole)

    def error_frame(self, refused: Refused) -> str:
        """The event `error`."""
        fields = {"code": refused.code, "message": refused.text, "param": None, "sequence_number": 0}
        return Frame({"type": "error", **fields}, "error").text

    def _response(self, ask: Ask, answer: Answer, choice: ReplyChoice, items: list[dict[str, Any]]) -> dict[str, Any]:
        cut = choice.finish == "length" and not choice.calls
        system = [message.text for message in ask.messages[:1] if message.role == "system"]
        return {
            "id": f"resp_{answer.name}",
            "object": "response",
            "created_at": answer.created,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": system[0] if system else None,
            "model": answer.model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": ask.previous or None,
            "store": ask.store,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.reused_tokens},
                "output_tokens": choice.tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + choice.tokens,
            },
        }


def items_of(answer: Answer, choice: ReplyChoice) -> list[dict[str, Any]]:
    """The output items of a reply."""
    items: list[dict[str, Any]] = []
    if choice.thought:
        summary = [{"type": "summary_text", "text": choice.thought}]
        items.append(
            {"type": "reasoning", "id": f"rs_{answer.name}", "summary": summary, "encrypted_content": choice.signature}
        )
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{choice.signature}",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{call.call_id}",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in choice.calls
    ]
    return items


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    empty = {"message": {"content": []}, "function_call": {"arguments": ""}}
    return {**item, **empty.get(item["type"], {}), "status": "in_progress"}


def _tool(tool: Mapping[str, Any], where: str) -> Any:
    function = function_of(tool, where)
    return offered(function.get("name"), function.get("description"), function.get("parameters"), where)


def _messages(items: list[dict[str, Any]]) -> list[Said]:
    """The messages of items in any mix: reasoning, text and calls of one reply are one message."""
    messages: list[Said] = []
    reply: dict[str, Any] = {}

    def end_reply() -> None:
        if reply:
            calls, texts = tuple(reply.pop("calls", ())), reply.pop("texts", ())
            if calls or texts:  # Thoughts alone are no message.
                messages.append(Said(role="assistant", text="".join(texts), calls=calls, **reply))
            reply.clear()

    for place, item in enumerate(items):
        where, kind = f"input.{place}", item.get("type", "message")
        if kind == "reasoning":
            end_reply()
            parts = [*(item.get("summary") or ()), *(item.get("content") or ())]
            thought = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
            reply.update(thought=thought or None, issued=str(item.get("encrypted_content") or ""))
        elif kind == "message" and item.get("role") == "assistant":
            if reply.get("calls") or reply.get("texts"):
                end_reply()
            reply.setdefault("texts", []).append(text_of_parts(item.get("content"), f"{where}.content"))
            reply["issued"] = reply.get("issued") or str(item.get("id") or "").removeprefix("msg_")
        elif kind == "function_call":
            call = SaidCall(str(item.get("name", "")), str(item.get("arguments", "")), str(item.get("call_id", "")))
            reply.setdefault("calls", []).append(call)
        elif kind == "function_call_output":
            end_reply()
            text = text_of_parts(item.get("output"), f"{where}.output")
            messages.append(Said(role="tool", text=text, call_id=str(item.get("call_id", ""))))
        elif kind == "message" and item.get("role") in _ROLES:
            end_reply()
            role: Any = _ROLES[item["role"]]
            messages.append(Said(role=role, text=text_of_parts(item.get("content"), f"{where}.content")))
        else:
            raise Refused(f"{where}: an item of type {kind!r} with role {item.get('role')!r} is not served")
    end_reply()
    return messages
