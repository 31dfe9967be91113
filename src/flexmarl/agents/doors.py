"""Interface of the doors at which programs that we do not own play seats of a team; the gateway opens them.

async with team.door() as door:
    seat = door.seats["solver"]             # SeatAddress(openai_url=..., anthropic_url=..., key=..., model="solver")
    ...                                     # whatever speaks OpenAI's or Anthropic's API at these addresses
    for call in door.calls:                 # one for each reply that the program has got
        call.reward(task.score(call.text))
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flexmarl.agents.chat import SaidCall
from flexmarl.records import AgentName, Task, Turn

if TYPE_CHECKING:
    from flexmarl.agents.caller import AgentSpec
    from flexmarl.agents.context import EpisodeContext
    from flexmarl.agents.episode_log import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatAddress:
    """The address of one seat in one episode."""

    openai_url: str
    """Base URL for OpenAI's clients; it ends with `/v1`."""
    anthropic_url: str
    """Base URL for Anthropic's clients."""
    key: str = field(repr=False)
    """API key for either."""
    model: str
    """Name of the model to ask for: the seat's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAddress:
    """Where rewards of one episode are posted, as long as its door is open: {"reward": 1.0, "seat": "solver"}.

    It is for whoever judges the episode, and never for its program.
    """

    url: str
    key: str = field(repr=False)
    """API key; it is none of the seats'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorCall:
    """A reply that the program has got."""

    seat: AgentName
    text: str
    """As it was delivered: without thought, calls and stop text."""
    calls: tuple[SaidCall, ...]
    turn: Turn
    give: Callable[[tuple[Turn, ...], float, str], None] = field(repr=False)
    """Called by `reward` with (turns, reward, part)."""

    def reward(self, reward: float, part: str = "outcome") -> None:
        """Adds to the reward of this call's turn."""
        self.give((self.turn,), reward, part)


class OutsideAgent(Protocol):
    """Settings of an agent that is no registered program."""

    @property
    def type(self) -> str:
        """The kind of agent, which chooses its runner."""
        ...


class Door(Protocol):
    """The addresses of one episode. They are gone when its block is left."""

    @property
    def seats(self) -> Mapping[str, SeatAddress]:
        """The address of each seat."""
        ...

    @property
    def rewards(self) -> RewardAddress:
        """Where rewards of the episode are posted."""
        ...

    @property
    def calls(self) -> tuple[DoorCall, ...]:
        """The replies that were delivered so far, in the order in which they were asked for."""
        ...

    async def play(self, agent: "str | OutsideAgent", task: Task, *, seed: int) -> Any:
        """Lets an agent play the task: a registered program by its name, or that of a workflow's settings.

        Returns the answer: of a program, a JSON value; of a service, {answer, metrics}; of a command, a text. Raises
        EpisodeError if the agent fails, dies, or answers no JSON value.
        """
        ...


class Doors(Protocol):
    """Opens doors."""

    def open(
        self, agents: "Mapping[AgentName, AgentSpec]", context: "EpisodeContext", ledger: "Ledger"
    ) -> AbstractAsyncContextManager[Door]:
        """Opens a door for an episode. Leaving the block ends all its calls, and takes out of training what nobody
        read. Raises EpisodeError from the block if the episode makes more calls than it may."""
        ...
