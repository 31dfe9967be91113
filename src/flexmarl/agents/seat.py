"""Seat: one agent in one episode, with its memory, its tools and its rewards. Its acts give Replies.

The tool-integrated loop of an act, with a budget of `max_tool_calls`:

    observation ──► prompt ──► generate ──► calls? ── no, or budget spent ──► Reply
                      ▲                        │ yes
                      └── results, as prompt ◄─┘  all calls of the message at once
"""

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flexmarl.agents.caller import Act, AgentCall, AgentSpec, Caller, check_tags
from flexmarl.agents.chat import Conversation, Message, SaidCall, spoken_from
from flexmarl.agents.context import EpisodeContext, recall
from flexmarl.agents.episode_log import Ledger
from flexmarl.agents.interpret import Ending, Next, found, language_mix, next_move, unread
from flexmarl.agents.tool_use import ToolUse, use_tools
from flexmarl.errors import EpisodeError
from flexmarl.records import FinishReason, Scalar, Turn
from flexmarl.tools import Found, ToolCall
from flexmarl.tools.arguments import BadArguments, fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An agent's answer to one observation, after its tool calls."""

    text: str
    """The final message; the messages that called tools are in `transcript`."""
    parsed: Any
    """Value that the agent's parser found in the text; None if it found none."""
    turns: tuple[Turn, ...]
    """The turns of the act, one for each LLM call."""
    calls: tuple[ToolUse, ...]
    transcript: str
    """All messages and tool results of the act, in order: the work, which a verifier may see."""
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


class Seat:
    """An agent in one episode."""

    def __init__(self, agent: AgentSpec, context: EpisodeContext, ledger: Ledger) -> None:
        self.name = agent.name
        self.policy = agent.policy
        self.last: Reply | None = None
        """Its last reply."""
        self.state: dict[str, Any] = {}
        """Data for the workflow's own use."""
        self._agent = agent
        self._caller = Caller(agent, context, ledger)
        self._renderer = agent.renderer
        self._context = context
        self._ledger = ledger
        self._acts: list[tuple[Message, ...]] = []
        self._conversation: Conversation | None = None
        self._branches = 0
        self._acting = False
        task = context.task
        self._heard = "\n".join((*(one.content for one in task.opening), task.prompt))

    def act(self, observation: str, *, turn: int | None = None, **tags: Scalar) -> Coroutine[Any, Any, Reply]:
        """Answers an observation, with as many tool calls as the agent makes and the budget allows.

        The turns get these `tags`, and the number `turn`; without it, acts are numbered as they begin. Acts with one
        number are simultaneous where turns are compared. Acts of one seat may overlap only if it has no memory. Raises
        EngineError if a call could not be served, EpisodeError if it was aborted, a tool broke or the act was not
        allowed. An act that is never awaited fails the episode.
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
        if self._agent.memory == "none":
            self.last = await self._answer(self._open(), observation, turn, tags)
            return self.last
        if self._acting:
            raise EpisodeError(
                f"agent {self.name!r} was asked to act while it acts, and it has a memory; "
                "await the first act, or set its `memory` to none"
            )
        conversation, self._conversation, self._acting = self._open(), None, True
        before = len(conversation.messages)
        try:
            self.last = await self._answer(conversation, observation, turn, tags)
        finally:
            self._acting = False
        # Only now, so that a failed act leaves nothing in the memory.
        self._acts.append(tuple(conversation.messages[before:]))
        self._conversation = conversation
        return self.last

    def inherit(self, other: "Seat") -> None:
        """Copies the memory and the state of `other`, the same seat in another branch."""
        self.last, self.state = other.last, deepcopy(other.state)
        self._acts, self._branches = [*other._acts], other._branches
        if other._conversation is not None:
            self._conversation = other._conversation.copy(self._next_branch)

    def reward(self, reward: float, part: str = "outcome") -> None:
        """Adds to the reward of each turn that this agent has at the end of the episode."""
        self._ledger.reward_agent(self.name, reward, part)

    def _open(self) -> Conversation:
        """The conversation so far, or a new one if the memory drops some of its acts."""
        kept = recall(self._agent.memory, self._acts)
        if self._conversation is not None and len(kept) == len(self._acts):
            return self._conversation
        opening = self._context.task.opening if self._agent.hears_task else ()
        prompts = [self._agent.system, *(one.content for one in opening if one.role == "system")]
        system = [Message("system", "\n\n".join(filter(None, prompts)))] if any(prompts) else []
        rounds = [Message(one.role, one.content) for one in opening if one.role != "system"]
        messages = [*system, *rounds, *(said for act in kept for said in act)]
        trust = self._agent.trust_special
        return Conversation(self._renderer, messages, self._next_branch, trust_special=trust)

    def _next_branch(self) -> int:
        self._branches += 1
        return self._branches - 1

    async def _answer(
        self, conversation: Conversation, observation: str, turn: int | None, tags: Mapping[str, Scalar]
    ) -> Reply:
        """Runs the loop of the picture above."""
        number = self._ledger.next_act()
        act = Act(number if turn is None else turn, tags)
        turns: list[Turn] = []
        uses: list[ToolUse] = []
        transcript: list[str] = []
        conversation.receive(Message("user", observation))
        clock = asyncio.get_running_loop().time
        agent = self._agent
        while True:
            left = max(0, agent.max_tool_calls - len(uses))
            said = await self._speak(conversation, act, may_call=left > 0)
            turns += said.turns
            transcript.append(said.text)
            if said.follows is Next.REPLY:
                break
            began = clock()
            used = await use_tools(
                said.calls,
                seat=agent.name,
                tools=agent.tools,
                context=self._context,
                text=said.text,
                left=left,
                most=agent.max_tool_calls,
                most_chars=agent.max_result_chars,
            )
            act = replace(act, hop=turns[0].hop, tool_s=clock() - began)
            self._ledger.note(turns[-1], _faults(said.calls, used))
            uses += used
            transcript += [use.result for use in used]
            conversation.receive(
                *(
                    Message("tool", use.result, call_id=call_id, name=use.name)
                    for use, call_id in zip(used, said.call_ids, strict=True)
                )
            )
        return Reply(
            text=said.text,
            parsed=said.parsed,
            turns=tuple(turns),
            calls=tuple(uses),
            transcript="\n".join(transcript),
            finish=turns[-1].finish,
            unresolved=bool(said.calls),
            give=self._ledger.reward_turns,
        )

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
            self._ledger.note(turn, signals)
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
        begin = spoken_from(text)
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
