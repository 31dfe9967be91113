"""The interface of a tool: opened for an episode, called by name with arguments, closed with the episode.

async with tool.open(ToolContext(episode="g12e3a0", seed=7)) as bound:
    observation = await bound.call({"expression": "6*7"})      # Observation("42")
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from flexmarl.sandbox.interface import Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """The episode for which a tool is opened."""

    episode: str
    """Id of the episode, e.g. `g12e3a0`."""
    seed: int
    """63-bit seed, the same in every play of this trajectory; different for each seat and tool."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files of the task by name: its `data["files"]`."""
    deadline: float = math.inf
    """Time of the event loop, in seconds, at which the episode ends at the latest, as known when the tool is opened."""
    sandbox: Sandbox | None = None
    """Opens boxes for code that a model wrote, if a tool of the run needs them (`needs_box`)."""


_SPELLED = str.maketrans(
    {chr(code): f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
)


def spelled_out(text: str) -> str:
    r"""A text with its control characters spelled out, but for tabs and ends of lines.

    >>> spelled_out("a\x1b[2Jb\r\n")
    'a\\x1b[2Jb\\x0d\n'
    """
    return text.translate(_SPELLED)


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of one call."""

    text: str
    """Text for the agent."""
    ok: bool = True
    """False: the call was at fault. The agent reads `error: ` and the text, and may try again."""
    cost: float = 0.0
    """Cost of the call, in a unit of the tool's own."""
    data: Any = None
    """Values for workflows and scorers. They never go into a prompt."""
    dropped: int = 0
    """Number of characters of the result that `text` leaves out."""

    @property
    def shown(self) -> str:
        """Text of the tool message. Control characters are spelled out: a terminal would hide what else is there.

        >>> Observation("42").shown, Observation("division by zero", ok=False).shown
        ('42', 'error: division by zero')
        """
        return spelled_out(self.text if self.ok else f"error: {self.text}")


class BoundTool(Protocol):
    """A tool that was opened for one seat of one episode."""

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Runs one call. `arguments` fit the tool's `parameters`.

        Any number of calls may run at once. A mistake of the model gives an observation with `ok=False`: the episode
        goes on, and the call counts as a tool error. Only a fault of the tool itself, such as a lost server, raises
        EpisodeError. A cancelled call ends what it started, and leaves the tool usable.
        """
        ...


class Tool(Protocol):
    """Something an agent can call by name. One instance serves all episodes; each opens it anew."""

    @property
    def name(self) -> str:
        """Name that agents call it by; unique in a seat."""
        ...

    @property
    def description(self) -> str:
        """A sentence for the model: what goes in, what comes out."""
        ...

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments: an object with `properties`. The model reads it."""
        ...

    def open(self, context: ToolContext) -> AbstractAsyncContextManager[BoundTool]:
        """Opens the tool for one seat of one episode. Leaving the block frees all that the tool holds for it.

        A tool without state of its own may return `contextlib.nullcontext(self)`.
        """
        ...


@runtime_checkable
class ToolSet(Protocol):
    """An entry of an agent's `tools` that stands for several tools, such as those of a server."""

    @property
    def name(self) -> str:
        """Name of the set; unique in a seat."""
        ...

    def tools(self) -> Sequence[Tool]:
        """The tools. Raises ConfigError if they are not known."""
        ...


def each_tool(entries: Sequence[Tool | ToolSet]) -> tuple[Tool, ...]:
    """All tools of an agent, those of sets one by one."""
    found: list[Tool] = []
    for entry in entries:
        if isinstance(entry, ToolSet):
            found += entry.tools()
        else:
            found.append(entry)
    return tuple(found)


def max_parallel_of(tool: Tool | ToolSet) -> int | None:
    """The tool's `max_parallel`, which it need not have: calls of this name that run at once in a run. None: any."""
    return getattr(tool, "max_parallel", None)


def needs_box(tool: Tool | ToolSet) -> bool:
    """True for a tool that runs what a model wrote: no run begins where its boxes are not safe."""
    return getattr(tool, "needs_box", False)


def keeps_state(tool: Tool | ToolSet) -> bool:
    """True for a tool whose calls depend on earlier ones, and whose state cannot be copied for a branch of a tree."""
    return getattr(tool, "keeps_state", False)


def specification(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates take it in `tools=`: name, description and JSON schema of the arguments."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
