"""Seat: one agent in one episode, with its context, its tools and its rewards. Its acts give Replies.

The tool-integrated loop of an act, with a budget of `max_tool_calls`:

    observation ──► prompt ──► generate ──► calls? ── no, or budget spent ──► Reply
                      ▲                        │ yes
                      └── results, as prompt ◄─┘  all calls of the message at once

A prompt that passes the limit of `context.compact` is not sent: the agent writes a summary first, and goes on from it.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from flexmarl.agents.caller import Act, AgentCall, AgentSpec, Caller, check_tags
from flexmarl.agents.chat import Conversation, Message, SaidCall, results_in, spoken_from
from flexmarl.agents.context import EpisodeContext
from flexmarl.agents.episode_log import Ledger
from flexmarl.agents.interpret import Ending, Next, found, language_mix, next_move, unread
from flexmarl.agents.remembering import (
    ACTION,
    LEFT_OUT,
    CompactSettings,
    ContextTool,
    carry_of,
    compaction_of,
    hiding_of,
    recall,
    tools_of,
)
from flexmarl.agents.seat_tools import LEAVE_NO_RESULT, DelegateSettings, OwnMemory, without_middle
from flexmarl.agents.tool_use import Answer, ToolUse, use_tools
from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.records import AgentName, FinishReason, Scalar, Turn
from flexmarl.tools import Found, Observation, ToolCall
from flexmarl.tools.arguments import BadArguments, fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An agent's answer to one observation, after its tool calls."""

    text: str
    """The final message; the messages that called tools are in `transcript`."""
    parsed: Any
    """Value that the agent's parser found in the text; None if it found none."""
    turns: tuple[Turn, ...]
    """The turns of the act, one for each LLM call; those of summaries too, unless they are not trained on."""
    calls: tuple[ToolUse, ...]
    transcript: str
    """All messages and tool results of the act, in order: the work, which a verifier may see."""
    summaries: tuple[str, ...] = ()
    """The summaries that the agent wrote before or during the act, to make room (`context.compact`)."""
    finish: FinishReason
    """Finish reason of the last turn; `length` means that the text was cut."""
    unresolved: bool = False
    """The text holds a tool call that was not run: the budget was spent, or the text was cut."""
    give: Callable[[tuple[Turn, ...], float, str], None] = field(repr=False)
    """Called by `reward` with (turns, reward, part)."""

    @property
    def answer(self) -> str:
        """Text that a task can score: the parsed value if it is a text or a number, else the whole `text`.

        A parser that finds nothing gives None: then this is the whole text of the reply, and `parsed` is None.
        """
        is_plain = isinstance(self.parsed, str | int | float) and not isinstance(self.parsed, bool)
        return str(self.parsed) if is_plain else self.text

    def reward(self, reward: float, part: str = "outcome") -> None:
        """Adds to the reward of this reply's turns. Rewards of one `part` add up; each part is logged on its own."""
        self.give(self.turns, reward, part)


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of the agent, sampled in one or more calls."""

    turns: tuple[Turn, ...]
    text: str
    calls: tuple[Found, ...]
    call_ids: tuple[str, ...]
    follows: Next
    parsed: Any


@dataclass(slots=True)
class _Work:
    """The parts of a reply so far."""

    turns: list[Turn] = field(default_factory=list)
    uses: list[ToolUse] = field(default_factory=list)
    transcript: list[str] = field(default_factory=list)
    summaries: list[str] = field(default_factory=list)


class Seat:
    """An agent in one episode."""

    def __init__(
        self,
        agents: Mapping[AgentName, AgentSpec],
        name: AgentName,
        context: EpisodeContext,
        ledger: Ledger,
        *,
        handed_by: tuple[Turn, ...] = (),
    ) -> None:
        """`agents`: the whole team. `handed_by`: the turns that handed the seat its task, the first one first."""
        agent = agents[name]
        self.name = agent.name
        self.policy = agent.policy
        self.last: Reply | None = None
        """Its last reply."""
        self.state: dict[str, Any] = {}
        """Data for the workflow's own use."""
        self._agents = agents
        self._agent = agent
        self._handed_by = handed_by
        self._caller = Caller(agent, context, ledger)
        self._renderer = agent.renderer
        self._context = context
        self._ledger = ledger
        self._begun: tuple[Message, ...] | None = None
        """The messages that its last summary left it with; None before the first."""
        self._forgotten = 0
        """Results of calls before that."""
        self._acts: list[tuple[Message, ...]] = []
        """The acts since then."""
        self._conversation: Conversation | None = None
        self._memory = OwnMemory()
        self._begins_anew = False
        """True once an act has changed what the agent remembers of earlier ones."""
        self._acting = False
        task = context.task
        self._heard = "\n".join((*(one.content for one in task.opening), task.prompt))

    @cached_property
    def _writer(self) -> Caller:
        """Makes its calls for summaries, in which the syntax of its tools ends nothing."""
        return Caller(replace(self._agent, syntax=None), self._context, self._ledger)

    def act(self, observation: str, *, turn: int | None = None, **tags: Scalar) -> Coroutine[Any, Any, Reply]:
        """Answers an observation, with as many tool calls as the agent makes and the budget allows.

        The turns get these `tags`, and the number `turn`; without it, acts are numbered as they begin. Acts with one
        number are simultaneous where turns are compared. Acts of one seat may overlap only if its context is none.
        Raises EngineError if a call could not be served, EpisodeError if it was aborted, a tool broke or the act was
        not allowed. An act that is never awaited fails the episode.
        """
        act, caller = self._act(observation, turn, tags), sys._getframe(1)
        self._ledger.make_act(act, caller.f_code.co_filename, caller.f_lineno)
        return act

    async def _act(self, observation: str, turn: int | None, tags: Mapping[str, Scalar]) -> Reply:
        if not isinstance(observation, str):
            instead = "its `.text`" if isinstance(observation, Reply) else "a text that you make of it"
            kind = type(observation).__name__
            raise EpisodeError(f"agent {self.name!r} answers a text, and was given {kind}; give it {instead}")
        if turn is not None and type(turn) is not int:
            raise EpisodeError(f"turn must be a whole number, got {turn!r}; give another name to a tag of your own")
        check_tags(tags if turn is None else {"turn": turn, **tags})
        if self._agent.context == "none":
            self.last = await self._answer(self._open(), observation, turn, tags)
            return self.last
        if self._acting:
            raise EpisodeError(
                f"agent {self.name!r} was asked to act while it acts, and it remembers its acts; "
                "await the first act, or set its `context` to none"
            )
        conversation, self._conversation, self._acting = self._open(), None, True
        before = len(conversation.messages)
        memory, self._begins_anew = self._memory.copy(), False
        try:
            self.last = await self._answer(conversation, observation, turn, tags)
        except BaseException:
            self._memory = memory
            raise
        finally:
            self._acting = False
        # Only now, so that nothing of a failed act is remembered.
        if self._begins_anew:
            self._begun, self._acts = tuple(one for one in conversation.messages if one.role != "system"), []
            self._forgotten = conversation.num_results - results_in(self._begun)
        else:
            self._acts.append(tuple(conversation.messages[before:]))
        self._conversation = conversation
        return self.last

    def inherit(self, other: "Seat") -> None:
        """Copies what `other`, the same seat in another branch, remembers, and its state."""
        self.last, self.state, self._begun = other.last, deepcopy(other.state), other._begun
        self._forgotten, self._memory = other._forgotten, other._memory.copy()
        self._acts = [*other._acts]
        if other._conversation is not None:
            self._conversation = other._conversation.copy(self._next_branch)

    def reward(self, reward: float, part: str = "outcome") -> None:
        """Adds to the reward of each turn that this agent has at the end of the episode."""
        self._ledger.reward_agent(self.name, reward, part)

    def _open(self) -> Conversation:
        """The conversation so far, or a new one if some of its acts are forgotten."""
        kept = recall(self._agent.context, self._acts)
        if self._conversation is not None and len(kept) == len(self._acts):
            return self._conversation
        opening = self._context.task.opening if self._agent.hears_task else ()
        prompts = [self._agent.system, *(one.content for one in opening if one.role == "system")]
        system = [Message("system", "\n\n".join(filter(None, prompts)))] if any(prompts) else []
        rounds = self._begun or [Message(one.role, one.content) for one in opening if one.role != "system"]
        messages = [*system, *rounds, *(said for act in kept for said in act)]
        forgotten = self._forgotten + sum(results_in(act) for act in self._acts[: len(self._acts) - len(kept)])
        trust = self._agent.trust_special
        return Conversation(
            self._renderer, messages, self._next_branch, trust_special=trust, forgotten_results=forgotten
        )

    def _next_branch(self) -> int:
        return self._ledger.next_branch(self.name)

    async def _answer(
        self, conversation: Conversation, observation: str, turn: int | None, tags: Mapping[str, Scalar]
    ) -> Reply:
        """Runs the loop of the picture above."""
        number = self._ledger.next_act()
        act = Act(number if turn is None else turn, tags)
        work = _Work()
        act = await self._hear(conversation, act, work, Message("user", observation))
        clock = asyncio.get_running_loop().time
        agent = self._agent
        while True:
            left = max(0, agent.max_tool_calls - len(work.uses))
            said = await self._speak(conversation, act, may_call=left > 0)
            work.turns += said.turns
            work.transcript.append(said.text)
            if said.follows is Next.REPLY:
                break
            began, own = clock(), self._own(said.turns[-1], tags)
            used = await use_tools(
                said.calls,
                seat=agent.name,
                tools=agent.tools,
                context=self._context,
                text=said.text,
                left=left,
                most=agent.max_tool_calls,
                most_chars=agent.max_result_chars,
                own=own,
            )
            # Calls of delegated work have times of their own.
            waited = any(use.name not in own for use in used)
            act = replace(act, hop=work.turns[0].act_hop, tool_s=clock() - began if waited else 0.0)
            self._ledger.note(work.turns[-1], _faults(said.calls, used))
            work.uses += used
            work.transcript += [use.result for use in used]
            results = [
                Message("tool", use.result, call_id=call_id, name=use.name)
                for use, call_id in zip(used, said.call_ids, strict=True)
            ]
            act = await self._hear(conversation, act, work, *self._rearranged(conversation, work, results))
        return Reply(
            text=said.text,
            parsed=said.parsed,
            turns=tuple(work.turns),
            calls=tuple(work.uses),
            transcript="\n".join(work.transcript),
            summaries=tuple(work.summaries),
            finish=work.turns[-1].finish,
            unresolved=bool(said.calls),
            give=self._ledger.reward_turns,
        )

    def _own(self, turn: Turn, tags: Mapping[str, Scalar]) -> Mapping[str, Answer]:
        """The answers to calls of a turn that no tool outside of the seat answers."""

        async def remember(name: ContextTool, arguments: Mapping[str, Any]) -> Observation:
            return self._memory.answer(name, arguments)

        own: dict[str, Answer] = {name: partial(remember, name) for name in tools_of(self._agent.context)}
        if self._agent.delegates:
            own["delegate"] = partial(self._delegate, self._agent.delegates, turn, tags)
        return own

    async def _delegate(
        self, rules: DelegateSettings, turn: Turn, tags: Mapping[str, Scalar], arguments: Mapping[str, Any]
    ) -> Observation:
        """Has another agent do a task, in a seat of its own."""
        if len(self._handed_by) >= rules.depth:
            return Observation(f"a task can be handed on {rules.depth} deep; do it yourself", ok=False)
        other, handed_by = AgentName(arguments["agent"]), (*self._handed_by, turn)
        seat = Seat(self._agents, other, self._context, self._ledger, handed_by=handed_by)
        lane: dict[str, Scalar] = {"lane": self._ledger.next_lane(), "delegated_by": turn.hop}
        reply = await seat.act(arguments["task"], turn=None, **{**tags, **lane})
        return Observation(reply.answer, data=reply)

    def _rearranged(self, conversation: Conversation, work: _Work, results: Sequence[Message]) -> Sequence[Message]:
        """Applies what the agent has asked of its context. Returns what it hears next."""
        memory, said = self._memory, conversation.messages
        summary, keep, memory.summary, memory.keep = memory.summary, memory.keep, None, None
        system = [one for one in said if one.role == "system"]
        if summary is not None:
            self._begins_anew = True
            work.summaries.append(summary)
            carried = Message("user", carry_of(self._agent.context).replace("{summary}", summary).rstrip())
            if all(one.name in LEAVE_NO_RESULT for one in results):
                conversation.rewrite(system)
                return [carried]
            conversation.rewrite([*system, carried, said[-1]])
        elif keep is not None:
            self._begins_anew = True
            conversation.rewrite([*system, *without_middle(said[len(system) :], keep)])
        return results

    async def _hear(self, conversation: Conversation, act: Act, work: _Work, *heard: Message) -> Act:
        """Adds what the agent hears, an observation or results of its calls. It writes a summary first if its next
        prompt would pass the limit. Returns the act as its next call finds it."""
        if hide := hiding_of(self._agent.context):
            said = len(conversation.messages)
            shown = hide.shown([*conversation.messages, *heard])
            heard = tuple(shown[said:])
            if shown[:said] != conversation.messages:
                conversation.rewrite(shown[:said])
        compact = compaction_of(self._agent.context)
        if compact and (length := conversation.length_with(*heard)) > compact.limit_tokens:
            if any(one.role != "system" for one in conversation.messages):
                return await self._compact(conversation, act, work, heard, compact)
            self._check_length(length, compact, "at the beginning of its conversation")
        conversation.receive(*heard)
        return act

    async def _compact(
        self, conversation: Conversation, act: Act, work: _Work, heard: Sequence[Message], compact: CompactSettings
    ) -> Act:
        """Asks the agent for a summary, from which the conversation goes on."""
        system = [one for one in conversation.messages if one.role == "system"]
        history = conversation.messages[len(system) :]
        of_calls = heard[0].role == "tool"  # Results cannot stand without their calls, so the summary covers both.
        asked = (*(heard if of_calls else ()), Message("user", compact.ask))
        try:
            conversation.receive(*asked)
        except ConfigError:
            if not of_calls:
                raise
            # Mistral's template has no place for a question behind results, so the last result holds it.
            asking = heard[-1]._replace(content=f"{heard[-1].content}\n\n{compact.ask}")
            conversation.receive(*heard[:-1], asking)
        turn, summary = await self._summarise(conversation, act, known=compact.train_actions)
        self._begins_anew = True
        work.summaries.append(summary)
        if compact.train_actions:
            work.turns.append(turn)
            act = replace(act, hop=turn.act_hop)
        else:
            self._ledger.leave_out(turn.sample_id, LEFT_OUT)
        conversation.rewrite(system)
        history, pending = ([*history, *heard], ()) if of_calls else (history, heard)
        seen, length = list[Message](), 0
        for seen in compact.continuations(history, summary, pending):
            if (length := conversation.length_with(*seen)) <= compact.limit_tokens:
                break
        self._check_length(length, compact, "after a summary")
        conversation.receive(*seen)
        return replace(act, tool_s=0.0)

    def _check_length(self, length: int, compact: CompactSettings, when: str) -> None:
        # A stand-in's tokens are characters: they say little of the length that the prompt will have.
        if length > compact.limit_tokens and not self._renderer.stands_in:
            raise EpisodeError(
                f"the prompt of agent {self.name!r} has {length} tokens {when}, and its context.compact.limit_tokens "
                f"is {compact.limit_tokens}; raise it, or give the agent shorter texts"
            )

    async def _summarise(self, conversation: Conversation, act: Act, *, known: bool) -> tuple[Turn, str]:
        """The turn of a call for a summary, and the summary without thoughts. `known`: other calls may depend on it."""
        tags = {**act.tags, "action": ACTION}
        call = await self._writer.call(conversation.prompt, replace(act, tags=tags), self._writer.sampling.max_tokens)
        summary = call.text[spoken_from(call.text, opened=self._renderer.opens_thought) :].strip()
        turn = await self._writer.record(call, bool(summary), known=known)
        mix = language_mix(turn.text, self._heard)
        self._note(turn, found(format_error=not summary, language_mix=mix))
        return turn, summary

    def _note(self, turn: Turn, signals: Mapping[str, float]) -> None:
        """Keeps the signals of a turn, and which turn has handed its task over."""
        self._ledger.note(turn, signals)
        if self._handed_by:
            self._ledger.hand_over(turn, self._handed_by[-1])

    async def _speak(self, conversation: Conversation, act: Act, *, may_call: bool) -> _Message:
        """Samples one message of at most `max_tokens`.

        If a stop string of the syntax ended no tool call, another call continues the message.
        """
        turns: list[Turn] = []
        left = self._caller.sampling.max_tokens
        while True:
            call = await self._caller.call(conversation.prompt, act, left)
            left -= len(call.generation.response_ids)
            try:
                text, calls, follows, parsed, valid = self._understood(turns, call, left, may_call=may_call)
            except Exception as error:  # The parser may be the user's own and raise anything.
                await self._caller.record_failure(call, error)
                raise
            turn = await self._caller.record(call, valid)
            mix = language_mix(turn.text, self._heard)
            ends = follows is Next.REPLY
            dropped = 1.0 if ends and calls else 0.0
            signals = found(format_error=ends and not valid, language_mix=mix, dropped_tool_calls=dropped)
            self._note(turn, signals)
            turns.append(turn)
            conversation.answer(turn)
            if follows is not Next.CONTINUE:
                ids = self._end_message(conversation, text, () if ends else calls)
                return _Message(tuple(turns), text, calls, ids, follows, parsed)
            act = replace(act, hop=turn.act_hop, tool_s=0.0)

    def _end_message(self, conversation: Conversation, text: str, calls: tuple[Found, ...]) -> tuple[str, ...]:
        """Adds the agent's message to its conversation. Returns the id of each call, the model's own if it has one."""
        number, said = conversation.num_results, list[SaidCall]()
        for index, call in enumerate(calls):
            call_id = call.call_id if isinstance(call, ToolCall) and call.call_id else f"{number + index:09d}"
            said.append(SaidCall(*self._said(call), call_id))
        first = calls[0] if calls else None
        prose = text[: first.start].strip() if isinstance(first, ToolCall) else ""
        conversation.end_message(text, tuple(said), prose)
        return tuple(call.call_id for call in said)

    def _said(self, call: Found) -> tuple[str, str]:
        """Name and arguments, as a JSON object, of a call as a chat template writes it; empty if it cannot."""
        if not isinstance(call, ToolCall):
            return "", ""
        arguments = call.arguments
        if call.name in self._agent.tools:
            fit = fitted(arguments, self._agent.tools[call.name].parameters)
            arguments = arguments if isinstance(fit, BadArguments) else fit
        return call.name, "" if isinstance(arguments, str) else json.dumps(arguments)

    def _understood(
        self, turns: list[Turn], call: AgentCall, left: int, *, may_call: bool
    ) -> tuple[str, tuple[Found, ...], Next, Any, bool]:
        """Reads the message so far: (text, tool calls in it, next move, parsed value, True if it is well formed)."""
        text = self._joined(turns, call)
        calls = self._calls(text)
        follows = next_move(calls, self._ending(call, left), may_call=may_call)
        if follows is Next.REPLY:
            parsed = self._agent.parser(text)
            return text, calls, follows, parsed, not calls and parsed is not None
        readable = all(isinstance(one, ToolCall) and one.name in self._agent.tools for one in calls)
        return text, calls, follows, None, readable or follows is Next.CONTINUE

    def _calls(self, text: str) -> tuple[Found, ...]:
        """The tool calls in a message. Those in its thoughts are not meant."""
        if self._agent.syntax is None:
            return ()
        begin = spoken_from(text, opened=self._renderer.opens_thought)
        calls = self._agent.syntax.parse(text[begin:])
        return tuple(replace(call, start=call.start + begin) if isinstance(call, ToolCall) else call for call in calls)

    def _joined(self, turns: list[Turn], call: AgentCall) -> str:
        if not turns:
            return call.text
        # Decoded together, because a character may be split between two calls.
        return self._caller.text_of(
            np.concatenate([*(turn.response_ids for turn in turns), call.generation.response_ids])
        )

    def _ending(self, call: AgentCall, left: int) -> Ending:
        ids = call.generation.response_ids
        if len(ids) == 0 or int(ids[-1]) in self._renderer.stop_ids:
            return Ending.AGENT
        if call.generation.finish is FinishReason.LENGTH or left <= 0:
            return Ending.LENGTH
        own = any(stop in call.text for stop in self._agent.sampling.stop)
        return Ending.AGENT if own or self._agent.syntax is None else Ending.SYNTAX


def _faults(calls: Sequence[Found], uses: Sequence[ToolUse]) -> Mapping[str, float]:
    """The signals of a message whose calls were answered."""
    return found(
        tool_error=any(use.run and not use.ok for use in uses),
        bad_tool_calls=unread(calls),
        dropped_tool_calls=sum(not use.run for use in uses) / len(uses),
        tool_calls=float(sum(use.run and bool(use.name) for use in uses)),
        tool_cost=sum(use.cost for use in uses),
    )
