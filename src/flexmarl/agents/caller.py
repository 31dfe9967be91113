"""Caller: numbers, tags, sends and records the calls of one agent in one episode.

conversation ──► hop, tags, seed ──► recorder (prompt) ──► engine ──► Call ──► recorder (turn), ledger
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from flexmarl.agents.chat import ChatRenderer, Conversation
from flexmarl.agents.context import EpisodeContext, Memory, call_seed, context_hash
from flexmarl.agents.episode_log import Ledger
from flexmarl.agents.interpret import Parser
from flexmarl.agents.workflow_tasks import outside
from flexmarl.errors import EngineError, EpisodeError, described, is_unicode, writable
from flexmarl.records import (
    AgentName,
    FinishReason,
    Generation,
    GenerationRequest,
    PolicyName,
    SampleId,
    Sampling,
    Scalar,
    Turn,
    make_sample_id,
    split_sample_id,
)
from flexmarl.tools import Tool
from flexmarl.tools.syntax import Syntax

OURS = frozenset(
    {
        *("task", "episode", "agent", "policy", "group", "hop", "call", "act"),
        *("context_hash", "valid", "greedy", "after", "tool_s"),
    }
)
"""Tags that a workflow cannot give. It can give `turn` and `branch`."""
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
    max_tool_calls: int = 0
    memory: Memory = "none"
    trust_special: bool = False

    def full_sampling(self, overrides: Mapping[str, int | float]) -> Sampling:
        """The agent's sampling with the overrides, and with all strings and ids at which generation must stop."""
        return replace(
            self.sampling,
            stop=(*self.sampling.stop, *(self.syntax.stop if self.syntax else ())),
            stop_ids=self.renderer.stop_ids,
            **overrides,
        )


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call that was answered but is not yet recorded."""

    request: GenerationRequest
    tags: dict[str, Scalar]
    generation: Generation
    text: str


class Caller:
    """Sends one agent's calls, any number at once."""

    def __init__(self, agent: AgentSpec, context: EpisodeContext, ledger: Ledger) -> None:
        self._agent = agent
        self._context = context
        self._ledger = ledger

    @cached_property
    def sampling(self) -> Sampling:
        """Sampling of a call that has the whole budget of tokens."""
        # Made at the first act: in a large team, most seats never act in an episode.
        return self._agent.full_sampling(self._context.sampling)

    async def call(self, conversation: Conversation, tags: Mapping[str, Scalar], max_tokens: int) -> AgentCall:
        """Makes one call, from the conversation's prompt to the engine's answer.

        `tags` hold `act`, the hop of the act's first call, unless this is the first call. Raises EngineError for an
        answer with an error and EpisodeError for an aborted one, after recording the tokens sampled until then.
        """
        agent, context, prompt_ids = self._agent, self._context, conversation.prompt_ids
        hashed = context_hash(agent.policy, prompt_ids)
        # Numbered before anything is awaited, so that numbers follow the order in which the workflow sends.
        numbers = self._ledger.next_call(agent.name, hashed)
        tags = {
            "task": context.task.input_id,
            "episode": context.episode,
            "agent": agent.name,
            "policy": agent.policy,
            "group": context.group,
            "hop": numbers.hop,
            "call": numbers.call,
            "act": numbers.hop,
            "branch": conversation.branch,
            "context_hash": hashed,
            "after": ",".join(map(str, self._ledger.graph.sent(numbers.hop, _hop_of(conversation.parent)))),
            **context.tags,
            **tags,
            **(context.node.tags(numbers.of_fork) if context.node else {}),
        }
        sample_id = make_sample_id(context.task.input_id, numbers.hop, context.trajectory_id)
        full = self.sampling
        request = GenerationRequest(
            request_id=sample_id,
            policy=agent.policy,
            prompt_ids=prompt_ids,
            sampling=full if max_tokens == full.max_tokens else replace(full, max_tokens=max_tokens),
            seed=call_seed(context.run_seed, context.stream, agent.name, hashed, numbers.nth),
            agent=agent.name,
            purpose=context.purpose,
            conversation=f"{context.trajectory_id}/{agent.name}/{conversation.branch}",
        )
        turn_of = partial(self._turn, request, tags, conversation.parent)
        with outside():
            await context.recorder.prompt(
                sample_id=sample_id,
                agent=agent.name,
                policy=agent.policy,
                prompt_ids=prompt_ids,
                parent=conversation.parent,
                tags=tags,
            )
            generation = await context.generate(
                request, interrupted=partial(context.recorder.interrupted, sample_id, turn_of=turn_of)
            )
        if generation.finish in _FAILURES:
            kind, ended = _FAILURES[generation.finish]
            because = f"call {sample_id} of agent {agent.name!r} {ended}: {generation.error or 'no reason was given'}"
            with outside():
                await context.recorder.failed(turn_of(generation), because)
            raise kind(because)
        return AgentCall(request, tags, generation, agent.renderer.decode(generation.response_ids))

    async def record(self, call: AgentCall, conversation: Conversation, valid: bool) -> Turn:
        """Records an answered call in the ledger and in the recorder; returns its turn."""
        turn = self._turn(call.request, call.tags, conversation.parent, call.generation, text=call.text, valid=valid)
        self._ledger.add(int(call.tags["hop"]), turn)
        with outside():
            await self._context.recorder.turn(turn)
        return turn

    async def record_failure(self, call: AgentCall, conversation: Conversation, error: Exception) -> None:
        """Records an answer that raised `error` when it was read: its tokens are kept, but not as a turn."""
        turn = self._turn(call.request, call.tags, conversation.parent, call.generation, text=call.text)
        with outside():
            await self._context.recorder.failed(turn, described(error))

    def _turn(
        self,
        request: GenerationRequest,
        tags: Mapping[str, Scalar],
        parent: SampleId | None,
        generation: Generation,
        *,
        text: str | None = None,
        valid: bool = False,
    ) -> Turn:
        return Turn(
            sample_id=SampleId(request.request_id),
            episode=self._context.episode,
            agent=self._agent.name,
            policy=self._agent.policy,
            prompt_ids=request.prompt_ids,
            response_ids=generation.response_ids,
            logprobs=generation.logprobs,
            raw_logprobs=generation.raw_logprobs,
            versions=generation.versions,
            finish=generation.finish,
            text=self._agent.renderer.decode(generation.response_ids) if text is None else text,
            parent=parent,
            tags={**tags, "valid": valid},
        )


def check_tags(tags: Mapping[str, Scalar]) -> None:
    """Raises EpisodeError for a tag that a workflow cannot give."""
    for name, value in tags.items():
        if name in OURS:
            raise EpisodeError(f"the tag {name!r} is set by the seat; give yours another name")
        if not isinstance(value, str | int | float | bool):
            raise EpisodeError(f"the tag {name!r} must be a string, number or bool, got {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise EpisodeError(f"the tag {name!r} must be a finite number, got {float(value)!r}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise EpisodeError(f"the tag {name!r} must be a number of at most 64 bits; give it as a string")
        if not (is_unicode(name) and (not isinstance(value, str) or is_unicode(value))):
            raise EpisodeError(f"the tag {writable(name)!r} holds half a surrogate pair, which UTF-8 cannot encode")


def _hop_of(call: SampleId | None) -> int | None:
    return None if call is None else split_sample_id(call)[1]
