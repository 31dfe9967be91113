"""Decides what of its conversation an agent still sees: whole acts, a summary of its own, results without their text.

An agent with `compact` and a limit of 100 tokens, with the tokens of its prompts:

    60          95           next would be 130:          70                          ...
    act 1 ──► act 2 ──► asked for a summary ──► role prompt, carry(summary), the last `keep` messages, act 3 ──►

The summary is a call of the same agent, with the tag `action: compact`, and trained as its other calls are. Only this
call's prompt may pass the limit, by what was said since the last one, and by `ask`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from flexmarl.agents.extension import Message
from flexmarl.settings import Settings

ACTION = "compact"
"""Value of the tag `action` of a call that was asked for a summary."""
LEFT_OUT = "a summary, and context.compact.train_actions is false"
"""Why the tokens of a summary are not trained on."""
CARRY = "Summary of the conversation so far:\n{summary}\n\n"
"""Beginning of the message behind a summary, unless settings say otherwise."""
HIDDEN = "(an earlier result, no longer shown)"
"""Text in the place of a hidden result."""

T = TypeVar("T")
ContextTool = Literal["compact", "forget", "note", "recall"]
"""A tool with which an agent changes its own context (`CONTEXT_TOOLS`)."""


class CompactSettings(Settings):
    """At the limit, the agent itself writes a summary of its conversation, and goes on from this alone."""

    limit_tokens: int = Field(ge=1)
    """Longest prompt that the agent answers, in tokens. Before a longer one it is asked for a summary; that call's
    prompt alone may be longer."""
    keep: int = Field(default=0, ge=0)
    """Last messages that stay as they are, behind the summary; fewer where they do not fit. The results of a message's
    calls stay with it."""
    ask: str = Field(
        default="Summarise this conversation: what was asked, what is known, what remains to be done. "
        "You will remember nothing else.",
        min_length=1,
    )
    """Message that asks for the summary, which has at most `sampling.max_tokens`."""
    carry: str = CARRY
    """Beginning of the next message that the agent reads. {summary} is what it wrote, without thoughts."""
    train_actions: bool = True
    """False: summaries are not trained on. A control: it shows what training them is worth."""

    @field_validator("carry")
    @classmethod
    def _carries_the_summary(cls, carry: str) -> str:
        if "{summary}" not in carry:
            raise ValueError(f"carry: {carry!r} does not name {{summary}}, so that nothing would be carried over")
        return carry

    def carried(self, summary: str) -> str:
        """The beginning of the next message."""
        return self.carry.replace("{summary}", summary)

    def continuations(
        self, history: Sequence[Message], summary: str, pending: Sequence[Message] = ()
    ) -> Iterator[list[Message]]:
        """The messages that may come behind the role prompt, the longest first. `pending` is in all of them.

        >>> said = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
        >>> rules = CompactSettings(limit_tokens=9, keep=1, carry="{summary}|")
        >>> for seen in rules.continuations(said, "s", [Message("user", "e")]):
        ...     print([message.content for message in seen])
        ['s|', 'd', 'e']
        ['s|e']
        """
        last = -1
        for number in range(min(self.keep, len(history)), -1, -1):
            start = len(history) - number
            while 0 < start < len(history) and history[start].role == "tool":
                start -= 1  # A template cannot write a result without its call.
            if start != last:
                yield self._joined(self.carried(summary), [*history[start:], *pending])
            last = start

    def _joined(self, carried: str, messages: Sequence[Message]) -> list[Message]:
        """The messages behind the carried text. It begins the user's first one: many templates take no two in a row."""
        if messages and messages[0].role == "user":
            return [messages[0]._replace(content=carried + messages[0].content), *messages[1:]]
        return [Message("user", carried.rstrip()), *messages]


class HideSettings(Settings):
    """Old results of tools lose their text. Calls stay, so that the agent knows what it has tried."""

    older_than: int = Field(ge=1)
    """Last messages with calls whose results are shown."""

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the agent sees them.

        >>> said = [Message("tool", "1"), Message("assistant", "b"), Message("tool", "2"), Message("tool", "3")]
        >>> [message.content for message in HideSettings(older_than=1).shown(said)]
        ['(an earlier result, no longer shown)', 'b', '2', '3']
        """
        rounds, found, answers = 0, list[Message](), False
        for message in reversed(messages):
            rounds += message.role == "tool" and not answers
            answers = message.role == "tool"
            found.append(message._replace(content=HIDDEN) if answers and rounds > self.older_than else message)
        return found[::-1]


class ContextSettings(Settings):
    """How an agent keeps its conversation short. It remembers all acts, unless `last` says how many."""

    last: int | None = Field(default=None, ge=1)
    """Acts that it remembers, the last ones; null: all."""
    compact: CompactSettings | None = None
    """Summaries of its own, written when its conversation is too long; null: none."""
    hide_results: HideSettings | None = None
    """Old results of tools are hidden; null: never."""
    tools: tuple[ContextTool, ...] = ()
    """Tools with which it decides itself: compact (it writes a summary), forget, note and recall (notes that stay)."""

    @model_validator(mode="after")
    def _one_way_to_forget(self) -> "ContextSettings":
        if self.last is None and self.compact is None and self.hide_results is None and not self.tools:
            raise ValueError("says nothing; use full, none, or one of last, compact, hide_results, tools")
        if repeated := [name for name in self.tools if self.tools.count(name) > 1]:
            raise ValueError(f"tools: {repeated[0]!r} stands there twice; name each tool once")
        if self.last is not None and self.compact is not None:
            raise ValueError(
                f"last is {self.last}, and compact is set: what acts before the last ones said would be in no summary; "
                f"leave one of them out"
            )
        return self


def _kind(given: object) -> str:
    return "literal" if isinstance(given, str) else "ContextSettings"


AgentContext = Annotated[
    Annotated[Literal["none", "full"], Tag("literal")] | Annotated[ContextSettings, Tag("ContextSettings")],
    Discriminator(_kind),
]
"""How much of its earlier acts an agent sees. `none`: every act starts anew from the role prompt; `full`: all."""


def recall(context: AgentContext, acts: Sequence[T]) -> Sequence[T]:
    """The acts that the next one starts from, oldest first.

    >>> recall(ContextSettings(last=2), ["a", "b", "c"])
    ['b', 'c']
    """
    if context == "none":
        return acts[:0]
    return acts if isinstance(context, str) or context.last is None else acts[-context.last :]


def compaction_of(context: AgentContext) -> CompactSettings | None:
    """The settings of its summaries, if it writes any."""
    return None if isinstance(context, str) else context.compact


def carry_of(context: AgentContext) -> str:
    """The beginning of the message behind a summary."""
    compact = compaction_of(context)
    return compact.carry if compact else CARRY


def tools_of(context: AgentContext) -> tuple[ContextTool, ...]:
    """The tools with which it changes its own context."""
    return () if isinstance(context, str) else context.tools


def hiding_of(context: AgentContext) -> HideSettings | None:
    """Which results of tools it no longer sees, if any."""
    return None if isinstance(context, str) else context.hide_results
