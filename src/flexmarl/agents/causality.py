"""Decides which calls of an episode may have had a part in a call. No clock is asked.

A task knows of the calls it made itself, of those that were known where it was created, and of those of the tasks it
created that have ended. What it sends depends on what it knows then:

    draft = await team.writer.act(text)                             hop 0
    await asyncio.gather(team.critic.act(draft.text),               hop 1, after 0
                         team.editor.act(draft.text))               hop 2, after 0
    await team.writer.act("once more")                              hop 3, after 1 and 2
"""

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True)
class Scope:
    """What one task knows of."""

    known: "dict[CallGraph, int]" = field(default_factory=dict)
    """The calls of each episode, each as the bit of its hop; of more than one if the task serves several."""

    def begun(self) -> "Scope":
        """The scope of a task that this one creates now."""
        return Scope(dict(self.known))

    def learn(self, ended: "Scope") -> None:
        """A task that this one created has ended."""
        for graph, calls in ended.known.items():
            self.known[graph] = self.known.get(graph, 0) | calls


SCOPE: ContextVar[Scope | None] = ContextVar("scope", default=None)
"""Of the task that runs; workflow_tasks.py gives each task of a workflow its own."""


class CallGraph:
    """The calls of one episode: which depend on which."""

    def __init__(self) -> None:
        self._earlier: dict[int, int] = {}
        """What was known when the call of a hop was sent."""
        self._untraced = Scope()
        """For seats that are tried outside a workflow: each call knows of all that were answered."""
        self._found: tuple[int, tuple[int, ...]] = (0, ())
        """The last answer of `_latest`: calls that are sent together ask for the same."""

    def sent(self, hop: int, extends: int | None = None) -> tuple[int, ...]:
        """Hops of the calls that a call sent now directly depends on, the one whose tokens it `extends` among them.

        A call has a higher hop than all that were sent before.
        """
        known = (SCOPE.get() or self._untraced).known.get(self, 0)
        if extends is not None:
            known |= self._earlier[extends] | 1 << extends
        self._earlier[hop] = known
        if self._found[0] != known:
            self._found = (known, self._latest(known))
        return self._found[1]

    def answered(self, hop: int) -> None:
        """The task that sent it goes on, and knows of it. Of a call that fails, nobody learns anything."""
        known = (SCOPE.get() or self._untraced).known
        known[self] = known.get(self, 0) | self._earlier[hop] | 1 << hop

    def _latest(self, calls: int) -> tuple[int, ...]:
        """Those that none of the others depends on."""
        hops: list[int] = []
        while calls:
            hop = calls.bit_length() - 1  # Sent last: none of the others can depend on it.
            hops.append(hop)
            calls &= ~(self._earlier[hop] | 1 << hop)
        return tuple(sorted(hops))
