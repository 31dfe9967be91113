"""Decides what simulated engines answer, by agent: what stands in for weights.

simulation.replies: {AGENT: {type: ...}}      reply_kinds.py
simulation.recorded: RUN                      recorded_replies.py, for the agents that `replies` does not name
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flexmarl.agents import ChatRenderer, TeamSpec
from flexmarl.errors import ConfigError, EngineError
from flexmarl.records import AgentName, FinishReason, GenerationRequest, IntArray, Sampling
from flexmarl.simulator.recorded_replies import recorded_responders
from flexmarl.simulator.reply_kinds import AnyReplies, Responder, responder

DEFAULT = "default"
"""The agents that `simulation.replies` does not name."""


def responder_of(team: TeamSpec, replies: Mapping[str, AnyReplies], *, recorded: Path | None = None) -> Responder:
    """One responder for all engines of a run: a request's conversation says which agent asks.

    Raises ConfigError for an agent that nobody speaks for, and for replies of an agent that there is not.
    """
    if unknown := set(replies) - {*team.agents, DEFAULT}:
        raise ConfigError(
            f"simulation.replies.{min(unknown)}: there is no such agent; there are: {', '.join(team.agents)}"
        )
    kinds = {agent: replies.get(agent) or replies.get(DEFAULT) for agent in team.agents}
    silent = [agent for agent, kind in kinds.items() if kind is None]
    if silent and recorded is None:
        raise ConfigError(
            f"simulation.replies.{silent[0]} is missing: a simulated engine has no weights to answer with; use "
            f"{{type: lengths, mean: 300}}, {{type: scripted, name: ...}}, or simulation.recorded: a run folder"
        )
    speaks = {agent: _responder(agent, kind, team.agents[agent].renderer) for agent, kind in kinds.items() if kind}
    if silent and recorded is not None:
        speaks |= recorded_responders(recorded, silent)
    return lambda request: speaks[_agent_of(request)](request)


def reply_to(request: GenerationRequest, respond: Responder) -> tuple[IntArray, FinishReason]:
    """What is left to say of the responder's reply, and how it ends.

    Of a request that another instance began, the responder sees the original: it answers the same.
    """
    said = request.offset
    if not said:
        return _cut(respond(request), request.sampling)
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + said)
    original = replace(request, prompt_ids=request.prompt_ids[:-said], sampling=sampling, offset=0)
    ids, finish = _cut(respond(original), sampling)
    return ids[said:], finish


def _responder(agent: AgentName, kind: AnyReplies, renderer: ChatRenderer) -> Responder:
    try:
        return kind.responder(renderer)
    except ConfigError as error:
        raise ConfigError(f"simulation.replies.{agent}.{error}") from None


def _agent_of(request: GenerationRequest) -> AgentName:
    """The middle of `{trajectory}/{agent}/{branch}`."""
    parts = (request.conversation or "").split("/")
    if len(parts) != 3:
        raise EngineError(
            f"request '{request.request_id}' must say in `conversation` which agent asks, as trajectory/agent/branch; "
            f"got {request.conversation!r}"
        )
    return AgentName(parts[1])


def _cut(ids: IntArray, sampling: Sampling) -> tuple[IntArray, FinishReason]:
    """The ids up to the first stop id, or up to `max_tokens`; a reply that just ends has stopped."""
    if not len(ids):
        raise EngineError("the responder gave no token; a reply has at least one")
    kept = ids[: sampling.max_tokens]
    ends = [int(found.argmax()) + 1 for stop in sampling.stop_ids if (found := kept == stop).any()]
    if ends:
        return kept[: min(ends)], FinishReason.STOP
    return kept, FinishReason.STOP if len(kept) == len(ids) else FinishReason.LENGTH


__all__ = ["AnyReplies", "Responder", "reply_to", "responder", "responder_of"]
