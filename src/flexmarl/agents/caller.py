"""Caller: numbers, tags, sends and records the calls of one agent in one episode.

conversation ──► hop, tags, seed ──► recorder (prompt) ──► engine ──► Call ──► recorder (turn), ledger
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from flexmarl.agents.chat import ChatRenderer, Prompt
from flexmarl.agents.context import EpisodeContext, call_seed, context_hash
from flexmarl.agents.episode_log import Ledger
from flexmarl.agents.interpret import Parser
from flexmarl.agents.remembering import AgentContext
from flexmarl.agents.seat_tools import DelegateSettings
from flexmarl.agents.workflow_tasks import Outside
from flexmarl.errors import EngineError, EpisodeError, described, is_unicode, writable
from flexmarl.records import (
    AgentName,
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    PolicyName,
    Sampling,
    Scalar,
    SentCall,
    Turn,
    make_sample_id,
    split_sample_id,
)
from flexmarl.tools import Tool
from flexmarl.tools.syntax import Syntax

if TYPE_CHECKING:
    from flexmarl.agents.telling import Teller

_FAILURES = {FinishReason.ERROR: (EngineError, "failed"), FinishReason.ABORT: (EpisodeError, "was aborted")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """An agent, the same in every episode."""

    name: AgentName
    policy: PolicyName
    renderer: ChatRenderer
    sampling: Sampling
    """The agent's own settings; each call adds the stops of the tool syntax and of the chat template."""
    parser: Parser
    system: str = ""
    tools: Mapping[str, Tool] = field(default_factory=dict)
    """Tools by name."""
    syntax: Syntax | None = None
    tools_note: str = ""
    """How the model learns of its tools, and why calls are read in this syntax; for `flexmarl check`."""
    hears_task: bool = True
    """True: the messages before a task's prompt begin its conversations."""
    max_tool_calls: int = 0
    max_result_chars: int = 8192
    context: AgentContext = "none"
    delegates: DelegateSettings | None = None
    trust_special: bool = False
    teller: "Teller | None" = None
    """Tells the agent of other tools than its own: those of a program that speaks for it. None: it has no settings."""

    def full_sampling(self, overrides: Mapping[str, int | float]) -> Sampling:
        """The agent's sampling with the overrides, and with all strings and ids at which generation must stop."""
        stop = self.syntax.stop if self.syntax else ()
        # An engine looks for strings in text without special tokens.
        stop_ids = {*self.renderer.stop_ids, *self.renderer.special_ids(stop)}
        return replace(self.sampling, stop=(*self.sampling.stop, *stop), stop_ids=tuple(sorted(stop_ids)), **overrides)

    @property
    def kept_ids(self) -> frozenset[int]:
        """The special tokens that the agent's texts show: the markers of its calls."""
        return self.renderer.special_ids(self.syntax.markers) if self.syntax else frozenset()


@dataclass(frozen=True, slots=True)
class Act:
    """Facts about an act under way that its next call records: number, tags, first hop, seconds of the last tool."""

    turn: int
    """Number of the act, or the one that the workflow gave."""
    tags: Mapping[str, Scalar]
    hop: int | None = None
    """Hop of its first call, once there is one."""
    tool_s: float = 0.0
    """Seconds taken by the tool whose result the next call hears."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call that was answered but is not yet recorded."""

    sent: SentCall
    request: GenerationRequest
    generation: Generation
    text: str


class Caller:
    """Sends one agent's calls, any number at once."""

    def __init__(self, agent: AgentSpec, context: EpisodeContext, ledger: Ledger) -> None:
        self._agent, self._context, self._ledger = agent, context, ledger

    @cached_property
    def sampling(self) -> Sampling:
        """Sampling of a call that has the whole budget of tokens."""
        # Made at the first act: in a large team, most seats never act in an episode.
        return self._agent.full_sampling(self._context.sampling)

    @cached_property
    def _kept_ids(self) -> frozenset[int]:
        return self._agent.kept_ids

    async def call(self, prompt: Prompt, act: Act, max_tokens: int, *, stop: tuple[str, ...] = ()) -> AgentCall:
        """Makes one call of an act, from its prompt to the engine's answer. `stop`: further texts that end the answer.

        Raises EngineError for an answer with an error and EpisodeError for an aborted one, after recording the tokens
        sampled until then.
        """
        agent, context, prompt_ids = self._agent, self._context, prompt.ids
        hashed = context_hash(agent.policy, prompt_ids)
        # Numbered before anything is awaited, so that numbers follow the order in which the workflow sends.
        numbers = self._ledger.next_call(agent.name, hashed)
        node, parent = context.node, prompt.parent
        sent = SentCall(
            sample_id=make_sample_id(context.task.input_id, numbers.hop, context.trajectory_id),
            episode=context.episode,
            agent=agent.name,
            policy=agent.policy,
            parent=parent,
            call=numbers.call,
            act_hop=numbers.hop if act.hop is None else act.hop,
            turn=len(node.path) - 1 if node else act.turn,
            branch=node.branch(numbers.of_fork) if node else str(prompt.branch),
            path=node.path if node else (),
            context_hash=hashed,
            after=self._ledger.graph.sent(numbers.hop, None if parent is None else split_sample_id(parent)[1]),
            tool_s=act.tool_s,
            purpose=context.purpose,
            tags=act.tags,
        )
        full = replace(self.sampling, stop=(*self.sampling.stop, *stop)) if stop else self.sampling
        request = GenerationRequest(
            request_id=sent.sample_id,
            policy=agent.policy,
            prompt_ids=prompt_ids,
            sampling=full if max_tokens == full.max_tokens else replace(full, max_tokens=max_tokens),
            seed=call_seed(context.run_seed, context.stream, agent.name, hashed, numbers.nth),
            agent=agent.name,
            purpose=context.purpose,
            conversation=f"{context.trajectory_id}/{agent.name}/{prompt.branch}",
        )
        turn_of = partial(self._turn, sent, request)
        with Outside():
            await context.recorder.prompt(sent, prompt_ids)
            generation = await context.generate(
                request, interrupted=partial(context.recorder.interrupted, sent.sample_id, turn_of=turn_of)
            )
        if generation.finish in _FAILURES:
            kind, ended = _FAILURES[generation.finish]
            said = generation.error or "no reason was given"
            because = f"call {sent.sample_id} of agent {agent.name!r} {ended}: {said}"
            with Outside():
                await context.recorder.failed(turn_of(generation), because)
            raise kind(because)
        return AgentCall(sent, request, generation, self.text_of(generation.response_ids))

    def text_of(self, response_ids: IntArray) -> str:
        """Text of a response [R], with the markers of tool calls and without other special tokens."""
        return self._agent.renderer.decode(response_ids, self._kept_ids)

    async def record(self, call: AgentCall, valid: bool, *, known: bool = True) -> Turn:
        """Records an answered call in the ledger and in the recorder; returns its turn.

        `known` False: nobody has read the answer yet, so that no other call depends on it.
        """
        turn = self._turn(call.sent, call.request, call.generation, text=call.text, valid=valid)
        self._ledger.add(turn, known=known)
        with Outside():
            await self._context.recorder.turn(turn)
        return turn

    async def record_failure(self, call: AgentCall, error: Exception) -> None:
        """Records an answer that raised `error` when it was read: its tokens are kept, but not as a turn."""
        turn = self._turn(call.sent, call.request, call.generation, text=call.text)
        with Outside():
            await self._context.recorder.failed(turn, described(error))

    def _turn(
        self,
        sent: SentCall,
        request: GenerationRequest,
        generation: Generation,
        *,
        text: str | None = None,
        valid: bool = False,
    ) -> Turn:
        return Turn(
            **sent.shared(),
            prompt_ids=request.prompt_ids,
            response_ids=generation.response_ids,
            logprobs=generation.logprobs,
            raw_logprobs=generation.raw_logprobs,
            versions=generation.versions,
            finish=generation.finish,
            valid=valid,
            text=self.text_of(generation.response_ids) if text is None else text,
        )


def check_tags(tags: Mapping[str, Scalar]) -> None:
    """Raises EpisodeError for a tag that a workflow cannot give."""
    for name, value in tags.items():
        if not isinstance(value, str | int | float | bool):
            raise EpisodeError(f"the tag {name!r} must be a string, number or bool, got {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise EpisodeError(f"the tag {name!r} must be a finite number, got {float(value)!r}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise EpisodeError(f"the tag {name!r} must be a number of at most 64 bits; give it as a string")
        if not (is_unicode(name) and (not isinstance(value, str) or is_unicode(value))):
            raise EpisodeError(f"the tag {writable(name)!r} holds half a surrogate pair, which UTF-8 cannot encode")
