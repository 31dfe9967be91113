"""Streams that are read while their reply is sampled: what may be sent, when, and what becomes of it."""

import asyncio
import json
import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from flexmarl.agents import ChatRenderer
from flexmarl.gateway.dialects import DIALECTS
from flexmarl.gateway.dialects.base import Answer, Ask, OfferedTool, Refused, ReplyChoice
from flexmarl.gateway.heard import Replies
from flexmarl.gateway.reply_parts import certain, certain_of_plain, plain_reply, read_reply
from flexmarl.gateway.server import READINGS
from flexmarl.gateway.sse import Sending
from flexmarl.inference.pool import InferencePool
from flexmarl.records import Generation, GenerationRequest, RowState, Version
from flexmarl.testing.gateway import AsgiClient
from flexmarl.testing.inference import ScriptedEngine
from flexmarl.tools import TagSyntax
from tests.unit.agents.tokenizers_for_tests import CHATML, TERSE, byte_pairs
from tests.unit.gateway.doors import POLICY, At, TokenModel, play
from tests.unit.gateway.joined_streams import joined_chat, joined_messages, joined_response
from tests.unit.gateway.test_sessions import CALL, TOOLS, USER, model

ADD = OfferedTool(name="add")
STOPS = ("END", "NOW", "</s>", "DEN", "N", "ven")
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
    "<tool_call>{", "<", "</", "<th", "E", "EN", "END", "N", "</s", " ", "\n", "\n\n", "seven", "é", "\ufffd",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join)


@settings(max_examples=600, deadline=None)
@given(
    text=TEXTS,
    prefill=st.sampled_from(["", "So: ", "<think>", "<think>hm", "<think>hm</think>"]),
    forced=st.sampled_from(["", '<tool_call>{"name": "add", "arguments": ']),
    opened=st.booleans(),
    tools=st.booleans(),
    stop=st.lists(st.sampled_from(STOPS), unique=True, max_size=3),
)
def test_whatever_follows_the_reply_begins_with_what_is_certain(text, prefill, forced, opened, tools, stop):
    how: Any = {"begun": prefill or forced, "hidden": len(prefill), "opened": opened, "stop": stop}
    how |= {"tools": [ADD] if tools else [], "syntax": TagSyntax()}
    whole, before = read_reply(text, **how), certain("", **how)
    for end in range(1, len(text) + 1):
        now = certain(text[:end], **how)
        assert whole.thought.startswith(now.thought), "the thought"
        assert whole.text.startswith(now.text), "the text"
        assert now.thought.startswith(before.thought), "what was certain stays"
        assert now.text.startswith(before.text), "what was certain stays"
        assert not now.text or now.thought == whole.thought, "a thought is over when the text begins"
        before = now


@pytest.mark.parametrize(
    ("reply", "how", "thought", "said"),
    [
        (" I add.</think>\n\nSeven.", {"begun": "First", "hidden": 5, "opened": True}, "I add.", "Seven."),
        (" and more</think>Seven.", {"begun": "<think>hm", "hidden": 9}, "and more", "Seven."),
        (" and more", {"begun": "<think>hm", "hidden": 9}, "and more", ""),
        ("Seven </think>", {"begun": "hm</think>", "hidden": 10, "opened": True}, "", "Seven </think>"),
    ],
)
def test_a_thought_that_a_prefill_is_in_is_one(reply, how, thought, said):
    parts = read_reply(reply, **how)
    assert (parts.thought, parts.text) == (thought, said)


@given(text=TEXTS, stop=st.lists(st.sampled_from(STOPS), unique=True, max_size=3))
def test_a_plain_reply_begins_with_what_is_certain(text, stop):
    whole = plain_reply(text, stop)
    for end in range(len(text) + 1):
        assert whole.text.startswith(certain_of_plain(text[:end], stop).text)


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("The answ", "", "The answ"),
        ("<thi", "", ""),
        ("<think>3 and", "3 and", ""),
        ("<think>3 and 4 </thi", "3 and 4", ""),
        ("<think>hm</think>\n\nSo \ufffd", "hm", "So"),
        ("So <tool_ca", "", "So"),
        ("So <tool_call>{", "", "So"),
        ("So <b", "", "So <b"),
        ("It is EN", "", "It is"),
    ],
)
def test_what_is_held_back(text, thought, said):
    assert certain(text, tools=[ADD], syntax=TagSyntax(), stop=["END"]) == (thought, said)


class Watch(AsgiClient):
    """A client that notes when each frame has come."""

    def __init__(self, at: At) -> None:
        self.times: list[float] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def sent(message: Any) -> None:
                if message["type"] == "http.response.body":
                    self.times.append(asyncio.get_running_loop().time())
                await send(message)

            await at.app(scope, receive, sent)

        super().__init__(app, at.door.seats["solver"])


BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": USER, "tools": TOOLS},
    "messages": {
        "messages": USER,
        "max_tokens": 400,
        "tools": [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}],
    },
    "responses": {"input": "What is 3 + 4?", "tools": [{"type": "function", **TOOLS[0]["function"]}]},
    "completions": {"prompt": "What is 3 + 4?"},
}


def text_of(event: dict[str, Any]) -> str:
    """The text or thought that an event adds."""
    if "choices" in event:
        return "".join(
            (one.get("text") or "") + "".join(map(str, filter(None, (one.get("delta") or {}).values())))
            for one in event["choices"]
            if "tool_calls" not in one.get("delta", ())
        ).removeprefix("assistant")
    delta = event.get("delta") or ""
    return delta if isinstance(delta, str) else delta.get("text", "") + delta.get("thinking", "")


@pytest.mark.parametrize("endpoint", BODIES)
def test_text_comes_while_it_is_sampled_a_token_behind_the_engine_at_most(endpoint):
    async def program(at: At) -> None:
        client = Watch(at)
        reply = await client.post(endpoint, BODIES[endpoint] | {"stream": True})
        events = [one for one in reply.events if text_of(one)]
        at.notes["came"] = [when for when, frame in zip(client.times, reply.frames, strict=True) if shows(frame)]
        at.notes["text"] = "".join(map(text_of, events))

    def shows(frame: bytes) -> bool:
        data = frame.decode().partition("data: ")[2].strip()
        return data not in ("", "[DONE]") and bool(text_of(json.loads(data)))

    words = "It is seven, and seven it stays."
    played = play(program, *model(words, token_s=0.5))
    assert played.notes["text"] == words
    came = played.notes["came"]
    assert len(came) > 8, "piece by piece"
    assert max(later - earlier for earlier, later in pairwise(came)) <= 1.0, "two tokens apart at most"
    assert came[0] <= came[-1] - 0.5 * (played.engine_tokens - 4)


def test_a_long_reply_is_read_so_seldom_that_its_length_is_paid_once():
    async def program(at: At) -> None:
        reply = await at.client().post("chat/completions", {"messages": USER, "stream": True, "max_tokens": 6000})
        at.notes["pieces"] = [text for text in map(text_of, reply.events) if text]

    words = " ".join(f"word{number}" for number in range(400))
    played = play(program, *model(words, token_s=0.01), agent={"sampling": {"max_tokens": 6000}})
    pieces, tokens = played.notes["pieces"], played.engine_tokens
    assert "".join(pieces) == words
    assert tokens > 2000
    assert len(pieces) <= READINGS * (2 + math.log(tokens / READINGS)) < tokens / 4
    longest = max(len(piece) for piece in pieces[:-1])
    assert longest <= 2 * len(words) / READINGS, "no piece is longer than a 64th of the reply, or a token more"


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize(
    "text",
    [
        "<think>\nthree and four\n</think>\n\nLet me count " + CALL,
        "Let me <b>see</b> <tool_call>{not a call",
        "<think>never ends",
        "Größe: 12 µm ☃ and more",
        " \n",
    ],
)
@pytest.mark.parametrize("scramble", [False, True])
def test_a_stream_that_was_read_along_holds_what_the_whole_reply_holds(endpoint, text, scramble):
    async def program(at: At) -> None:
        at.notes["whole"] = (await at.client().post(endpoint, BODIES[endpoint])).json
        at.notes["stream"] = (await at.client().post(endpoint, BODIES[endpoint] | {"stream": True})).events

    played = play(program, *model(text, scramble=scramble))
    whole, events = played.notes["whole"], played.notes["stream"]
    if endpoint == "chat/completions":
        (stream,), said = joined_chat(events), whole["choices"][0]["message"]
        assert stream["content"] == (said["content"] or "")
        assert stream["reasoning"] == said.get("reasoning_content", "")
        assert len(stream["calls"]) == len(said.get("tool_calls", ()))
    elif endpoint == "messages":
        kinds = ("text", "thinking", "name", "input")
        stream, said = joined_messages(events)["content"], whole["content"]
        assert [[one.get(kind) for kind in kinds] for one in stream] == [[o.get(k) for k in kinds] for o in said]
        signed = [one["signature"] for one in (*said, *stream) if one["type"] == "thinking"]
        assert [one.split("_")[:2] for one in signed] == [["turn", f"{n}"] for n in range(len(signed))], (
            "each its turn's"
        )
    else:
        plain = [(one["type"], one.get("summary"), one.get("content")) for one in joined_response(events)]
        assert plain == [(one["type"], one.get("summary"), one.get("content")) for one in whole["output"]]


def test_the_last_frame_comes_when_the_row_is_stored_and_not_before():
    async def program(at: At) -> None:
        client, put = Watch(at), at.store.put

        async def slow(*args: Any) -> None:
            await asyncio.sleep(5.0)
            await put(*args)
            at.notes["stored"] = asyncio.get_running_loop().time()

        at.store.put = slow  # type: ignore[method-assign]
        reply = await client.post("chat/completions", {"messages": USER, "stream": True})
        assert reply.ended
        at.notes["times"] = client.times

    played = play(program, *model("The answer is 7.", token_s=0.5))
    *before, last = played.notes["times"]
    assert last >= played.notes["stored"]
    assert sum(when < played.notes["stored"] - 5.0 for when in before) >= 3, "witness: text came before it was stored"


def test_a_client_that_goes_in_the_middle_leaves_a_row_that_says_how_much_it_has_read():
    async def program(at: At) -> None:
        reply = await at.client().post("chat/completions", {"messages": USER, "stream": True}, leaves_after=4)
        at.notes["read"] = "".join(text_of(json.loads(f.decode()[6:])) for f in reply.frames)
        await asyncio.sleep(1.1)

    played = play(program, *model("one two three four five six seven eight", token_s=0.5), patience_s=1.2)
    (row,) = played.rows
    assert row.state is RowState.FILTERED
    read, total = map(int, re.findall(r"\d+", row.reason))
    assert 0 < read < total == played.engine_tokens == len(row.response_ids)
    assert model()[1].decode(row.response_ids[:read]) == played.notes["read"], row.reason


@pytest.mark.parametrize(("tail", "prefill"), [("<think>\n", ""), ("<think>\n", "First"), ("", "<think>First")])
def test_a_template_or_a_prefill_that_begins_a_thought_is_seen_in_the_prompt(tail, prefill):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}"
    tokenizer = byte_pairs(template + "assistant: " + tail + "{% endif %}")

    async def program(at: At) -> None:
        said = [*USER, {"role": "assistant", "content": prefill}] if prefill else USER
        at.notes["whole"] = (await at.client().post("messages", {"messages": said, "max_tokens": 99})).json["content"]

    played = play(program, TokenModel(tokenizer, lambda *_: " I add.</think>\n\nSeven."), tokenizer)
    thought, said = played.notes["whole"]
    assert (thought["thinking"], said["text"]) == ("I add.", "Seven.")


def test_words_of_a_user_do_not_begin_a_thought():
    async def program(at: At) -> None:
        body = {"messages": [{"role": "user", "content": "What is <think>"}], "stream": True}
        client = Watch(at)
        await client.post("chat/completions", body)
        at.notes["times"] = client.times

    tokenizer = byte_pairs(TERSE)
    played = play(program, TokenModel(tokenizer, lambda *_: "It is seven, and so on.", token_s=0.5), tokenizer)
    assert played.notes["times"][0] <= 0.9, "the text comes from its first token on"
    assert len(played.notes["times"]) > 6


def test_whoever_comes_to_tokens_that_are_there_does_not_wait_for_the_next_ones():
    async def scenario() -> None:
        unused: Any = None
        replies = Replies(unused, unused, unused, unused, unused, "", 0, "name")
        early = replies.news(0)
        assert not early.done()
        replies.add_tokens(np.array([1, 2], np.int32))
        assert early.done()
        assert replies.news(1).done()
        assert not replies.news(2).done()

    asyncio.run(scenario())


def test_of_a_reply_that_is_over_no_streamed_ids_are_kept():
    async def program(at: At) -> None:
        await at.client().post("chat/completions", {"messages": USER, "stream": True})
        door: Any = at.door
        at.notes["kept"] = [len(one.streamed) for one in door._replies.values()]

    assert play(program, *model()).notes["kept"] == [0]


def test_bytes_at_the_end_are_held_back_where_tokens_stand_for_bytes():
    renderer = ChatRenderer(bytes_for_unknown())
    so = renderer.encode_text("so ")
    smile = [bytes_token(renderer, byte) for byte in "😀".encode()]
    assert renderer.decode([*so, *smile]) == "so 😀"
    assert renderer.without_open_bytes([*so, *smile]) == so
    assert renderer.without_open_bytes([*smile, *so]) == [*smile, *so]
    broken = renderer.decode([*so, *smile, bytes_token(renderer, 0xFF)])
    assert not broken.startswith("so 😀"), "witness: more bytes change what these were"


def bytes_token(renderer: ChatRenderer, byte: int) -> int:
    (token,) = [
        one for one in renderer._tokens.byte_ids if renderer._tokens._backend.id_to_token(one) == f"<0x{byte:02X}>"
    ]
    return token


def bytes_for_unknown() -> PreTrainedTokenizerFast:
    """Words, and bytes for all that is none, as Llama 2 and Gemma have them."""
    names = ["<|im_start|>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "s", "o", " "]
    made = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    return tokenizer


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages", "responses"])
def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error(endpoint):
    async def program(at: At) -> None:
        reply = await at.client().post(endpoint, BODIES[endpoint] | {"stream": True})
        at.notes |= {"events": reply.events, "ended": reply.ended, "text": "".join(map(text_of, reply.events))}

    played = play(program, *model("!one two three", token_s=0.5))
    assert played.notes["ended"]
    assert played.notes["text"].startswith("one")
    assert "error" in json.dumps(played.notes["events"][-1])
    assert played.account.failed
    assert not played.account.undelivered


def test_who_comes_back_to_a_reply_that_is_sampled_gets_it_from_its_beginning():
    async def program(at: At) -> None:
        body = {"messages": USER, "stream": True}
        first = asyncio.ensure_future(at.client().post("chat/completions", body, leaves_after=4))
        await first
        again = await at.client().post("chat/completions", body)
        (at.notes["again"],) = joined_chat(again.events)

    played = play(program, *model("one two three four five", token_s=0.5), patience_s=60.0)
    assert played.notes["again"]["content"] == "one two three four five"
    assert len(played.rows) == 1


def test_choices_and_beats_are_as_before():
    async def program(at: At) -> None:
        several = await at.client().post("chat/completions", {"messages": USER, "stream": True, "n": 2})
        at.notes["contents"] = [one["content"] for one in joined_chat(several.events)]
        held = Watch(at)
        await held.post("chat/completions", {"messages": USER, "tools": TOOLS, "stream": True})
        at.notes["times"] = held.times

    played = play(program, *model('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', token_s=2.0))
    assert played.notes["contents"] == ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'] * 2
    gaps = [later - earlier for earlier, later in pairwise(played.notes["times"])]
    assert max(gaps) <= 10.0, "what is held back is no reason to be silent"


def test_a_tokenizer_that_spells_otherwise_later_ends_the_stream_with_an_error_and_sends_nothing_twice():
    def answer(text: str) -> Answer:
        return Answer(name="x", model="m", choices=(ReplyChoice(text=text),), prompt_tokens=1)

    sending = Sending(DIALECTS["chat/completions"], Ask(stream=True))
    sent = [*sending.more(answer("ab")), *sending.more(answer("abc"))]
    assert "".join(text_of(json.loads(frame.text[6:])) for frame in sent) == "abc"
    with pytest.raises(Refused, match="tokenizer"):
        sending.rest(answer("xbcd"))
    rest = sending.rest(answer("abcd"))
    assert "".join(text_of(json.loads(f.text[6:])) for f in rest if "[DONE]" not in f.text) == "d"


WORDS = "It is seven, and seven it stays, whoever asks."


class Pooled:
    """Generate function on a pool of two engines that take a second for each token."""

    def __init__(self, tokenizer: Any) -> None:
        reply = [*tokenizer(WORDS, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        self.engines = [ScriptedEngine(lambda _: reply, latency_s=1.0) for _ in range(2)]
        self.pool = InferencePool({POLICY: self.engines})
        self.requests: list[GenerationRequest] = []
        self.tokens = 0

    async def __call__(self, request: GenerationRequest, /, **how: Any) -> Generation:
        self.requests.append(request)
        generation = await self.pool.generate(request, **how)
        self.tokens += len(generation.response_ids)
        return generation


async def lose(model: Pooled) -> None:
    busy = next(engine for engine in model.engines if engine.requests)
    busy.fail("its machine is gone")


async def swap(model: Pooled) -> None:
    await model.pool.load_weights(POLICY, Version(1))


async def doze(model: Pooled) -> None:
    await model.pool.sleep()
    await asyncio.sleep(60.0)
    await model.pool.wake()


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("happens", [lose, swap, doze])
@pytest.mark.parametrize("after_s", [0.5, 3.5, 9.5])
def test_an_engine_lost_weights_swapped_or_a_pool_asleep_in_mid_stream_is_one_turn(endpoint, happens, after_s):
    tokenizer = model()[1]
    pooled = Pooled(tokenizer)

    async def program(at: At) -> None:
        async with pooled.pool.open(), asyncio.TaskGroup() as tasks:
            client = Watch(at)
            asking = tasks.create_task(client.post(endpoint, BODIES[endpoint] | {"stream": True}))
            await asyncio.sleep(after_s)
            await happens(pooled)
            reply = await asking
            at.notes |= {"text": "".join(map(text_of, reply.events)), "ended": reply.ended, "times": client.times}

    played = play(program, pooled, tokenizer)  # type: ignore[arg-type]
    assert (played.notes["text"], played.notes["ended"]) == (WORDS, True)
    (turn,) = played.episode.turns
    (row,) = played.rows
    assert tokenizer.decode(row.response_ids, skip_special_tokens=True) == WORDS
    assert played.account.delivered == len(row.response_ids)
    if happens is swap:
        assert [(run.start, run.version) for run in turn.versions] == [(0, 0), (math.ceil(after_s), 1)]
    if happens is doze:
        gaps = [later - earlier for earlier, later in pairwise(played.notes["times"])]
        assert max(gaps) <= 10.0, "signs of life, also while it sleeps in the middle of a reply"


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages", "responses"])
def test_whoever_goes_at_any_frame_leaves_an_account_that_adds_up(endpoint):
    ended = False
    for frames in range(200):

        async def program(at: At, frames: int = frames) -> None:
            body = BODIES[endpoint] | {"stream": True}
            at.notes["ended"] = (await at.client().post(endpoint, body, leaves_after=frames)).ended

        played = play(program, *model("It is seven.", token_s=0.5))
        account, ended = played.account, played.notes["ended"]
        assert account.sampled == account.delivered + sum(account.undelivered.values()) == played.engine_tokens
        assert len(played.rows) == 1
        assert (account.delivered > 0) == ended, f"after {frames} frames"
        if ended:
            break
    assert ended
    assert frames > 6, "witness: there were many frames at which to go"
