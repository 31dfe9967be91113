"""Readers of streams: they put the events of each dialect together, as the SDKs do, without code of the gateway."""

import json
from typing import Any


def joined_chat(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream of chat completions: content, reasoning_content, tool_calls, finish_reason."""
    choices: dict[int, dict[str, Any]] = {}
    for one in events:
        for part in one["choices"]:
            made = choices.setdefault(part["index"], {"content": "", "reasoning": "", "calls": [], "finish": None})
            delta = part["delta"]
            made["content"] += delta.get("content") or ""
            made["reasoning"] += delta.get("reasoning_content") or ""
            made["finish"] = part["finish_reason"] or made["finish"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    made["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                made["calls"][call["index"]]["arguments"] += call["function"].get("arguments", "")
    return [choices[index] for index in sorted(choices)]


def joined_messages(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream of Anthropic's: content blocks, stop_reason, stop_sequence and usage."""
    blocks: list[dict[str, Any]] = []
    message: dict[str, Any] = {}
    for one in events:
        match one["type"]:
            case "message_start":
                message = dict(one["message"])
            case "content_block_start":
                blocks.append(dict(one["content_block"]) | {"json": ""})
            case "content_block_delta":
                block, delta = blocks[one["index"]], one["delta"]
                block["json"] += delta.get("partial_json", "")
                for key in ("text", "thinking", "signature"):
                    if key in delta:
                        block[key] += delta[key]
            case "message_delta":
                message |= one["delta"]
                message["usage"] = message["usage"] | one["usage"]
    for block in blocks:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return message | {"content": blocks}


def joined_response(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream of responses, put together from their deltas alone."""
    items: list[dict[str, Any]] = []
    for one in events:
        kind = one["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(dict(one["item"]))
        elif kind == "content_part.added":
            items[one["output_index"]]["content"] = [dict(one["part"])]
        elif kind == "output_text.delta":
            items[one["output_index"]]["content"][0]["text"] += one["delta"]
        elif kind == "function_call_arguments.delta":
            items[one["output_index"]]["arguments"] += one["delta"]
    return items
