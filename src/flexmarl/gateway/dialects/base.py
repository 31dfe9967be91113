"""Decides what all dialects share: what is asked and answered, what is refused, how a text is cut for a stream.

body ──► Dialect.ask ──► Ask ──► the door of the episode ──► Answer ──► Dialect.whole   one JSON object
                                                                   └──► Dialect.frames  events of a stream
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema

from flexmarl.agents.chat import SaidCall
from flexmarl.errors import EpisodeError, FlexmarlError, is_unicode
from flexmarl.tools.interface import BoundTool, ToolContext

MOST_CHOICES = 128
"""Most replies to one request."""


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]})
]
"""Content of a message, by its usual form; others are read, or refused by name (`text_of_parts`)."""


class Refused(FlexmarlError):
    """A request that the gateway does not serve; each dialect has a form of its own for it."""

    def __init__(
        self, text: str, *, status: int = 400, code: str = "invalid_request", too_long: tuple[int, int] | None = None
    ) -> None:
        """`too_long`: tokens of a prompt that does not fit, and the most that do."""
        super().__init__(text)
        self.text, self.status, self.code, self.too_long = text, status, code, too_long


def overflow(prompt_tokens: int, max_tokens: int, limit: int) -> Refused:
    """The refusal of a prompt that leaves no room for its reply. Harnesses compact their history on these words."""
    return Refused(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + max_tokens} "
        f"tokens ({prompt_tokens} in the messages, {max_tokens} in the completion). Please reduce the length of the "
        "messages or completion.",
        code="context_length_exceeded",
        too_long=(prompt_tokens + max_tokens, limit),
    )


class Said(NamedTuple):
    """One message of a history, in no dialect. A request may have hundreds, and dataclasses take longer to make."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    thought: str | None = None
    """An assistant's thought, if the client sent one back."""
    calls: tuple[SaidCall, ...] = ()
    call_id: str = ""
    """The call that a tool's message answers."""
    issued: str = ""
    """A name that the gateway gave to the reply, if the client sent it back: a signature or an item's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool of the client: the model reads of it, and the client runs it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def open(self, context: ToolContext) -> AbstractAsyncContextManager[BoundTool]:
        """Raises EpisodeError: the client runs it."""
        raise EpisodeError(f"the tool {self.name!r} belongs to a program at the gateway, which runs it itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, in no dialect."""

    messages: tuple[Said, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """The whole prompt where the client writes it itself, in words or in ids. Then there are no messages."""
    model: str = ""
    tools: tuple[OfferedTool, ...] = ()
    must_call: str | None = None
    """Name of the tool that the reply must call; "" for any of them; None: it may call one or not."""
    prefill: str = ""
    """Beginning of the reply, which the client wrote."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    usage: bool = True
    """False: a stream says nothing of tokens."""
    logprobs: bool = False
    ids: bool = False
    """True: the client wants the ids of prompt and replies."""
    previous: str = ""
    """Name of the answer that the messages follow, if the client leaves the history to the gateway."""
    store: bool = True
    """False: nothing will follow the answer by its name."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Values of sampling that the client asked for. The seat has its own."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that the gateway does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyChoice:
    """One reply."""

    text: str
    thought: str = ""
    calls: tuple[SaidCall, ...] = ()
    signature: str = ""
    """Name of the turn, by which a client's history refers to it."""
    finish: Literal["stop", "length"] = "stop"
    stopped_by: str = ""
    """The client's stop text at which it ended."""
    tokens: int = 0
    pieces: tuple[tuple[str, float], ...] = ()
    """Text and log-probability of each sampled token, if the client asked for them."""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All replies to a request."""

    name: str
    """Unique in the episode."""
    model: str
    choices: tuple[ReplyChoice, ...]
    prompt_tokens: int
    reused_tokens: int = 0
    created: int = 0
    prompt_ids: tuple[int, ...] = ()


class Frame(NamedTuple):
    """One event of a stream. It is encoded when it is sent: each reading makes those again that were sent before."""

    data: Mapping[str, Any] | str
    """A text is sent as it is."""
    name: str = ""
    characters: int = 0
    """Characters of the reply that it holds."""

    @property
    def text(self) -> str:
        """The server-sent event."""
        head = f"event: {self.name}\n" if self.name else ""
        data = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        return f"{head}data: {data}\n\n"


Cut = Callable[[str], Sequence[str]]
"""Cuts a text into the pieces that are sent; joined, they are the text."""


class Dialect(Protocol):
    """An API that clients speak."""

    @property
    def name(self) -> str:
        """Name in the tag `dialect`."""
        ...

    @property
    def body(self) -> "type[Body]":
        """The fields that are read."""
        ...

    @property
    def heartbeat(self) -> str:
        """Event that only says that the stream lives."""
        ...

    def ask(self, body: Any) -> Ask:
        """Reads a body. Raises Refused that names the field."""
        ...

    def whole(self, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        ...

    def frames(self, ask: Ask, answer: Answer, cut: Cut) -> Iterator[Frame]:
        """The answer as a stream. The last frame is the terminal event."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an answer that is none."""
        ...

    def error_frame(self, refused: Refused) -> str:
        """The event with which a stream ends that cannot go on."""
        ...


class Body(BaseModel):
    """Base of request bodies: fields that it does not name are ignored, and counted."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class SampledBody(Body):
    """Base of the bodies of OpenAI's older APIs: what they ask of the sampling."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


B = TypeVar("B", bound=Body)


def checked(kind: type[B], body: Any) -> B:
    """The body as a model. Raises Refused that names the first field at fault."""
    if not isinstance(body, Mapping):
        raise Refused(f"the body must be a JSON object, got {type(body).__name__}")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise Refused(f"{place}: {first['msg']}, got {str(first.get('input'))[:80]!r}") from None


def ignored_fields(kind: type[Body], body: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the body's fields that the model does not have."""
    return tuple(sorted(set(map(str, body)) - set(kind.model_fields)))


def text_of_parts(content: Any, where: str) -> str:
    """The text of a content, which is a text or a list of parts. Raises Refused for images, audio and files."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(content, where)
    if not isinstance(content, Sequence):
        raise Refused(f"{where}: must be a text or a list of parts, got {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "refusal":
            texts.append(str(part.get("refusal", "")))
        else:
            raise Refused(f"{where}: a part of type {kind!r} is not served; send parts of type 'text'")
    return _unicode("".join(texts), where)


def _unicode(text: str, where: str) -> str:
    if not is_unicode(text):
        raise Refused(f"{where}: holds half a surrogate pair, which is no character")
    return text


def offered(name: Any, description: Any, parameters: Any, where: str) -> OfferedTool:
    """A tool of a body. Raises Refused if it has no name."""
    if not isinstance(name, str) or not name:
        raise Refused(f"{where}: needs a name")
    schema = dict(parameters) if isinstance(parameters, Mapping) else {}
    schema.setdefault("type", "object")
    schema.setdefault("properties", {})
    return OfferedTool(name=name, description=str(description or ""), parameters=schema)


def asked_of(body: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The sampling values that a body asks for."""
    return {name: body[name] for name in names if body.get(name) is not None}


def by_words(text: str, size: int = 32) -> list[str]:
    """Cuts a text for a stream, into pieces of `size` characters.

    >>> by_words("abcde", 2)
    ['ab', 'cd', 'e']
    """
    return [text[place : place + size] for place in range(0, len(text), size)]
