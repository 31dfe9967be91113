"""The SDKs of OpenAI and Anthropic at a gateway on real sockets, as they come."""

from functools import cache
from typing import Any

import pytest

from tests.unit.agents.tokenizers_for_tests import byte_pairs
from tests.unit.gateway.doors import At, Played, TokenModel, play

openai = pytest.importorskip("openai", reason="run by `make test-gateway`")
anthropic = pytest.importorskip("anthropic", reason="run by `make test-gateway`")

QUESTION: Any = [{"role": "user", "content": "What is 3 + 4?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
CALLS = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (3, 4))
tokenizer_of = cache(byte_pairs)


def reply_to(prompt: str, request: Any) -> str:
    if "tool\n" in prompt.replace("tool\n<", ""):
        return "The answer is 7."
    return f"Let me count {CALLS}" if '"name": "add"' in prompt else f"The answer is {request.seed % 10}."


def played(program: Any, script: Any = reply_to, **options: Any) -> Played:
    tokenizer = tokenizer_of()
    return play(program, TokenModel(tokenizer, script, token_s=0.0, scramble=True), tokenizer, sockets=True, **options)


def openai_at(at: At) -> Any:
    seat = at.door.seats["solver"]
    return openai.AsyncOpenAI(base_url=seat.openai_url, api_key=seat.key)


def anthropic_at(at: At) -> Any:
    seat = at.door.seats["solver"]
    return anthropic.AsyncAnthropic(base_url=seat.anthropic_url, api_key=seat.key)


def test_openai_plain_and_streamed_with_choices_usage_and_models() -> None:
    async def program(at: At) -> None:
        async with openai_at(at) as client:
            whole = await client.chat.completions.create(model="solver", messages=QUESTION, n=3, logprobs=True)
            assert len(whole.choices) == 3
            assert whole.choices[0].logprobs.content
            stream = await client.chat.completions.create(
                model="solver", messages=QUESTION, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text.startswith("The answer is")
            assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
            assert [model.id async for model in client.models.list()] == ["solver", "verifier"]

    got = played(program)
    assert len(got.episode.turns) == 4
    assert got.account.sampled == got.account.delivered == got.engine_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_calls_tools_in_parallel_and_their_results_extend_the_turn(streamed: bool) -> None:
    async def program(at: At) -> None:
        async with openai_at(at) as client:
            if streamed:
                async with client.chat.completions.stream(model="solver", messages=QUESTION, tools=TOOLS) as stream:
                    said = (await stream.get_final_completion()).choices[0].message
            else:
                answer = await client.chat.completions.create(model="solver", messages=QUESTION, tools=TOOLS)
                said = answer.choices[0].message
            assert [call.function.arguments for call in said.tool_calls] == ['{"a": 3}', '{"a": 4}']
            results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in said.tool_calls]
            sent = said.model_dump(exclude_none=True, exclude={"parsed"})
            for call in sent["tool_calls"]:
                call["function"].pop("parsed_arguments", None)
            last = await client.chat.completions.create(
                model="solver", messages=[*QUESTION, sent, *results], tools=TOOLS
            )
            assert last.choices[0].message.content == "The answer is 7."

    assert played(program).account.continuity == {"root": 1, "extends": 1}


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_counts_calls_and_continues(streamed: bool) -> None:
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    asked: Any = {"model": "solver", "max_tokens": 200, "tools": tools, "system": "Be brief."}

    async def program(at: At) -> None:
        async with anthropic_at(at) as client:
            counted = await client.messages.count_tokens(
                model="solver", messages=QUESTION, tools=tools, system="Be brief."
            )
            if streamed:
                async with client.messages.stream(messages=QUESTION, **asked) as stream:
                    said = await stream.get_final_message()
            else:
                said = await client.messages.create(messages=QUESTION, **asked)
            assert said.usage.input_tokens == counted.input_tokens
            assert said.stop_reason == "tool_use"
            uses = [block for block in said.content if block.type == "tool_use"]
            assert [use.input for use in uses] == [{"a": 3}, {"a": 4}]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "3"} for use in uses]
            sent = [block.model_dump(exclude_none=True) for block in said.content]
            more: Any = [
                *QUESTION,
                {"role": "assistant", "content": sent},
                {"role": "user", "content": results},
            ]
            last = await client.messages.create(messages=more, **asked)
            assert last.content[0].text == "The answer is 7."

    assert played(program).account.continuity == {"root": 1, "extends": 1}


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_responses_continue_by_items_and_by_id(streamed: bool) -> None:
    tools: Any = [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}]

    async def program(at: At) -> None:
        async with openai_at(at) as client:
            if streamed:
                async with client.responses.stream(model="solver", input="What is 3 + 4?", tools=tools) as stream:
                    first = await stream.get_final_response()
            else:
                first = await client.responses.create(model="solver", input="What is 3 + 4?", tools=tools)
            calls = [item for item in first.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
            assert len(calls) == 2
            second = await client.responses.create(
                model="solver", input=results, previous_response_id=first.id, tools=tools
            )
            assert second.output_text == "The answer is 7."

    assert played(program).account.continuity == {"root": 1, "extends": 1}


def test_a_history_that_is_too_long_is_the_error_that_each_sdk_knows() -> None:
    async def program(at: At) -> None:
        long: Any = [{"role": "user", "content": "very long " * 400}]
        async with openai_at(at) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="solver", messages=long)
            assert refused.value.code == "context_length_exceeded"
        async with anthropic_at(at) as client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(model="solver", messages=long, max_tokens=10)

    played(program, limits={"p": 400})


def test_a_client_that_hangs_up_is_noticed_over_sockets() -> None:
    async def program(at: At) -> None:
        async with openai_at(at) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=2.0, max_retries=0).chat.completions.create(
                    model="solver", messages=QUESTION
                )
            await client.chat.completions.create(model="solver", messages=[{"role": "user", "content": "another"}])

    def slow(prompt: str, request: Any) -> str:
        return "so " * (2000 if "3 + 4" in prompt else 1)

    tokenizer = tokenizer_of()
    model = TokenModel(tokenizer, slow, token_s=0.02)
    got = play(program, model, tokenizer, sockets=True)
    assert len(got.episode.turns) == 1
    assert 0 < sum(got.account.undelivered.values()) < 256
    assert got.account.sampled == got.engine_tokens
