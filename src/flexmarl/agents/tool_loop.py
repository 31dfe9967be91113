"""Decides what follows a piece of an agent's text: does it go on, use a tool, or stand as the reply?"""

from enum import Enum, auto

from flexmarl.tools import Incomplete, Malformed, Parsed, ToolCall


class Ending(Enum):
    """What ended the piece."""

    OWN = auto()
    """The agent: its end token, or a stop string of its settings."""
    SYNTAX = auto()
    """A stop string of the tool syntax: the agent would have gone on."""
    LENGTH = auto()
    """The token limit of the message."""


class Next(Enum):
    """What follows."""

    GO_ON = auto()
    USE_TOOL = auto()
    """Or tell the agent what is wrong with its call; either is one of its calls."""
    STAND = auto()


def next_move(call: Parsed, ending: Ending, *, may_call: bool) -> Next:
    """What follows a message that holds this call so far."""
    match call, ending:
        case (None | Incomplete(), Ending.SYNTAX):
            return Next.GO_ON
        case (ToolCall() | Malformed(), _) | (Incomplete(), Ending.OWN) if may_call:
            return Next.USE_TOOL
        case _:
            return Next.STAND
