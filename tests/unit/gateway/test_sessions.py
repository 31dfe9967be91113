import asyncio
import socket
from functools import cache

import pytest

from flexmarl.gateway.server import listening_socket
from flexmarl.records import EpisodeStatus, RowState
from flexmarl.testing.agents import check_turns
from tests.unit.agents.tokenizers_for_tests import byte_pairs
from tests.unit.gateway.doors import At, TokenModel, play
from tests.unit.gateway.joined_streams import joined_chat, joined_messages, joined_response

USER = [{"role": "user", "content": "What is 3 + 4?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = 'Let me count <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


byte_pairs_once = cache(byte_pairs)


def model(reply="The answer is 7.", **options):
    tokenizer = byte_pairs_once()
    return TokenModel(tokenizer, reply if callable(reply) else lambda prompt, request: reply, **options), tokenizer


def test_a_reply_that_was_read_is_a_turn_of_the_episode():
    async def program(at: At) -> None:
        reply = await at.chat(("user", "What is 3 + 4?"))
        at.notes["reply"] = reply["choices"][0]

    played = play(program, *model())
    assert played.episode.status is EpisodeStatus.FINISHED
    assert played.notes["reply"]["message"] == {"role": "assistant", "content": "The answer is 7."}
    assert played.notes["reply"]["finish_reason"] == "stop"
    (turn,) = played.episode.turns
    assert turn.tags["continuity"] == "root"
    assert (played.account.sampled, played.account.delivered) == (turn.num_tokens, played.engine_tokens)


def test_the_next_request_extends_the_sampled_ids_whatever_their_tokenisation():
    async def program(at: At) -> None:
        said = list(USER)
        for _ in range(3):
            reply = await at.client().post("chat/completions", {"messages": said})
            said.append({"role": "assistant", "content": f" {reply.json['choices'][0]['message']['content']}\n"})
            said.append({"role": "user", "content": "and once more"})

    tokens, tokenizer = model(scramble=True)
    played = play(program, tokens, tokenizer)
    first, second, third = played.rows
    assert second.parent == first.sample_id
    assert third.parent == second.sample_id
    for parent, child in ((first, second), (second, third)):
        ids = [*parent.prompt_ids, *parent.response_ids]
        assert [*child.prompt_ids][: len(ids)] == ids
    assert played.account.continuity == {"root": 1, "extends": 2}


def test_ids_that_came_back_as_others_are_counted_though_the_prompt_continues_an_earlier_turn():
    async def program(at: At) -> None:
        said = list(USER)
        for _ in range(2):
            reply = await at.client().post("chat/completions", {"messages": said})
            said += [reply.json["choices"][0]["message"], {"role": "user", "content": "and once more"}]
        # Its own words at the end: what came before is written anew.
        foreign = {"role": "assistant", "content": "So I have counted."}
        await at.client().post("chat/completions", {"messages": [*said[:-1], foreign]})

    def script(prompt, request):
        return "7" if "once more" not in prompt else "The answer is the answer is the answer is 7."

    tokens, tokenizer = model(script, scramble=True)
    played = play(program, tokens, tokenizer)
    first, second, third = played.rows
    assert (second.parent, third.parent) == (first.sample_id, first.sample_id)
    ids = [*second.prompt_ids, *second.response_ids]
    alike = next(place for place, pair in enumerate(zip(ids, third.prompt_ids, strict=False)) if len({*pair}) > 1)
    assert played.account.retokenised == len(ids) - alike > 0
    assert played.account.why == {"foreign reply": 1}


@pytest.mark.parametrize("leaves_after", [0, 1, 3, 5])
def test_a_reply_whose_client_went_away_is_left_out_of_training_with_the_reason(leaves_after):
    async def program(at: At) -> None:
        await at.client().post("chat/completions", {"messages": USER, "stream": True}, leaves_after=leaves_after)
        await at.chat(("user", "another one"))

    played = play(
        program, *model("The answer is 7, and 7, and 7, and 7, and 7, and 7, and 7, and 7, and 7.", token_s=1)
    )
    lost, got = played.rows
    assert lost.state is RowState.FILTERED
    assert lost.reason.startswith("undelivered: ")
    assert played.episode.turns[0].sample_id == got.sample_id
    assert len(played.episode.turns) == 1
    account = played.account
    assert account.sampled == played.engine_tokens == account.delivered + sum(account.undelivered.values())
    assert len(lost.response_ids) == sum(account.undelivered.values())
    if leaves_after <= 3:  # A heartbeat came first: it was given up while it was sampled.
        assert len(lost.response_ids) < len(got.response_ids)


def test_a_client_that_comes_back_joins_the_reply_that_is_still_sampled():
    async def program(at: At) -> None:
        await at.client().post("chat/completions", {"messages": USER}, leaves_after=0)
        one, two = await asyncio.gather(*(at.client().post("chat/completions", {"messages": USER}) for _ in range(2)))
        at.notes["texts"] = [one.status, two.status]

    played = play(program, *model(token_s=1), patience_s=100)
    assert played.notes["texts"] == [200, 200]
    assert played.account.asks == {"new": 2, "joins": 1}
    assert len(played.episode.turns) == 2


def test_a_retry_of_the_sdk_gets_the_stored_reply_and_a_second_ask_a_new_one():
    async def program(at: At) -> None:
        client = at.client()
        first = await client.post("chat/completions", {"messages": USER})
        again = await client.post("chat/completions", {"messages": USER}, x_stainless_retry_count="1")
        new = await client.post("chat/completions", {"messages": USER})
        at.notes["ids"] = [first.json["id"], again.json["id"], new.json["id"]]

    played = play(program, *model())
    first, again, new = played.notes["ids"]
    assert first == again != new
    assert played.account.asks == {"new": 2, "again": 1}
    seeds = {row.sample_id for row in played.rows}
    assert len(seeds) == 2


def test_three_choices_are_three_turns_and_the_one_that_is_followed_is_the_parent():
    async def program(at: At) -> None:
        reply = await at.client().post("chat/completions", {"messages": USER, "n": 3})
        texts = [choice["message"]["content"] for choice in reply.json["choices"]]
        at.notes["texts"] = texts
        await at.chat(("user", "What is 3 + 4?"), ("assistant", texts[1]), ("user", "sure?"))

    played = play(program, *model(lambda prompt, request: f"7 of {request.seed % 1000}"))
    *first, last = played.rows
    assert len(set(played.notes["texts"])) == 3
    assert len(played.episode.turns) == 4
    assert last.parent == first[1].sample_id
    check = [turn.tags.get("choice") for turn in played.episode.turns]
    assert check == [0, 1, 2, None]


@pytest.mark.parametrize("endpoint", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("text", ["The answer is 7.", CALL, "<think>\n3 and 4\n</think>\n\n" + CALL, "a <tool_call>{"])
def test_a_stream_holds_what_the_whole_reply_holds(endpoint, text):
    bodies = {
        "chat/completions": {"messages": USER, "tools": TOOLS},
        "messages": {
            "messages": USER,
            "max_tokens": 200,
            "tools": [{"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}],
        },
        "responses": {"input": "What is 3 + 4?", "tools": [{"type": "function", **TOOLS[0]["function"]}]},
    }

    async def program(at: At) -> None:
        body = bodies[endpoint]
        at.notes["whole"] = (await at.client().post(endpoint, body)).json
        at.notes["stream"] = (await at.client().post(endpoint, body | {"stream": True})).events

    whole, events = (play(program, *model(text)).notes[name] for name in ("whole", "stream"))
    if endpoint == "chat/completions":
        (stream,), said = joined_chat(events), whole["choices"][0]["message"]
        assert stream["content"] == (said["content"] or "")
        assert stream["reasoning"] == said.get("reasoning_content", "")
        calls = [call["function"] for call in said.get("tool_calls", ())]
        assert [{"name": one["name"], "arguments": one["arguments"]} for one in stream["calls"]] == calls
        assert stream["finish"] == whole["choices"][0]["finish_reason"]
    elif endpoint == "messages":
        stream = joined_messages(events)
        assert [_bare(block) for block in stream["content"]] == [_bare(block) for block in whole["content"]]
        assert (stream["stop_reason"], stream["usage"]) == (whole["stop_reason"], whole["usage"])
    else:
        assert [_bare(item) for item in joined_response(events)] == [_bare(item) for item in whole["output"]]


def _bare(block):
    return {
        key: value
        for key, value in block.items()
        if key not in ("id", "call_id", "signature", "encrypted_content", "status")
    }


def test_results_of_several_calls_extend_the_turn_that_made_them():
    two = CALL + '\n<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>'

    async def program(at: At) -> None:
        first = await at.client().post("chat/completions", {"messages": USER, "tools": TOOLS})
        said = first.json["choices"][0]["message"]
        at.notes["calls"] = said["tool_calls"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in said["tool_calls"]]
        for call in said["tool_calls"]:  # As some programs do: ids of their own, arguments written anew.
            call["function"]["arguments"] = call["function"]["arguments"].replace(" ", "")
        body = {"messages": [*USER, said, *results], "tools": TOOLS}
        await at.client().post("chat/completions", body)

    played = play(program, *model(lambda prompt, request: "7" if "tool\n3" in prompt else two))
    assert len(played.notes["calls"]) == 2
    assert played.account.continuity == {"root": 1, "extends": 1}
    turns = list(played.rows)
    assert turns[1].parent == turns[0].sample_id


def test_a_history_is_continued_only_under_the_tools_that_it_was_told():
    async def program(at: At) -> None:
        first = (await at.chat(("user", "hello"), tools=TOOLS))["choices"][0]["message"]["content"]
        history = (("user", "hello"), ("assistant", first), ("user", "and now?"))
        await at.chat(*history)
        await at.chat(*history, tools=TOOLS)

    told = play(program, *model()).account
    assert told.continuity == {"root": 1, "rendered": 1, "extends": 1}


def test_another_dialect_continues_what_was_said_in_the_first():
    async def program(at: At) -> None:
        first = await at.client().post("chat/completions", {"messages": USER})
        text = first.json["choices"][0]["message"]["content"]
        said = [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
        await at.client().post("messages", {"messages": said, "max_tokens": 50})

    assert play(program, *model()).account.continuity == {"root": 1, "extends": 1}


def test_responses_continue_by_their_id():
    async def program(at: At) -> None:
        first = (await at.client().post("responses", {"input": "What is 3 + 4?"})).json
        second = await at.client().post("responses", {"input": "sure?", "previous_response_id": first["id"]})
        at.notes["status"] = second.status
        kept = await at.client().get(f"responses/{first['id']}")
        at.notes["same"] = kept.json == first
        await at.client().send("DELETE", f"responses/{first['id']}", b"")
        at.notes["gone"] = (await at.client().get(f"responses/{first['id']}")).status

    played = play(program, *model())
    assert (played.notes["status"], played.notes["same"], played.notes["gone"]) == (200, True, 404)
    assert played.account.continuity == {"root": 1, "extends": 1}


def test_counted_tokens_are_those_of_the_usage():
    body = {"messages": USER, "max_tokens": 9, "system": "Be brief."}

    async def program(at: At) -> None:
        counted = (await at.client().post("messages/count_tokens", body)).json["input_tokens"]
        at.notes["tokens"] = counted, (await at.client().post("messages", body)).json["usage"]["input_tokens"]

    counted, charged = play(program, *model()).notes["tokens"]
    assert counted == charged > 0


def test_a_forced_call_begins_with_prompt_ids_and_is_delivered_whole():
    async def program(at: At) -> None:
        body = {"messages": USER, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}
        at.notes["said"] = (await at.client().post("chat/completions", body)).json["choices"][0]["message"]

    played = play(program, *model('{"a": 3}}</tool_call>'))
    (call,) = played.notes["said"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 3}'}
    assert played.episode.turns[0].num_tokens == played.engine_tokens


def test_a_failed_engine_is_an_error_of_the_dialect_and_its_tokens_are_failed():
    async def program(at: At) -> None:
        at.notes["status"] = (await at.client().post("chat/completions", {"messages": USER})).status
        events = (await at.client().post("messages", {"messages": USER, "max_tokens": 9, "stream": True})).events
        at.notes["event"] = events[-1]["type"]

    played = play(program, *model("!The answer", token_s=2))
    assert (played.notes["status"], played.notes["event"]) == (503, "error")
    assert sum(played.account.failed.values()) == played.account.sampled == played.engine_tokens
    assert {row.state for row in played.rows} == {RowState.FAILED}


def test_a_program_that_asks_for_ever_ends_its_episode():
    async def program(at: At) -> None:
        while True:
            at.notes["last"] = await at.client().post("chat/completions", {"messages": USER})

    played = play(program, *model(), max_calls=5)
    assert played.episode.status is EpisodeStatus.FAILED
    assert "call budget spent" in played.episode.reason
    assert played.notes["last"].status == 400
    assert "call budget spent" in played.notes["last"].text


def test_calls_depend_on_what_was_delivered_before_they_came():
    async def program(at: At) -> None:
        await at.chat(("user", "one"))
        await asyncio.gather(at.chat(("user", "two")), at.chat(("user", "three")))
        await at.chat(("user", "four"))

    turns = play(program, *model()).episode.turns
    assert [turn.after for turn in turns] == [(), (0,), (0,), (1, 2)]


def test_sampling_is_the_seats_and_stop_texts_are_added():
    async def program(at: At) -> None:
        body = {"messages": USER, "temperature": 0, "seed": 3, "stop": [" is"], "max_tokens": 1000}
        reply = (await at.client().post("chat/completions", body)).json
        at.notes["text"] = reply["choices"][0]["message"]["content"]

    tokens, tokenizer = model()
    played = play(program, tokens, tokenizer, agent={"sampling": {"max_tokens": 40, "temperature": 0.7}})
    (request,) = tokens.requests
    assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.stop) == (0.7, 40, (" is",))
    assert played.notes["text"] == "The answer"
    assert played.episode.turns[0].tags["asked"] == "temperature=0, seed=3"


def test_turns_of_a_door_keep_the_laws_of_turns():
    async def program(at: At) -> None:
        said = list(USER)
        for _ in range(2):
            reply = await at.client().post("chat/completions", {"messages": said})
            said += [{"role": "assistant", "content": reply.json["choices"][0]["message"]["content"]}, *USER]
        at.notes["turns"] = at.team.turns

    check_turns(play(program, *model()).notes["turns"])


def test_the_parts_of_an_answer_do_not_wait_for_the_client_to_acknowledge_them():
    delays: list[bool] = []

    async def serve_one() -> None:
        answered = asyncio.Event()

        def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            delays.append(not connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            answered.set()

        listening = listening_socket("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            await answered.wait()
            writer.close()

    asyncio.run(serve_one())
    assert delays == [False]
