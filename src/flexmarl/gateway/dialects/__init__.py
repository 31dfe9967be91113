"""The APIs that programs speak, a file for each. In: a JSON body, and the replies. Out: an Ask, and the answer."""

from collections.abc import Mapping

from flexmarl.gateway.dialects.anthropic_messages import Messages
from flexmarl.gateway.dialects.base import Dialect
from flexmarl.gateway.dialects.chat_completions import ChatCompletions
from flexmarl.gateway.dialects.openai_responses import Responses
from flexmarl.gateway.dialects.text_completions import TextCompletions

DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "completions": TextCompletions(),
    "responses": Responses(),
    "messages": Messages(),
}
"""Dialects by the last part of the path at which they are asked, behind `/v1/`."""

__all__ = ["DIALECTS", "ChatCompletions", "Dialect", "Messages", "Responses", "TextCompletions"]
