"""One agent's conversation, as messages and as the exact ids of its last call."""

from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from flexmarl.agents.chat import ChatRenderer, Message, holds_thought
from flexmarl.records import IntArray, SampleId, Turn

_NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


class Conversation:
    """Grows by what the agent hears and says; knows the prompt of the next call and the turn that it extends."""

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        next_branch: Callable[[], int],
        *,
        trust_special: bool = False,
    ) -> None:
        """`trust_special`: what the messages spell may be control tokens."""
        self.messages = [*messages]
        self.prompt_ids = _NO_IDS
        """[P] prompt of the next call."""
        self.parent: SampleId | None = None
        """The turn whose prompt and response the next prompt extends."""
        self.branch = -1
        """Number of the branch; a prompt that was rendered anew starts one."""
        self._renderer = renderer
        self._next_branch = next_branch
        self._trust_special = trust_special
        self._last: Turn | None = None
        self._thinking = any(message.role == "assistant" and holds_thought(message.content) for message in messages)

    def copy(self, next_branch: Callable[[], int]) -> "Conversation":
        """The same conversation so far; from here on the two grow apart."""
        twin = copy(self)
        twin.messages, twin._next_branch = [*self.messages], next_branch
        return twin

    def hear(self, message: Message) -> None:
        """Someone else speaks: the agent's turn comes after this message."""
        last, trust = self._last, self._trust_special
        extended = last and self._renderer.extend(
            last.prompt_ids, last.response_ids, message, thinking=self._thinking, trust_special=trust
        )
        self.messages.append(message)
        if last is not None and extended is not None:
            self.prompt_ids, self.parent = extended, last.sample_id
        else:
            self.prompt_ids, self.parent = self._renderer.render(self.messages, trust_special=trust), None
            self.branch = self._next_branch()

    def answer(self, turn: Turn) -> None:
        """The agent was heard; until `hear` or `end_message`, its next call goes on in mid-message."""
        self._last = turn
        self.parent = turn.sample_id
        self.prompt_ids = np.concatenate((turn.prompt_ids, turn.response_ids))

    def end_message(self, text: str) -> None:
        """The agent has said this in its last calls."""
        self.messages.append(Message("assistant", text))
        self._thinking = self._thinking or holds_thought(text)
