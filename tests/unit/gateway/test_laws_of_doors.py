"""Law 13 and its kin, on random programs that edit, retry, leave, ask twice; six broken doors are told from ours."""

import asyncio
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.gateway.account import AccountRow
from flexmarl.gateway.delivery import Deliveries
from flexmarl.gateway.episode_door import EpisodeDoor
from flexmarl.gateway.heard import HeardGenerate
from flexmarl.gateway.history import SeatHistory
from flexmarl.records import EpisodeStatus, SampleId, split_sample_id
from tests.unit.agents import tokenizers_for_tests as samples
from tests.unit.gateway.doors import At, Played, TokenModel, play

TEMPLATES = {
    "append_only": samples.CHATML,
    "forgets_thoughts": samples.FORGETS_THOUGHTS,
    "results_in_user_turn": samples.RESULTS_IN_USER_TURN,
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
tokenizer_of = cache(samples.characters)


def reply_to(prompt: str, request) -> str:
    if "call!" in prompt.rpartition("user")[2]:
        return '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    return f"it is {request.seed % 97}, I say" if request.seed % 3 else "the same"


class Program:
    """A client that does what clients do, by a random script; it keeps what it has read."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.read: dict[tuple[str, int], str] = {}
        """Text of each reply that was read to its end, by name and choice."""
        self.asked: dict[str, list[dict]] = {}
        """The history of each request, by the mark of its last message."""
        self.followed: dict[str, str] = {}
        """Mark -> id of the call whose reply it follows."""
        self.late_rows = 0
        self.told_apart = True
        self.histories: list[list[dict]] = []
        self.marks = 0

    def question(self, words: str = "what is it") -> dict:
        self.marks += 1
        return {"role": "user", "content": f"{words} q{self.marks:03d}q"}

    async def ask(self, at: At, messages: list[dict], *, leaves_after=None, retry=False, **body) -> list[dict]:
        if not body.get("tools"):  # Their list is in the prompt too.
            self.asked[messages[-1]["content"][-5:]] = [dict(one) for one in messages]
        headers = {"x_stainless_retry_count": "1"} if retry else {}
        reply = await at.client().post(
            "chat/completions", {"messages": messages, **body}, leaves_after=leaves_after, **headers
        )
        if not reply.ended or reply.status != 200 or body.get("stream"):
            if reply.ended and body.get("stream"):
                text = "".join(c["delta"].get("content") or "" for one in reply.events for c in one["choices"])
                self._has_read(at, (reply.events[0]["id"], 0), text)
            return []
        said = []
        for choice in reply.json["choices"]:
            self._has_read(at, (reply.json["id"], choice["index"]), choice["message"]["content"] or "")
            said.append(choice["message"])
            if not body.get("tools"):
                self.histories.append([*messages, choice["message"]])
        return said

    def _has_read(self, at: At, name: tuple[str, int], text: str) -> None:
        self.read[name] = text
        self.late_rows += at.store.responses < len(self.read)

    async def run(self, at: At) -> None:
        for _ in range(7):
            await getattr(self, self.rng.choice(["new", "follow", "edit", "twice", "leave", "retry", "stop", "calls"]))(
                at
            )

    async def new(self, at: At) -> None:
        await self.ask(at, [self.question()], n=self.rng.choice([1, 2]))

    async def follow(self, at: At) -> None:
        if self.histories:
            *before, said = self.rng.choice(self.histories)
            said = {**said, "content": f"  {said['content']} \n"} if said["content"] else said
            await self.ask(at, [*before, said, self.question()])

    async def edit(self, at: At) -> None:
        if self.histories:
            *before, said = self.rng.choice(self.histories)
            await self.ask(
                at, [{**before[0], "content": "forget all"}, *before[1:], {**said, "content": "x"}, self.question()]
            )

    async def twice(self, at: At) -> None:
        question = [self.question()]
        before = set(self.read)
        await asyncio.gather(self.ask(at, question), self.ask(at, question))
        self.told_apart &= len(set(self.read) - before) == 2

    async def leave(self, at: At) -> None:
        stream = self.rng.random() < 0.7
        leaves = self.rng.choice([0, 1, 2, 3, 4]) if stream else 0
        await self.ask(at, [self.question()], stream=stream, leaves_after=leaves)

    async def retry(self, at: At) -> None:
        question, stream = [self.question()], self.rng.random() < 0.5
        await self.ask(at, question, stream=stream, leaves_after=3 if stream else None)
        await self.ask(at, question, stream=stream, retry=self.rng.random() < 0.5)

    async def stop(self, at: At) -> None:
        question = [self.question()]
        if said := await self.ask(at, question, stop=["I say", "same"]):
            await self.ask(at, [*question, said[0], self.question()])

    async def calls(self, at: At) -> None:
        question = [self.question("call!")]
        said = await self.ask(at, question, n=3, tools=TOOLS)
        one = self.rng.choice(said)
        call = one["tool_calls"][0]["id"]
        follow = {"role": "tool", "tool_call_id": call, "content": f"r {self.question()['content'][-5:]}"}
        self.followed[follow["content"][-5:]] = call
        await self.ask(at, [*question, one, follow], tools=TOOLS)


def played_by(seed: int, template: str, kind: type[EpisodeDoor]) -> tuple[Program, Played, TokenModel]:
    program = Program(seed)
    tokenizer = tokenizer_of(TEMPLATES[template])
    model = TokenModel(tokenizer, reply_to, token_s=0.2)
    return program, play(program.run, model, tokenizer, kind=kind, patience_s=seed % 2 * 3.0), model


def broken(seed: int, template: str, kind: type[EpisodeDoor] = EpisodeDoor) -> list[str]:
    """The laws that a random program finds broken."""
    program, played, model = played_by(seed, template, kind)
    account, turns = played.account, played.episode.turns
    rows = {row.sample_id: row for row in played.rows}
    found = [] if played.episode.status is EpisodeStatus.FINISHED else [f"the episode failed: {played.episode.reason}"]
    parts = account.delivered + sum(account.undelivered.values()) + sum(account.failed.values())
    if not (played.engine_tokens == account.sampled == parts == sum(len(row.response_ids) for row in played.rows)):
        found.append("tokens are lost or doubled")
    if len(turns) != len(program.read):
        found.append("trainable rows are not the replies that were read")
    if program.late_rows:
        found.append("a reply ended before its row was stored")
    if not program.told_apart:
        found.append("two parallel samples are one")
    tokenizer = tokenizer_of(TEMPLATES[template])
    trainable = {turn.sample_id for turn in turns}
    for request in model.requests:
        row = rows[SampleId(request.request_id)]
        mark = tokenizer.decode(request.prompt_ids.tolist()).rpartition("q")[0][-4:] + "q"
        if row.parent:
            parent = rows[SampleId(row.parent)]
            ids = [*parent.prompt_ids, *parent.response_ids]
            if row.prompt_ids[: len(ids)] != ids or parent.sample_id not in trainable:
                found.append("a parent's ids are no prefix")
            call = program.followed.get(mark)
            if call and str(split_sample_id(parent.sample_id)[1]) != call.split("_")[1]:
                found.append("a turn follows another one than its client does")
        if mark in program.asked and not same_words(tokenizer, row.prompt_ids, program.asked[mark]):
            found.append("the prompt says what the client did not")
    return found


def same_words(tokenizer, prompt_ids: list[int], messages: list[dict]) -> bool:
    said = [{"role": one["role"], "content": one["content"]} for one in messages if one.get("content")]
    told = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return "".join(tokenizer.decode(prompt_ids).split()) == "".join(told.split())


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_token_is_lost_doubled_or_guessed_whatever_a_program_does(template, seed):
    assert broken(seed, template) == []


class LastWins(SeatHistory):
    """Of turns that say the same, the last one is continued."""

    def spoke(self, plan, reply, spoken):
        super().spoke(plan, reply, spoken)
        for key, turns in self._by_key.items():
            self._by_key[key] = turns[-1:]


class TextAlone(SeatHistory):
    """What was said decides, not how it ended."""

    def _why_not(self, found, messages, place, loose):
        return "" if place + 1 < len(messages) else "nothing follows"


class RetryByPrompt(Deliveries):
    """An equal body is a retry, whoever waits."""

    def asked(self, key, *, retries):
        earlier = [one for one in self._by_key[key] if one.state.value in ("sampling", "finished")]
        return self._given(earlier[-1], "again", "") if earlier else super().asked(key, retries=retries)


class AbortForgotten(HeardGenerate):
    """What was sampled for a client that left is not asked for."""

    async def settle(self):
        pass

    def when_settled(self, then):
        then()


class CopyPerLeaf(EpisodeDoor):
    """Every turn that another one continues is counted with each of them."""

    def _close_account(self):
        for one in self._replies.values():
            if one.plan.parent and one.exchange.delivered:
                copy = AccountRow(seat=one.seat, tokens=len(one.plan.parent.response_ids), fate="delivered")
                self.account.rows[SampleId(f"copy-{one.name}")] = copy
        super()._close_account()


class EarlyEnd(EpisodeDoor):
    """The reply ends while its row is still being stored."""

    async def _choice(self, replies, index, tags):
        record = replies.voice.caller.record

        async def late(call, valid, *, known=True):
            turn = replies.voice.caller._turn(call.sent, call.request, call.generation, text=call.text, valid=valid)
            self._ledger.add(turn, known=False)
            self._tasks.create_task(store_later(turn))
            return turn

        async def store_later(turn):
            await asyncio.sleep(1)
            await self._context.recorder.turn(turn)

        replies.voice.caller.record = late
        try:
            return await super()._choice(replies, index, tags)
        finally:
            replies.voice.caller.record = record


def door_with(**rules) -> type[EpisodeDoor]:
    return type("BrokenDoor", (EpisodeDoor,), rules)


MUTANTS = {
    "last wins": door_with(history=LastWins),
    "text matching alone": door_with(history=TextAlone),
    "retry by prompt": door_with(deliveries_of=RetryByPrompt),
    "abort forgotten": door_with(heard=AbortForgotten),
    "copy per leaf": CopyPerLeaf,
    "early terminal event": EarlyEnd,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_door_is_told_from_ours(mutant):
    assert any(broken(seed, "append_only", MUTANTS[mutant]) for seed in range(12))
