"""Tools of a seat itself: with them an agent changes what it still sees, or hands work to another agent.

message ──► compact, forget   applied when all calls of the message are answered
        ──► note, recall      the seat's notes, which stay whatever it forgets
        ──► delegate          another agent answers the task, in a conversation of its own
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, field_validator

from flexmarl.agents.extension import Message
from flexmarl.agents.remembering import ContextTool
from flexmarl.errors import EpisodeError
from flexmarl.settings import Settings
from flexmarl.tools.interface import BoundTool, Observation, ToolContext


@dataclass(frozen=True, slots=True)
class SeatTool:
    """A tool that the seat answers itself."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def open(self, context: ToolContext) -> AbstractAsyncContextManager[BoundTool]:
        """Raises EpisodeError: the seat answers it."""
        raise EpisodeError(f"the tool {self.name!r} is answered by the seat of its agent, and cannot be opened")


class DelegateSettings(Settings):
    """Work that an agent may hand to others, with the tool `delegate`."""

    agents: tuple[str, ...] = Field(min_length=1)
    """Names of the agents that it may hand a task to, its own too. Each task begins a conversation of its own."""
    depth: int = Field(default=1, ge=1)
    """How often a task may be handed on: with 1, an agent that was handed a task does it itself."""

    @field_validator("agents")
    @classmethod
    def _each_once(cls, agents: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := [name for name in agents if agents.count(name) > 1]:
            raise ValueError(f"agents: {repeated[0]!r} stands there twice; name each agent once")
        return agents

    def tool(self) -> SeatTool:
        """The tool, which names these agents."""
        agent = {"type": "string", "enum": [*self.agents], "description": "Who does it."}
        task = {"type": "string", "description": "All that is to be known: nothing else is passed on."}
        return SeatTool(
            "delegate",
            "Hands a task to another agent, and returns its answer.",
            {"type": "object", "properties": {"agent": agent, "task": task}, "required": ["agent", "task"]},
        )


def _object(required: Sequence[str] = (), **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


CONTEXT_TOOLS: Mapping[ContextTool, SeatTool] = {
    "compact": SeatTool(
        "compact",
        "Replaces the conversation so far by a summary. Nothing else of it is remembered.",
        _object(["summary"], summary={"type": "string", "description": "What is known, and what remains to be done."}),
    ),
    "forget": SeatTool(
        "forget",
        "Forgets the conversation so far, but for its first message, the last question and the last messages.",
        _object(
            ["keep"], keep={"type": "integer", "minimum": 1, "description": "Number of the last messages to keep."}
        ),
    ),
    "note": SeatTool(
        "note",
        "Keeps a note, which is never forgotten. `recall` shows it.",
        _object(["text"], text={"type": "string", "minLength": 1}),
    ),
    "recall": SeatTool(
        "recall",
        "Shows the notes.",
        _object(words={"type": "string", "description": "Only notes that hold this text."}),
    ),
}
"""Tools with which an agent changes what it sees (`context.tools`)."""
LEAVE_NO_RESULT = frozenset({"compact", "forget", "note"})
"""Calls that need no answer where a summary replaces them."""


@dataclass(slots=True)
class OwnMemory:
    """The notes that an agent made by calls, and the change of its conversation that it asked for."""

    notes: list[str] = field(default_factory=list)
    summary: str | None = None
    """The last summary that it wrote in the message under way."""
    keep: int | None = None
    """The last messages that stay, if it asked to forget the others."""

    def answer(self, name: ContextTool, arguments: Mapping[str, Any]) -> Observation:
        """Answers a call. `arguments` fit the tool's parameters.

        >>> memory = OwnMemory()
        >>> memory.answer("note", {"text": "tea is 12"}).text, memory.answer("note", {"text": "rum is 30"}).text
        ('noted', 'noted')
        >>> memory.answer("recall", {"words": "rum"}).text, memory.answer("recall", {"words": "gin"}).text
        ('rum is 30', 'there is no such note')
        """
        match name:
            case "note":
                self.notes.append(arguments["text"])
                return Observation("noted")
            case "recall":
                found = [note for note in self.notes if arguments.get("words", "") in note]
                return Observation("\n".join(found) or "there is no such note")
            case "forget":
                self.keep = arguments["keep"]
                return Observation("forgotten")
            case "compact":
                if not arguments["summary"].strip():
                    return Observation("the summary is empty; write what is to be remembered", ok=False)
                self.summary = arguments["summary"].strip()
                return Observation("compacted")

    def copy(self) -> "OwnMemory":
        """The same notes, for a branch."""
        return OwnMemory([*self.notes])


def without_middle(said: Sequence[Message], keep: int) -> list[Message]:
    """The messages that stay behind the role prompt if all but the last `keep` ones are forgotten.

    The first message and the last question stay, as one where they would follow each other; and a result's call.

    >>> said = [Message(*one) for one in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))]
    >>> [message.content for message in without_middle(said, keep=1)]
    ['a\\n\\nc', 'd']
    """
    start = max(0, len(said) - keep)
    while start > 0 and said[start].role == "tool":
        start -= 1
    tail = [*said[start:]]
    asked = [place for place, message in enumerate(said) if message.role == "user" and place < start]
    if not asked:
        return tail if start == 0 else [said[0], *tail]
    head = [said[place] for place in dict.fromkeys((asked[0], asked[-1]))]
    if tail[0].role == "user":
        head = [head[0], tail.pop(0)]
    return [head[0]._replace(content="\n\n".join(message.content for message in head)), *tail]
