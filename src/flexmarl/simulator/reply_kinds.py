"""Decides what an agent of the simulated world says, in several ways; the settings class is the way.

scripted   a function of the user's: prompt text -> text, so that workflows branch as they would
lengths    so many tokens without meaning, from a distribution
asked      as many tokens without meaning as the prompt asks for: `write 313 tokens`
"""

import random
import re
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from flexmarl.agents import ChatRenderer
from flexmarl.errors import EngineError, boundary
from flexmarl.records import GenerationRequest, IntArray
from flexmarl.settings import Settings
from flexmarl.simulator.distributions import Distribution
from flexmarl.tasks.registry import Registry

Responder = Callable[[GenerationRequest], IntArray]
"""[R] int32, R >= 1: what a request samples if nothing cuts it short, a function of the request alone. Raises
EngineError for one that is to end with finish `error`. It minds stop strings; stop ids and `max_tokens` are minded."""

Script = Callable[[str, random.Random], str]
"""(prompt as text without special tokens, random numbers of the request's seed) -> reply."""

SCRIPTS: Registry[Script] = Registry("responder", setting="name")

ASKED = re.compile(r"write (\d+) tokens")
ASKED_WITHIN = 128
"""Tokens at the prompt's end in which `asked` looks: to decode all of a long conversation costs more than the call."""


def responder(name: str) -> Callable[[Script], Script]:
    """Decorator that gives a script its name for `simulation.replies.AGENT: {type: scripted, name: ...}`.

    @responder("honest")
    def honest(prompt: str, rng: random.Random) -> str:
        return "yes" if rng.random() < 0.9 else "no"
    """
    return SCRIPTS.register(name)


class Scripted(Settings):
    """What a function says that a file under `code` registers with `@responder(name)`."""

    type: Literal["scripted"] = "scripted"
    name: str = Field(description="What `@responder` called it.")

    def responder(self, renderer: ChatRenderer) -> Responder:
        """Raises ConfigError if there is no function of that name; its text begins with the key."""
        script, end = SCRIPTS[self.name], end_of_turn(renderer)

        def respond(request: GenerationRequest) -> IntArray:
            with boundary(EngineError, f"responder '{self.name}'"):
                text = script(renderer.decode(request.prompt_ids), random.Random(request.seed))
                cut = _up_to_a_stop(text, request.sampling.stop)
                return np.asarray([*renderer.encode(cut), *(() if len(cut) < len(text) else (end,))], np.int32)

        return respond


class Lengths(Distribution):
    """Tokens without meaning, as many as drawn by the request's seed, the end of the turn included."""

    type: Literal["lengths"] = "lengths"
    shape: Literal["constant", "exponential", "lognormal"] = Field(
        default="lognormal", description="How the lengths of replies are spread."
    )
    floor: float = Field(default=1, ge=1, description="Shortest reply.")
    cap: float = Field(default=8192, le=1 << 20, description="Longest reply.")

    def responder(self, renderer: ChatRenderer) -> Responder:
        """The same for every agent with these settings."""
        filler = Filler(renderer)
        return lambda request: filler(round(self.draw(random.Random(request.seed))))


class Asked(Settings):
    """Tokens without meaning, as many as the prompt asks for last: `write 313 tokens`."""

    type: Literal["asked"] = "asked"

    def responder(self, renderer: ChatRenderer) -> Responder:
        """The same for every agent with this renderer."""
        filler = Filler(renderer)

        def respond(request: GenerationRequest) -> IntArray:
            asked = ASKED.findall(renderer.decode(request.prompt_ids[-ASKED_WITHIN:]))
            if not asked or asked[-1] == "0":
                raise EngineError(
                    f"the last {ASKED_WITHIN} tokens of the prompt of '{request.request_id}' ask for no number of "
                    f"tokens; end it with `write 313 tokens`, or give the agent other replies than type: asked"
                )
            return filler(int(asked[-1]))

        return respond


AnyReplies = Annotated[Scripted | Lengths | Asked, Field(discriminator="type")]
"""Settings field of any kind of reply."""


class Filler:
    """Replies of any length: views of one array, since a simulation has a hundred thousand of them."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._word = [*renderer.encode("x"), 0][0]
        self._end = end_of_turn(renderer)
        self._ids = self._make(8192)

    def __call__(self, num_tokens: int) -> IntArray:
        """[num_tokens] int32; the last one ends the turn. Do not write to it."""
        if num_tokens > len(self._ids):
            self._ids = self._make(2 * num_tokens)
        return self._ids[-num_tokens:]

    def _make(self, num_tokens: int) -> IntArray:
        ids = np.full(num_tokens, self._word, np.int32)
        ids[-1] = self._end
        ids.flags.writeable = False
        return ids


def end_of_turn(renderer: ChatRenderer) -> int:
    """The id with which a model says that its turn is over."""
    return min(renderer.extension.end_ids or renderer.stop_ids)


def _up_to_a_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text up to the end of the first stop string in it.

    >>> _up_to_a_stop("calc(2+2) is 4", (")",))
    'calc(2+2)'
    """
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text
