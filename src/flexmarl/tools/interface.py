"""What every tool can do."""

from typing import Protocol


def is_refusal(observation: str) -> bool:
    """Whether a tool answers that the call was at fault.

    >>> is_refusal("error: division by zero"), is_refusal("42")
    (True, False)
    """
    return observation.startswith("error: ")


class Tool(Protocol):
    """Something an agent can call by name. One instance serves all episodes, so any number of calls may run at once.

    What the model did wrong (a bad expression, an unknown key) comes back as text that begins with `error: `, so that
    it can read it and try again; the episode goes on, and the call counts as a tool error. No other text begins so:
    what a tool quotes, it puts behind words of its own. Only a fault of the tool itself (its server is gone) raises
    EpisodeError. Cancelling the call gives up the result and must leave the tool usable.
    """

    @property
    def name(self) -> str:
        """What agents call it by; unique in a seat."""
        ...

    @property
    def description(self) -> str:
        """One sentence for the model: what goes in, what comes out."""
        ...

    async def __call__(self, argument: str) -> str:
        """The observation."""
        ...
