"""Runs the door of one episode: each request becomes turns of a seat, each reply is delivered or left out.

    request ──► Deliveries: new, joins, again ──► history: prompt ──► Caller ──► engine ──► row ──► Answer ──► client
                                                                                  delivered: a turn of the episode
                                                                                  lost: FILTERED, with the reason

consumes     requests for the seats of an episode
waits for    the answers of the engines, which wait for places, versions and the clock as all calls do
produces     turns of the episode's ledger; replies; an account of every sampled token
unblocked by the answer; the client that goes, after `patience_s`; the end of the block in which the door is open
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, Protocol

import numpy as np

from flexmarl.agents.black_box import ProgramTask
from flexmarl.agents.caller import Act, AgentCall, AgentSpec, Caller
from flexmarl.agents.chat import Prompt, SaidCall, holds_thought, thought_opened
from flexmarl.agents.context import EpisodeContext
from flexmarl.agents.doors import DoorCall, OutsideAgent, RewardAddress, SeatAddress
from flexmarl.agents.episode_log import Ledger
from flexmarl.agents.interpret import found
from flexmarl.agents.workflow_tasks import Outside
from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import ConfigError, EngineError, EpisodeError, cause_of, described
from flexmarl.events.safe_json import MASK
from flexmarl.gateway.account import Account, AccountRow, undelivered
from flexmarl.gateway.delivery import Deliveries, Exchange, ReplyState
from flexmarl.gateway.dialects.base import Answer, Ask, Dialect, OfferedTool, Refused, ReplyChoice, Said, overflow
from flexmarl.gateway.heard import SAMPLED, HeardGenerate, Replies, Voice
from flexmarl.gateway.history import DeliveredTurn, PromptPlan, SeatHistory
from flexmarl.gateway.reply_parts import ReplyParts, certain, certain_of_plain, forced_words, plain_reply, read_reply
from flexmarl.gateway.settings import GatewaySettings
from flexmarl.records import AgentName, FinishReason, IntArray, PolicyName, Scalar, Task, Turn

MOST_VOICES = 64
"""Most sets of tools that the seats of one episode may offer: each has a renderer of its own."""

TAIL = 16
"""Tokens at the end of a prompt in which a template may begin a thought."""
WIRE_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""The beginnings that the dialects write before the name of a reply, as its id."""


def episode_ended() -> Refused:
    """The refusal of a request that comes after the end of its episode."""
    return Refused("the episode has ended", status=410, code="episode_ended")


def _answer(replies: Replies, choices: tuple[ReplyChoice, ...]) -> Answer:
    plan = replies.plan
    return Answer(
        name=replies.name,
        model=replies.ask.model or replies.seat,
        choices=choices,
        prompt_tokens=len(plan.ids),
        reused_tokens=plan.parent.length if plan.parent else 0,
        created=replies.created,
        prompt_ids=tuple(plan.ids.tolist()) if replies.ask.ids else (),
    )


class Runner(Protocol):
    """Runs agents of one kind."""

    async def play(self, agent: Any, payload: Mapping[str, Any], /) -> Any:
        """Plays an episode, as `Door.play` says. `payload`: `task`, `seats` and the name of the `episode`."""
        ...


async def _fail(error: EpisodeError) -> None:
    raise error


class EpisodeDoor:
    """The door of one episode."""

    history = SeatHistory
    deliveries_of = Deliveries
    heard = HeardGenerate
    """Its rules; tests of the laws break one in a subclass."""

    def __init__(
        self,
        settings: GatewaySettings,
        agents: Mapping[AgentName, AgentSpec],
        context: EpisodeContext,
        ledger: Ledger,
        *,
        key: str,
        url: str,
        limits: Mapping[PolicyName, int],
        runners: Mapping[str, Runner],
        reward_key: str = "",
    ) -> None:
        """`limits`: most tokens of prompt and reply together, by policy. `runners`: by the kind of agent.

        `reward_key`: see `RewardAddress`.
        """
        self.key, self.reward_key = key, reward_key
        self.account = Account()
        self.deliveries = self.deliveries_of()
        self._settings, self._agents, self._ledger = settings, agents, ledger
        self._heard = self.heard(context.generate, self.account)
        self._context = replace(context, generate=self._heard)
        self._url, self._limits, self._runners = url, limits, runners
        self._tasks: asyncio.TaskGroup | None = None
        self._voices: dict[tuple[str, str], Voice] = {}
        self._histories = {
            name: self.history(name, thoughts=settings.thoughts, trust_special=agent.trust_special)
            for name, agent in agents.items()
        }
        self._replies: dict[int, Replies] = {}
        """By the number of their exchange."""
        self._named: dict[str, Replies] = {}
        self._num_calls = 0
        self._secret = secrets.token_hex(8)
        self.ended = False
        self.closed: Callable[[], None] = lambda: None
        """Called when every sampled token has its place in the account."""

    @property
    def seats(self) -> Mapping[str, SeatAddress]:
        """The address of each seat."""
        return {
            name: SeatAddress(
                openai_url=f"{self._url}/e/{self.key}/{name}/v1",
                anthropic_url=f"{self._url}/e/{self.key}/{name}",
                key=self.key,
                model=name,
            )
            for name in self._agents
        }

    @property
    def rewards(self) -> RewardAddress:
        """Where rewards of the episode are posted."""
        return RewardAddress(url=f"{self._url}/episodes/{self._context.episode}/rewards", key=self.reward_key)

    def reward(self, reward: float, part: str, *, seat: str | None = None, call: str | None = None) -> None:
        """Adds to the reward of a reply by its id on the wire, else of a seat, else of the whole team.

        Raises Refused if there is no such seat, or if the reply was not delivered.
        """
        if seat is not None and seat not in self._agents:
            raise Refused(
                f"there is no seat {seat[:80]!r}; there are: {', '.join(self._agents)}", status=404, code="not_found"
            )
        if call is None and seat is None:
            self._ledger.reward_team(reward, part)
        elif call is None:
            self._ledger.reward_agent(AgentName(str(seat)), reward, part)
        else:
            name = next((call.removeprefix(one) for one in WIRE_PREFIXES if call.startswith(one)), call)
            got = next((one for one in self._replies.values() if one.name == name), None)
            if got is None or not got.exchange.delivered or seat not in (None, got.seat):
                raise Refused(f"there is no delivered reply {call[:80]!r}", status=404, code="not_found")
            self._ledger.reward_turns(got.turns.values(), reward, part)

    def shown(self) -> dict[str, Any]:
        """The account so far as JSON."""
        calls = [
            {
                "call": one.name,
                "seat": one.seat,
                "state": one.exchange.state,
                "delivered": one.exchange.delivered,
                "tokens": sum(turn.num_tokens for turn in one.turns.values()),
            }
            for one in self._replies.values()
        ]
        return {
            "episode": self._context.episode,
            "state": "ended" if self.ended else "open",
            "calls": calls,
            "sampled": sum(self.account.sampled.values()),
            "delivered": sum(call["tokens"] for call in calls if call["delivered"]),
            "undelivered": dict(self.account.undelivered),
            "failed": dict(self.account.failed),
            "continuity": dict(self.account.continuity),
            "why": dict(self.account.why),
            "asks": dict(self.account.asks),
        }

    @property
    def calls(self) -> tuple[DoorCall, ...]:
        """The replies that were delivered so far."""
        got = [one for one in self._replies.values() if one.exchange.delivered]
        give = self._ledger.reward_turns
        calls = [
            DoorCall(seat=one.seat, text=choice.text, calls=choice.calls, turn=one.turns[index], give=give)
            for one in got
            for index, (_, choice) in sorted(one.parts.items())
        ]
        return tuple(sorted(calls, key=lambda call: call.turn.hop))

    async def play(self, agent: str | OutsideAgent, task: Task, *, seed: int) -> Any:
        """See `Door`."""
        kind = "program" if isinstance(agent, str) else agent.type
        if (runner := self._runners.get(kind)) is None:
            raise EpisodeError(f"this run plays no agent of type '{kind}'; it plays: {', '.join(self._runners)}")
        seats = {name: asdict(at) for name, at in self.seats.items()}
        payload = {"task": asdict(ProgramTask.of(task, seed)), "seats": seats, "episode": self._context.episode}
        try:
            return await runner.play(agent, payload)
        except EpisodeError as error:
            raise EpisodeError(self._without_key(str(error))) from None

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, MASK)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["EpisodeDoor"]:
        """Serves requests for the length of a block; afterwards every sampled token has its place in the account.

        If the episode is cancelled meanwhile, that is so as soon as the engines have ended its calls.
        """
        try:
            async with task_block() as self._tasks:
                try:
                    yield self
                finally:
                    self.ended = True
                    for one in self._replies.values():
                        self._give_up(one)
        finally:
            self.ended = True
            try:
                with Outside():
                    await self._heard.settle()
            finally:
                self._heard.when_settled(self._close_account)

    def begin(self, seat: str, ask: Ask, dialect: Dialect, *, body: str, retries: bool, session: str) -> Replies:
        """Begins to serve a request, or finds the earlier one that it repeats. `body`: its digest.

        The caller reports `delivered`, and `left` in any case. Raises Refused.
        """
        if self.ended:
            raise episode_ended()
        verdict = self.deliveries.asked(f"{seat}/{dialect.name}/{body}", retries=retries)
        self.account.asks[verdict.how] += 1
        if verdict.how != "new":
            return self._replies[verdict.exchange.number]
        try:
            replies = self._planned(AgentName(seat), self._with_previous(ask), session, verdict.exchange)
        except BaseException:
            self.deliveries.failed(verdict.exchange)
            raise
        self._replies[verdict.exchange.number] = replies
        self._named[replies.name] = replies
        tags = self._tags(replies, dialect)
        assert self._tasks is not None, "a door that has not ended is open"
        with Outside():
            replies.task = self._tasks.create_task(self._sample(replies, tags), name=f"door/{replies.name}")
        return replies

    def count(self, seat: str, ask: Ask) -> int:
        """Tokens of the prompt that a request would have. Raises Refused."""
        with self._histories[AgentName(seat)].unchanged():
            plan, begun, _, _ = self._prompt(AgentName(seat), self._with_previous(ask), "")
        return len(plan.ids) if not begun else len(self._begun_ids(AgentName(seat), ask, plan, begun))

    def answer_named(self, name: str) -> Replies | None:
        """The replies of this name, if they are kept."""
        kept = self._named.get(name)
        return kept if kept and kept.ask.store and kept.answer.done() and not kept.error else None

    def forget(self, name: str) -> None:
        """Keeps the replies no longer by their name."""
        self._named.pop(name, None)

    def delivered(self, replies: Replies) -> None:
        """Notes that a client has got the last frame."""
        if self.ended or not self.deliveries.delivered(replies.exchange):
            return
        history = self._histories[replies.seat]
        for index, turn in replies.turns.items():
            parts, choice = replies.parts[index]
            reply = Said(role="assistant", text=replies.begun[: replies.hidden] + choice.text, calls=choice.calls)
            spoken = DeliveredTurn(
                sample_id=turn.sample_id,
                prompt_ids=turn.prompt_ids,
                response_ids=turn.response_ids,
                thread=replies.plan.thread,
                issued=frozenset({choice.signature, *(call.call_id for call in choice.calls)}),
                thought=parts.thought,
                thinking=replies.plan.thinking or holds_thought(turn.text),
                stopped=bool(parts.stopped_by),
            )
            history.spoke(replies.plan, reply, spoken)
            with Outside():
                self._ledger.graph.answered(turn.hop)

    def left(self, replies: Replies, characters: int = 0) -> None:
        """Notes that a client has gone or has got all; a reply that nobody waits for is given up after `patience_s`."""
        if not self.deliveries.left(replies.exchange, characters):
            return
        if self._settings.patience_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._settings.patience_s, self._give_up_if_alone, replies)
        else:
            self._give_up(replies)

    def _give_up_if_alone(self, replies: Replies) -> None:
        if not replies.exchange.clients:
            self._give_up(replies)

    def _give_up(self, replies: Replies) -> None:
        if replies.exchange.state is ReplyState.SAMPLING and replies.task is not None:
            self.deliveries.given_up(replies.exchange)
            replies.task.cancel()

    def _with_previous(self, ask: Ask) -> Ask:
        """The request with the history that it leaves to the gateway."""
        if not ask.previous:
            return ask
        before = self.answer_named(ask.previous.removeprefix("resp_"))
        if before is None:
            raise Refused(
                f"previous_response_id: there is no response {ask.previous!r} in this episode, or it was not stored",
                status=404,
                code="previous_response_not_found",
            )
        choice = before.parts[0][1]
        reply = Said(role="assistant", text=choice.text, calls=choice.calls, issued=choice.signature)
        said = (*(one for one in before.ask.messages if one.role != "system"), reply)
        first = [one for one in ask.messages if one.role == "system"]
        return replace(ask, messages=(*first, *said, *(one for one in ask.messages if one.role != "system")))

    def _planned(self, seat: AgentName, ask: Ask, session: str, exchange: Exchange) -> Replies:
        self._num_calls += ask.n
        if self._num_calls > self._settings.max_calls:
            spent = f"call budget spent: an episode may make {self._settings.max_calls} calls (gateway.max_calls)"
            assert self._tasks is not None, "a door that has not ended is open"
            with Outside():
                self._tasks.create_task(_fail(EpisodeError(f"{spent}; its program asked for more")), name="door/spent")
            raise Refused(spent, code="call_budget_spent")
        plan, begun, hidden, voice = self._prompt(seat, ask, session)
        opened = ask.prompt is None and thought_opened(voice.spec.renderer.decode_all(plan.ids[-TAIL:]))
        if begun:
            plan = replace(plan, ids=self._begun_ids(seat, ask, plan, begun))
        name = f"{self._context.trajectory_id}-{exchange.number}"
        replies = Replies(exchange, ask, seat, voice, plan, begun, hidden, name)
        replies.created, replies.opened = int(asyncio.get_running_loop().time()), opened
        most, limit = self._max_tokens(replies), self._limits.get(voice.spec.policy)
        if limit is not None and len(plan.ids) + most > limit:
            raise overflow(len(plan.ids), most, limit)
        self.account.continuity[plan.continuity] += ask.n
        if plan.why:
            self.account.why[plan.why] += ask.n
        self.account.retokenised += plan.retokenised
        return replies

    def _prompt(self, seat: AgentName, ask: Ask, session: str) -> tuple[PromptPlan, str, int, Voice]:
        """The prompt, the words it must end with, how many of them are the client's own, and the voice."""
        try:
            voice = self._voice(seat, ask.tools)
            if ask.prompt is not None:
                ids = self._own_ids(seat, ask.prompt, voice)
                return self._histories[seat].plan_of(ids, session=session), "", 0, voice
            syntax = voice.spec.syntax
            begun = ask.prefill if ask.must_call is None else forced_words(ask.must_call, syntax)
            plan = self._histories[seat].plan(
                voice.spec.renderer, ask.messages, ask.tools, syntax=syntax, system=voice.system, session=session
            )
        except ConfigError as error:
            raise Refused(str(error), code="not_renderable") from None
        return plan, begun, len(ask.prefill), voice

    def _own_ids(self, seat: AgentName, prompt: str | tuple[int, ...], voice: Voice) -> IntArray:
        """The ids of a prompt that the client wrote itself. Raises Refused for ids that the model does not have."""
        renderer = voice.spec.renderer
        if isinstance(prompt, str):
            encode = renderer.encode if self._agents[seat].trust_special else renderer.encode_text
            return np.asarray(encode(prompt), np.int32)
        if unknown := [one for one in prompt if not 0 <= one < renderer.num_tokens]:
            raise Refused(f"prompt: there is no token {unknown[0]}; ids are 0 to {renderer.num_tokens - 1}")
        return np.asarray(prompt, np.int32)

    def _begun_ids(self, seat: AgentName, ask: Ask, plan: PromptPlan, begun: str) -> IntArray:
        renderer = self._voice(seat, ask.tools).spec.renderer
        # Marks of a call are the template's own tokens; words of the client are text.
        words = renderer.encode_text(begun) if ask.must_call is None else renderer.encode(begun)
        return np.concatenate((plan.ids, np.asarray(words, np.int32)))

    def _voice(self, seat: AgentName, tools: tuple[OfferedTool, ...]) -> Voice:
        """The seat with these tools. Raises ConfigError for tools that cannot be told."""
        key = (seat, repr(tools))
        if key not in self._voices:
            if len(self._voices) >= MOST_VOICES:
                raise Refused(f"an episode may offer {MOST_VOICES} sets of tools, and this is one more")
            agent, system = self._agents[seat], self._agents[seat].system
            if agent.teller is not None:
                told = agent.teller.told(tools)
                agent, system = replace(agent, renderer=told.renderer, syntax=told.syntax), told.system
            self._voices[key] = Voice(agent, Caller(agent, self._context, self._ledger), system)
        return self._voices[key]

    def _max_tokens(self, replies: Replies) -> int:
        own = replies.voice.caller.sampling.max_tokens
        return own if replies.ask.max_tokens is None else min(own, replies.ask.max_tokens)

    def _tags(self, replies: Replies, dialect: Dialect) -> dict[str, Scalar]:
        plan, ask = replies.plan, replies.ask
        tags: dict[str, Scalar] = {"continuity": plan.continuity, "lane": plan.lane, "thread": plan.thread}
        tags |= {"dialect": dialect.name}
        if plan.why:
            tags["why"] = plan.why
        if plan.ambiguous:
            tags["ambiguous"] = True
        if ask.asked:
            tags["asked"] = ", ".join(f"{name}={value}" for name, value in ask.asked.items())[:200]
        return tags

    async def _sample(self, replies: Replies, tags: Mapping[str, Scalar]) -> None:
        """Samples all replies to a request. Only an error of the store leaves it."""
        try:
            drawn = await self._drawn(replies, tags)
        except Exception as raised:
            error = cause_of(raised)
            self.deliveries.failed(replies.exchange)
            replies.error = described(error)
            if not isinstance(error, EpisodeError | EngineError):
                replies.refuse(episode_ended())
                raise error from None
            late = self.ended and isinstance(error, EpisodeError)
            replies.refuse(episode_ended() if late else Refused(described(error), status=503, code="engine_error"))
            return
        except asyncio.CancelledError:
            replies.refuse(episode_ended())
            raise
        self.deliveries.finished(replies.exchange)
        if not replies.answer.done():
            replies.answer.set_result(_answer(replies, drawn))
            replies.streamed.clear()

    def so_far(self, replies: Replies) -> Answer:
        """The part of a request's only reply that is certain while it is sampled; it says nothing of its end."""
        ask, spec = replies.ask, replies.voice.spec
        text = replies.voice.caller.text_of(np.asarray(spec.renderer.without_open_bytes(replies.streamed), np.int32))
        if ask.prompt is not None:
            found = certain_of_plain(text, ask.stop)
        else:
            found = certain(text, **self._reading(replies))
        choice = ReplyChoice(text=found.text, thought=found.thought, signature=self._signature(replies.hop))
        return _answer(replies, (choice,))

    def _reading(self, replies: Replies) -> dict[str, Any]:
        """How a sampled text is read."""
        return {
            "begun": replies.begun,
            "hidden": replies.hidden,
            "opened": replies.opened,
            "tools": replies.ask.tools,
            "syntax": replies.voice.spec.syntax,
            "stop": replies.ask.stop,
        }

    def _signature(self, hop: int) -> str:
        return f"turn_{hop}_{self._secret}"

    async def _drawn(self, replies: Replies, tags: Mapping[str, Scalar]) -> tuple[ReplyChoice, ...]:
        """Samples all replies at the same time."""
        if replies.ask.n == 1:  # Nearly always, and then a group of tasks is only work.
            return (await self._choice(replies, 0, tags),)
        async with asyncio.TaskGroup() as choices:
            tasks = [
                choices.create_task(self._choice(replies, index, tags), name=f"door/{replies.name}/{index}")
                for index in range(replies.ask.n)
            ]
        return tuple(task.result() for task in tasks)

    async def _choice(self, replies: Replies, index: int, tags: Mapping[str, Scalar]) -> ReplyChoice:
        """Samples one reply, and stores its row."""
        SAMPLED.set((replies, index))
        voice, ask, plan = replies.voice, replies.ask, replies.plan
        if ask.n > 1:
            tags = {**tags, "choice": index}
        parent = plan.parent.sample_id if plan.parent else None
        prompt = Prompt(plan.ids, parent, plan.thread)
        act = Act(self._ledger.next_act(), tags)
        call = await voice.caller.call(prompt, act, self._max_tokens(replies), stop=ask.stop)
        parts = (
            plain_reply(call.text, ask.stop)
            if ask.prompt is not None
            else read_reply(call.text, **self._reading(replies))
        )
        turn = await voice.caller.record(call, valid=not parts.faulty, known=False)
        self._ledger.note(turn, found(format_error=parts.faulty))
        choice = self._as_choice(replies, call, parts, turn)
        replies.turns[index], replies.parts[index] = turn, (parts, choice)
        return choice

    def _as_choice(self, replies: Replies, call: AgentCall, parts: ReplyParts, turn: Turn) -> ReplyChoice:
        ids, ask = call.generation.response_ids, replies.ask
        text_of = replies.voice.caller.text_of
        logprobs = call.generation.logprobs.tolist() if ask.logprobs else ()
        return ReplyChoice(
            text=parts.text,
            thought=parts.thought,
            calls=tuple(
                SaidCall(
                    one.name, json.dumps(one.arguments, ensure_ascii=False), f"call_{turn.hop}_{place}_{self._secret}"
                )
                for place, one in enumerate(parts.calls)
            ),
            signature=self._signature(turn.hop),
            finish="length" if turn.finish is FinishReason.LENGTH else "stop",
            stopped_by=parts.stopped_by,
            tokens=len(ids),
            pieces=tuple((text_of(ids[place : place + 1]), one) for place, one in enumerate(logprobs)),
            ids=tuple(ids.tolist()) if ask.ids else (),
        )

    def _close_account(self) -> None:
        """Gives every call its fate; those that nobody read are taken out of training."""
        for sample_id, (replies, index) in self._heard.sent.items():
            tokens = self.account.sampled.setdefault(sample_id, 0)
            turn = replies.turns.get(index)
            if replies.exchange.delivered:
                row = AccountRow(seat=replies.seat, tokens=tokens, fate="delivered")
            elif replies.exchange.state is ReplyState.FAILED and turn is None:
                row = AccountRow(seat=replies.seat, tokens=tokens, fate="failed", because=replies.error)
            else:
                because = undelivered(self._read(replies, turn), tokens)
                self._ledger.leave_out(sample_id, because)
                row = AccountRow(seat=replies.seat, tokens=tokens, fate="undelivered", because=because)
            self.account.add(sample_id, row)
        self.closed()

    def _read(self, replies: Replies, turn: Turn | None) -> int:
        """Tokens of a reply whose text was sent before its client went."""
        characters = replies.exchange.characters
        ids = np.asarray(replies.streamed, np.int32) if turn is None else turn.response_ids
        if not characters:
            return 0
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            fits = len(replies.voice.caller.text_of(ids[:middle])) <= characters
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
