"""Programs that write their prompts themselves, in words or in ids."""

from functools import cache
from typing import Any

import pytest

from flexmarl.gateway.dialects import DIALECTS
from flexmarl.gateway.dialects.base import Refused
from flexmarl.testing.agents import check_turns
from tests.unit.agents.tokenizers_for_tests import byte_pairs
from tests.unit.gateway.doors import At, Played, TokenModel, play

tokenizer_of = cache(byte_pairs)
THOUGHT = "<think>3 and 4</think>It is 7."


def played(program: Any, reply: Any = THOUGHT, **options: Any) -> Played:
    tokenizer = tokenizer_of()
    script: Any = reply if callable(reply) else lambda prompt, request: reply
    return play(program, TokenModel(tokenizer, script, scramble=True), tokenizer, **options)


async def completed(at: At, prompt: object, **body: Any) -> Any:
    return (await at.client().post("completions", {"prompt": prompt, "return_token_ids": True, **body})).json


def test_ids_that_begin_with_a_turn_continue_it_and_others_do_not() -> None:
    prompt = tokenizer_of()("3 + 4 is", add_special_tokens=False).input_ids

    async def program(at: At) -> None:
        first = await completed(at, prompt)
        assert first["prompt_token_ids"] == prompt
        ids = [*prompt, *first["choices"][0]["token_ids"], *prompt]
        at.notes["second"] = await completed(at, [ids])
        await completed(at, [*prompt[:-1], *ids[len(prompt) :]])
        check_turns(at.team.turns)

    got = played(program)
    first, second, third = got.rows
    assert second.prompt_ids == [*first.prompt_ids, *first.response_ids, *prompt]
    assert (first.parent, second.parent, third.parent) == ("", first.sample_id, "")
    assert got.account.continuity == {"root": 2, "extends": 1}
    assert got.account.sampled == got.account.delivered == got.engine_tokens
    assert got.notes["second"]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(second.prompt_ids) - len(
        prompt
    )


def test_a_reply_is_the_whole_text_and_a_stream_of_it_is_the_same() -> None:
    async def program(at: At) -> None:
        whole = await completed(at, "3 + 4 is", logprobs=0, n=2, stop=["7."])
        at.notes["whole"] = whole["choices"]
        body = {"prompt": "3 + 4 is", "stream": True, "logprobs": 0, "n": 2, "stop": "7."}
        at.notes["events"] = (await at.client().post("completions", body)).events

    got = played(program, lambda prompt, request: f"<think>{request.seed % 97}</think>It is 7.")
    texts = ["", ""]
    for event in got.notes["events"]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    for choice in got.notes["whole"]:
        assert choice["text"].startswith("<think>")
        assert choice["text"].endswith("</think>It is ")
        told = choice["logprobs"]
        assert "".join(told["tokens"]).startswith(choice["text"])
        assert (
            len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == len(choice["token_ids"])
        )
    assert all(text.startswith("<think>") and text.endswith("</think>It is ") for text in texts)
    assert len(got.episode.turns) == 4


def test_words_hold_control_tokens_only_for_an_agent_that_trusts_them() -> None:
    end = tokenizer_of().eos_token

    async def program(at: At) -> None:
        await completed(at, f"a{end}b")

    (text,), (control,) = (played(program, agent={"trust_special": trusts}).rows for trusts in (False, True))
    assert tokenizer_of().eos_token_id not in text.prompt_ids
    assert tokenizer_of().eos_token_id in control.prompt_ids
    assert tokenizer_of().decode(text.prompt_ids) == tokenizer_of().decode(control.prompt_ids)


def test_a_reply_is_rewarded_by_its_id_and_followed_by_no_other_api() -> None:
    async def program(at: At) -> None:
        reply = await completed(at, "3 + 4 is")
        door: Any = at.door
        door.reward(2.0, "own", call=reply["id"])
        at.notes["followed"] = (
            await at.client().post("responses", {"input": "and?", "previous_response_id": reply["id"]})
        ).status

    got = played(program)
    assert got.notes["followed"] == 404
    (parts,) = got.episode.parts.values()
    assert dict(parts) == {"outcome": 1.0, "own": 2.0}, "the workflow of these tests gives 1.0"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt: must not be empty"),
        ({"prompt": []}, "prompt: must not be empty"),
        ({"prompt": ["a", "b"]}, "prompt: a request has one prompt, got 2"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt: holds half a surrogate pair"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 5}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of: 2 replies would be sampled for 1"),
        ({"prompt": "a", "n": 10**6}, "n: "),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused) as refused:
        DIALECTS["completions"].ask(body)
    assert named in refused.value.text
    assert refused.value.status == 400


@pytest.mark.parametrize("unknown", [-1, 10**9])
def test_ids_that_the_model_does_not_have_are_refused(unknown: int) -> None:
    async def program(at: At) -> None:
        reply = await at.client().post("completions", {"prompt": [1, unknown]})
        at.notes["said"] = reply.status, reply.json["error"]["message"]
        await completed(at, [1])

    status, message = played(program).notes["said"]
    assert (status, message.partition(";")[0]) == (400, f"prompt: there is no token {unknown}")


def test_a_prompt_that_leaves_no_room_is_the_error_that_clients_know() -> None:
    async def program(at: At) -> None:
        reply = await at.client().post("completions", {"prompt": [1] * 100, "max_tokens": 10})
        at.notes["code"] = reply.status, reply.json["error"]["code"]
        await completed(at, [1], max_tokens=10)

    assert played(program, limits={"p": 64}).notes["code"] == (400, "context_length_exceeded")
