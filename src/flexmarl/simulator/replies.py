"""Decides what simulated engines answer, by agent, and what that earns: replies take the place of weights.

simulation.replies: {AGENT: {type: ...}}      one of these kinds; each is a settings class that makes a responder
    scripted   a user's function: prompt text -> text, so that workflows branch as they would
    lengths    meaningless tokens, their number drawn from a distribution
    asked      as many meaningless tokens as the prompt asks for: `write 313 tokens`
simulation.recorded: RUN                      replies from a run's experience store, for agents that `replies` does not
                                              name: the same sample gets the same reply again
simulation.rewards: {success: 0.5, spread: 0.3}    drawn by lot, for replies that have no meaning
    task ──► its chance of success, from success - spread to success + spread
    episode ──► succeeds with this chance: reward 1.0 for each of its turns, else 0.0
"""

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from flexmarl.agents import ChatRenderer, Team, TeamSpec
from flexmarl.errors import ConfigError, EngineError, boundary
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.store_file import StoreReader, read_store
from flexmarl.plugins import Registry
from flexmarl.records import AgentName, FinishReason, GenerationRequest, IntArray, SampleId, Sampling, Task
from flexmarl.settings import Settings
from flexmarl.simulator.plan import Distribution

Responder = Callable[[GenerationRequest], IntArray]
"""request -> [R] int32, R >= 1: the ids that the request samples, a function of the request alone.

Raises EngineError for a request that shall end with finish `error`. The responder must honour stop strings itself. Stop
ids and `max_tokens` are applied to its reply afterwards.
"""

Script = Callable[[str, random.Random], str]
"""(prompt as text without special tokens, random numbers of the request's seed) -> reply."""

SCRIPTS: Registry[Script] = Registry("responder", setting="name", group="responders")

ASKED = re.compile(r"write (\d+) tokens")
ASKED_WITHIN = 128
"""Tokens at the prompt's end that `asked` reads: decoding a whole long conversation would cost more than the call."""


def responder(name: str) -> Callable[[Script], Script]:
    """Decorator that gives a script its name for `simulation.replies.AGENT: {type: scripted, name: ...}`.

    @responder("honest")
    def honest(prompt: str, rng: random.Random) -> str:
        return "yes" if rng.random() < 0.9 else "no"
    """
    return SCRIPTS.register(name)


class Scripted(Settings):
    """Replies by a function that a file under `code` registers with `@responder(name)`."""

    type: Literal["scripted"] = "scripted"
    name: str = Field(description="What `@responder` called it.")

    def responder(self, renderer: ChatRenderer) -> Responder:
        """Makes the responder. Raises ConfigError if no function has that name; its text begins with the key."""
        return spoken_by(self.name, renderer)


def spoken_by(name: str, renderer: ChatRenderer, *, scramble: bool = False, reads: int | None = None) -> Responder:
    """Makes a responder of a registered function. `scramble`: its words are spelled in random tokens of theirs.

    `reads`: most tokens of the prompt's end that the function gets; None: all.
    """
    script, end = SCRIPTS[name], end_of_turn(renderer)

    def respond(request: GenerationRequest) -> IntArray:
        with boundary(EngineError, f"responder '{name}'"):
            rng = random.Random(request.seed)
            text = script(renderer.decode(request.prompt_ids[-(reads or 0) :]), rng)
            cut = _up_to_a_stop(text, request.sampling.stop)
            ids = _scrambled(cut, renderer, rng) if scramble else renderer.encode(cut)
            return np.asarray([*ids, *(() if len(cut) < len(text) else (end,))], np.int32)

    return respond


def _scrambled(text: str, renderer: ChatRenderer, rng: random.Random) -> list[int]:
    """Ids of the text, encoded in pieces; as a whole, if the pieces together would be another text."""
    cuts = [0, *sorted(rng.randrange(len(text) + 1) for _ in range(3)), len(text)]
    ids = [one for begin, end in pairwise(cuts) for one in renderer.encode(text[begin:end])]
    return ids if renderer.decode(ids) == text else renderer.encode(text)


class Lengths(Distribution):
    """Replies of meaningless tokens. The request's seed draws their number, which includes the end of the turn."""

    type: Literal["lengths"] = "lengths"
    shape: Literal["constant", "exponential", "lognormal"] = Field(
        default="lognormal", description="How the lengths of replies are spread."
    )
    floor: float = Field(default=1, ge=1, description="Shortest reply.")
    # Settings are frozen, so that a narrower type breaks nobody.
    cap: float = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=8192, le=1 << 20, description="Longest reply."
    )

    def responder(self, renderer: ChatRenderer) -> Responder:
        """Makes the responder. It does not depend on the agent."""
        filler = Filler(renderer)
        return lambda request: filler(round(self.draw(random.Random(request.seed))))


class Asked(Settings):
    """Replies of as many meaningless tokens as the prompt's end asks for: `write 313 tokens`."""

    type: Literal["asked"] = "asked"

    def responder(self, renderer: ChatRenderer) -> Responder:
        """Makes the responder, one for all agents. It raises EngineError if a prompt asks for no number of tokens."""
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
    """Makes replies of any length. They are views of one array, because a simulation has some 100,000 of them."""

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
    """Returns the token id that ends a model's turn: the smallest one, and a stop id if the template has none."""
    return min(renderer.extension.end_ids or renderer.stop_ids)


def _up_to_a_stop(text: str, stops: tuple[str, ...]) -> str:
    """Returns the text up to the end of the first stop string in it.

    >>> _up_to_a_stop("calc(2+2) is 4", (")",))
    'calc(2+2)'
    """
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


def recorded_responders(run: Path, agents: Sequence[AgentName]) -> dict[AgentName, Responder]:
    """Makes a responder per agent from the replies in a run folder. Raises ConfigError if an agent has none there."""
    store = RunFolder(run).store
    if not store.is_file():
        raise ConfigError(
            f"simulation.recorded: '{run}' has no {store.name}; give the folder of a run whose `store.type` is sqlite"
        )
    with read_store(store) as reader:
        return {agent: _recorded(agent, _replies(reader, run, agent)) for agent in agents}


def _replies(reader: StoreReader, run: Path, agent: AgentName) -> dict[SampleId, IntArray]:
    replies: dict[SampleId, IntArray] = {}
    for row in reader.rows(agent) if agent in reader.agents else ():
        if len(ids := row.values.get("response_ids", ())):
            # A reply that was cut gets a token more, so that the same `max_tokens` ends it for the same reason.
            cut = row.values["finish"] == FinishReason.LENGTH
            replies[row.sample_id] = np.append(ids, ids[-1:]) if cut else ids
    if not replies:
        raise ConfigError(
            f"simulation.replies.{agent}: simulation.recorded is '{run}', in which '{agent}' said nothing; its agents "
            f"are: {', '.join(reader.agents)}. Give the agent replies of its own, e.g. {{type: lengths, mean: 300}}"
        )
    return replies


def _recorded(agent: AgentName, replies: dict[SampleId, IntArray]) -> Responder:
    others = [replies[sample_id] for sample_id in sorted(replies)]

    def respond(request: GenerationRequest) -> IntArray:
        reply = replies.get(SampleId(request.request_id))
        # The record lacks samples of other steps, of other attempts and of evaluations.
        return others[request.seed % len(others)] if reply is None else reply

    return respond


DEFAULT = "default"
"""Key for the agents that `simulation.replies` does not name."""


def fitting_replies(
    team: Collection[str], replies: Mapping[str, AnyReplies], *, recorded: bool, modelled: Collection[str] | None = None
) -> tuple[list[str], dict[str, AnyReplies]]:
    """Returns a line for each agent whose replies are missing or wrong, and replies with some that would do.

    `team` has the names of all agents, `modelled` those that need replies; None means all.
    """
    agents, faults = [*team, DEFAULT], dict[str, str]()
    for agent, kind in replies.items():
        try:
            if agent not in agents:
                faults[agent] = f": there is no such agent; there are: {', '.join(team)}"
            elif isinstance(kind, Scripted):
                _ = SCRIPTS[kind.name]
        except ConfigError as error:
            faults[agent] = f".{error}"
    for agent in team if modelled is None else modelled:
        if not recorded and agent not in replies and DEFAULT not in replies:
            faults[agent] = (
                " is missing: a simulated or timed engine has no weights to answer with; use "
                "{type: lengths, mean: 300}, {type: scripted, name: ...}, or simulation.recorded: a run folder"
            )
    some = dict.fromkeys((agent for agent in agents if agent in faults), Lengths(type="lengths", mean=300))
    right = {agent: kind for agent, kind in replies.items() if agent not in faults}
    return [f"simulation.replies.{agent}{fault}" for agent, fault in faults.items()], right | some


def responder_of(team: TeamSpec, replies: Mapping[str, AnyReplies], *, recorded: Path | None = None) -> Responder:
    """Makes one responder for all engines of a run. A request names the agent that asks.

    `fitting_replies` finds no fault with the replies. Raises ConfigError if an agent has none in the recorded run.
    """
    return responder_by_agent({name: agent.renderer for name, agent in team.agents.items()}, replies, recorded=recorded)


def responder_by_agent(
    renderers: Mapping[AgentName, ChatRenderer], replies: Mapping[str, AnyReplies], *, recorded: Path | None = None
) -> Responder:
    """Makes a responder for the agents that have a renderer."""
    kinds = {agent: replies.get(agent) or replies.get(DEFAULT) for agent in renderers}
    speaks = {agent: kind.responder(renderers[agent]) for agent, kind in kinds.items() if kind}
    if recorded is not None and (silent := [agent for agent, kind in kinds.items() if kind is None]):
        speaks |= recorded_responders(recorded, silent)

    def respond(request: GenerationRequest) -> IntArray:
        if request.agent is None:
            raise EngineError(f"request '{request.request_id}' must name the agent that asks, in `agent`")
        return speaks[request.agent](request)

    return respond


def reply_to(request: GenerationRequest, respond: Responder) -> tuple[IntArray, FinishReason]:
    """Returns the responder's reply from the request's offset on, and its finish reason.

    If another instance began the request, the responder gets the original request, so that it answers the same.
    """
    sampled = request.offset
    if not sampled:
        return _cut(respond(request), request.sampling)
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + sampled)
    original = replace(request, prompt_ids=request.prompt_ids[:-sampled], sampling=sampling, offset=0)
    ids, finish = _cut(respond(original), sampling)
    return ids[sampled:], finish


def _cut(ids: IntArray, sampling: Sampling) -> tuple[IntArray, FinishReason]:
    """Cuts the ids after the first stop id, or at `max_tokens`. A reply that ends by itself has finish `stop`."""
    if not len(ids):
        raise EngineError("the responder gave no token; a reply has at least one")
    kept = ids[: sampling.max_tokens]
    ends = [int(found.argmax()) + 1 for stop in sampling.stop_ids if (found := kept == stop).any()]
    if ends:
        return kept[: min(ends)], FinishReason.STOP
    return kept, FinishReason.STOP if len(kept) == len(ids) else FinishReason.LENGTH


class DrawnRewards(Settings):
    """Rewards of simulated episodes. Tasks of a wide spread are often dropped as too easy or too hard."""

    success: float = Field(default=0.5, ge=0, le=1, description="Mean chance that an episode succeeds.")
    spread: float = Field(
        default=0.3, ge=0, le=1, description="How far a task's chance is from the mean, at most; kept within 0 and 1."
    )

    def draw(self, seed: int, task: str, trajectory: str) -> float:
        """Draws the reward of an episode, 0.0 or 1.0. The same arguments give the same reward."""
        middle = self.success + self.spread * random.Random(f"{seed}/{task}/chance").uniform(-1, 1)
        return float(random.Random(f"{seed}/{task}/{trajectory}").random() < min(max(middle, 0.0), 1.0))


def drawn(team: TeamSpec, rewards: DrawnRewards | None, seed: int) -> TeamSpec:
    """Returns the team with drawn rewards in place of those that its workflow gives; unchanged for None."""
    if rewards is None:
        return team

    async def play(task: Task, seats: Team) -> None:
        await team.run(task, seats)
        reward = rewards.draw(seed, task.input_id, seats.context.trajectory_id)
        seats.replace_rewards(reward)
        seats.report(success=reward)

    return replace(team, run=play)
