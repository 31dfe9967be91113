"""Agent frameworks at a gateway on real sockets, as they come: their own loops, tools in parallel, streams."""

import asyncio
from typing import Any

import pytest

from flexmarl.records import SampleId
from tests.clients.test_gateway_clients import QUESTION, anthropic_at, openai_at, played
from tests.unit.gateway.doors import At, Played

agents = pytest.importorskip("agents", reason="run by `make test-gateway`")
prebuilt = pytest.importorskip("langgraph.prebuilt", reason="run by `make test-gateway`")
langchain_openai = pytest.importorskip("langchain_openai", reason="run by `make test-gateway`")
langchain_anthropic = pytest.importorskip("langchain_anthropic", reason="run by `make test-gateway`")
autogen_agents = pytest.importorskip("autogen_agentchat.agents", reason="run by `make test-gateway`")
autogen_teams = pytest.importorskip("autogen_agentchat.teams", reason="run by `make test-gateway`")
autogen_ends = pytest.importorskip("autogen_agentchat.conditions", reason="run by `make test-gateway`")
autogen_openai = pytest.importorskip("autogen_ext.models.openai", reason="run by `make test-gateway`")


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


def autogen_client_at(at: At, seat: str = "solver") -> Any:
    """AutoGen's client of OpenAI at a seat; it knows OpenAI's models by name, and is told what others can do."""
    can = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    address = at.door.seats[seat]
    return autogen_openai.OpenAIChatCompletionClient(
        model=seat, base_url=address.openai_url, api_key=address.key, model_info={**can, "family": "unknown"}
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_autogen_runs_its_own_loop(streamed: bool) -> None:
    added: list[int] = []

    def add(a: int) -> str:
        """Adds."""
        added.append(a)
        return str(a)

    async def program(at: At) -> None:
        client = autogen_client_at(at)
        agent = autogen_agents.AssistantAgent(
            "counter", client, tools=[add], model_client_stream=streamed, max_tool_iterations=3, system_message="Add."
        )
        said = [one async for one in agent.run_stream(task="What is 3 + 4?")]
        await client.close()
        chunks = [one for one in said if getattr(one, "type", "") == "ModelClientStreamingChunkEvent"]
        assert bool(chunks) == streamed
        assert said[-1].messages[-1].content == "The answer is 7."

    account_is_exact(played(program))
    assert sorted(added) == [3, 4]


def test_autogen_reflects_without_its_tools_in_a_prompt_of_its_own() -> None:
    def add(a: int) -> str:
        """Adds."""
        return str(a)

    async def program(at: At) -> None:
        client = autogen_client_at(at)
        agent = autogen_agents.AssistantAgent("counter", client, tools=[add], reflect_on_tool_use=True)
        got = await agent.run(task="What is 3 + 4?")
        await client.close()
        assert got.messages[-1].content == "The answer is 7."

    got = played(program)
    assert got.account.continuity == {"root": 1, "rendered": 1}
    assert got.account.why == {"tools changed": 1}
    assert got.account.sampled == got.account.delivered == got.engine_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_a_team_of_autogen_plays_two_seats_in_turn(streamed: bool) -> None:
    names = ["solver", "verifier"]

    async def program(at: At) -> None:
        clients = [autogen_client_at(at, name) for name in names]
        seats = [
            autogen_agents.AssistantAgent(
                name, client, model_client_stream=streamed, system_message=f"You are the {name}."
            )
            for name, client in zip(names, clients, strict=True)
        ]
        team = autogen_teams.RoundRobinGroupChat(seats, termination_condition=autogen_ends.MaxMessageTermination(5))
        got = await team.run(task="What is 3 + 4?")
        for client in clients:
            await client.close()
        assert [one.source for one in got.messages] == ["user", *names, *names]

    got = played(program)
    assert got.account.continuity == {"root": 2, "extends": 2}
    assert got.account.sampled == got.account.delivered == got.engine_tokens
    agents_of = {turn.sample_id: turn.agent for turn in got.episode.turns}
    followed = [(agents_of[row.sample_id], agents_of[SampleId(row.parent)]) for row in got.rows if row.parent]
    assert sorted(followed) == [("solver", "solver"), ("verifier", "verifier")], "each seat continues its own turn"


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
