"""The interface of a tool."""

from typing import Protocol


def is_refusal(observation: str) -> bool:
    """True if a tool's observation says that the call was at fault.

    >>> is_refusal("error: division by zero"), is_refusal("42")
    (True, False)
    """
    return observation.startswith("error: ")


class Tool(Protocol):
    """Something an agent can call by name. One instance serves all episodes, so any number of calls may run at once.

    A mistake of the model (a bad expression, an unknown key) gives an observation that begins with `error: `. The model
    can then read it and try again, the episode continues, and the call counts as a tool error. No other observation may
    begin so; a tool that quotes text puts words of its own before it. Only a fault of the tool itself (its server is
    gone) raises EpisodeError. Cancelling the call drops its result and must leave the tool usable.
    """

    @property
    def name(self) -> str:
        """Name that agents call it by; unique in a seat."""
        ...

    @property
    def description(self) -> str:
        """One sentence for the model: what goes in, what comes out."""
        ...

    async def __call__(self, argument: str) -> str:
        """Runs the call; returns the observation that the agent reads."""
        ...
