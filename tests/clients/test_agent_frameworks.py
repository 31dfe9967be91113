"""Agent frameworks at a gateway on real sockets, as they come: their own loops, tools in parallel, streams."""

import asyncio
from typing import Any

import pytest

from tests.clients.test_gateway_clients import QUESTION, anthropic_at, openai_at, played
from tests.unit.gateway.doors import At, Played

agents = pytest.importorskip("agents", reason="run by `make test-gateway`")
prebuilt = pytest.importorskip("langgraph.prebuilt", reason="run by `make test-gateway`")
langchain_openai = pytest.importorskip("langchain_openai", reason="run by `make test-gateway`")
langchain_anthropic = pytest.importorskip("langchain_anthropic", reason="run by `make test-gateway`")


def account_is_exact(got: Played) -> None:
    """Every token that the engine sampled was delivered, and the second call follows the first one."""
    assert got.account.continuity == {"root": 1, "extends": 1}
    assert got.account.sampled == got.account.delivered == got.engine_tokens
    assert len(got.episode.turns) == len(got.rows) == 2


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_openai_agents_sdk_runs_its_own_loop(api: str, streamed: bool) -> None:
    added: list[int] = []

    @agents.function_tool
    def add(a: int) -> str:
        """Adds."""
        added.append(a)
        return str(a)

    async def program(at: At) -> None:
        agents.set_tracing_disabled(True)
        kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
        async with openai_at(at) as client:
            agent = agents.Agent(
                name="counter",
                instructions="Use the tools.",
                model=kind(model="solver", openai_client=client),
                tools=[add],
            )
            if streamed:
                result = agents.Runner.run_streamed(agent, "What is 3 + 4?")
                kinds = {event.type async for event in result.stream_events()}
                assert "raw_response_event" in kinds
            else:
                result = await agents.Runner.run(agent, "What is 3 + 4?")
            assert result.final_output == "The answer is 7."

    account_is_exact(played(program))
    assert sorted(added) == [3, 4]


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["openai", "responses", "anthropic"])
def test_langgraph_runs_its_own_loop(api: str, streamed: bool) -> None:
    added: list[int] = []

    def add(a: int) -> str:
        """Adds."""
        added.append(a)
        return str(a)

    def model_at(at: At) -> Any:
        seat = at.door.seats["solver"]
        if api == "anthropic":
            return langchain_anthropic.ChatAnthropic(
                model="solver", base_url=seat.anthropic_url, api_key=seat.key, max_tokens=200
            )
        return langchain_openai.ChatOpenAI(
            model="solver", base_url=seat.openai_url, api_key=seat.key, use_responses_api=api == "responses"
        )

    async def program(at: At) -> None:
        graph = prebuilt.create_react_agent(model_at(at), [add])
        asked: Any = {"messages": QUESTION}
        if streamed:
            parts = [part async for part, _ in graph.astream(asked, stream_mode="messages")]
            assert len(parts) > 2
            last = [part for part in parts if part.type in ("ai", "AIMessageChunk")]
            text = "".join(part.text for part in last)
        else:
            text = (await graph.ainvoke(asked))["messages"][-1].text
        assert text.endswith("The answer is 7.")

    account_is_exact(played(program))
    assert sorted(added) == [3, 4]


def test_two_agents_of_one_program_share_an_episode_at_the_same_time() -> None:
    async def program(at: At) -> None:
        async with openai_at(at) as one, anthropic_at(at) as other:
            chat = one.chat.completions.create(model="solver", messages=QUESTION)
            message = other.messages.create(model="solver", messages=QUESTION, max_tokens=50)
            texts = await asyncio.gather(chat, message)
            assert texts[0].choices[0].message.content.startswith("The answer is")
            assert texts[1].content[0].text.startswith("The answer is")

    got = played(program)
    assert got.account.continuity == {"root": 2}
    assert got.account.sampled == got.account.delivered == got.engine_tokens
