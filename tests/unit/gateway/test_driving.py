"""Whoever drives an episode over HTTP: rewards with a key of their own, accounts, and what a seat's key cannot do."""

import asyncio
from typing import Any

import pytest

from flexmarl.agents.doors import SeatAddress
from flexmarl.gateway.addresses import same_secret
from flexmarl.testing.gateway import AsgiClient, AsgiReply
from tests.unit.gateway.doors import At, Played, play
from tests.unit.gateway.test_sessions import model

USER = [{"role": "user", "content": "What is 3 + 4?"}]


def driver(at: At, key: str | None = None) -> AsgiClient:
    """A client at /episodes, with the reward key or another one."""
    url = at.door.rewards.url.rpartition("/episodes/")[0]
    given = at.door.rewards.key if key is None else key
    return AsgiClient(at.app, SeatAddress(openai_url=f"{url}/episodes", anthropic_url="", key=given, model=""))


async def rewarded(at: At, **body: Any) -> AsgiReply:
    return await driver(at).post("g0e0a0/rewards", body)


def played(program: Any) -> Played:
    return play(program, *model())


def test_rewards_of_a_reply_a_seat_and_the_team_add_up() -> None:
    async def program(at: At) -> None:
        chat = await at.client().post("chat/completions", {"messages": USER})
        await at.client("verifier").post("messages", {"messages": USER, "max_tokens": 9})
        assert (await rewarded(at, reward=0.25, call=chat.json["id"], part="format")).status == 200
        assert (await rewarded(at, reward=0.5, seat="solver")).status == 200
        assert (await rewarded(at, reward=-2)).status == 200

    episode = played(program).episode
    parts = {turn.agent: dict(episode.parts[turn.sample_id]) for turn in episode.turns}
    # The workflow of these tests gives 1.0 to all.
    assert parts == {"solver": {"outcome": 1.0 - 2 + 0.5, "format": 0.25}, "verifier": {"outcome": 1.0 - 2}}


def test_ids_of_every_dialect_name_their_reply() -> None:
    async def program(at: At) -> None:
        chat = await at.client().post("chat/completions", {"messages": USER})
        message = await at.client().post("messages", {"messages": USER, "max_tokens": 9})
        response = await at.client().post("responses", {"input": "What is 3 + 4?"})
        for place, reply in enumerate((chat, message, response)):
            assert (await rewarded(at, reward=float(place + 1), call=reply.json["id"], part="own")).status == 200

    episode = played(program).episode
    assert [episode.parts[turn.sample_id]["own"] for turn in episode.turns] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 400, "reward"),
        (b'{"reward": NaN}', 400, "NaN"),
        (b'{"reward": 1e999}', 400, "reward"),
        ({"reward": 1e300}, 400, "add up"),
        ({"reward": 1, "part": "not a name"}, 400, "named"),
        ({"reward": 1, "seat": "nobody"}, 404, "solver, verifier"),
        ({"reward": 1, "call": "chatcmpl-g0e0a0-9"}, 404, "delivered"),
        ({"reward": 1, "call": "chatcmpl-g0e0a0-0", "seat": "verifier"}, 404, "delivered"),
        (b"[" * 2**20 + b"1", 413, "longer"),
        (b"\xff", 400, "JSON"),
    ],
)
def test_what_is_no_reward_is_refused_and_gives_none(body: Any, status: int, named: str) -> None:
    async def program(at: At) -> None:
        await at.client().post("chat/completions", {"messages": USER})
        at.notes["reply"] = await driver(at).post("g0e0a0/rewards", body)

    got = played(program)
    assert got.notes["reply"].status == status
    assert named in got.notes["reply"].json["error"]["message"]
    assert [dict(parts) for parts in got.episode.parts.values()] == [{"outcome": 1.0}]


def test_the_key_of_a_seat_is_not_that_of_its_rewards_and_the_other_way_round() -> None:
    async def program(at: At) -> None:
        at.notes["seats"] = dict(at.door.seats)
        assert at.door.rewards.key not in str(at.notes["seats"])
        own = driver(at, at.door.seats["solver"].key)
        assert (await own.post("g0e0a0/rewards", {"reward": 1.0})).status == 403
        assert (await own.get("g0e0a0")).status == 403
        assert (await own.post("g0e0a0/end", {})).status == 403
        assert (await driver(at, "0" * 32).get("g0e0a0")).status == 403
        assert (await driver(at, "é").get("g0e0a0")).status == 403
        assert (await driver(at, "").get("g0e0a0", authorization="")).status == 401
        seat = at.door.seats["solver"]
        other = SeatAddress(openai_url=seat.openai_url, anthropic_url="", key=at.door.rewards.key, model="")
        assert (await AsgiClient(at.app, other).post("chat/completions", {"messages": USER})).status == 403

    assert played(program).episode.turns == ()


def test_an_episode_that_is_not_there_is_answered_like_a_wrong_key() -> None:
    async def program(at: At) -> None:
        wrong = await driver(at, "0" * 32).get("g0e0a0")
        absent = await driver(at).get("g9e0a0")
        assert (absent.status, absent.text) == (wrong.status, wrong.text)

    played(program)


@pytest.mark.parametrize("headers", [{"origin": "http://page"}, {"host": "evil.example"}])
def test_pages_and_other_hosts_are_sent_away(headers: dict[str, str]) -> None:
    async def program(at: At) -> None:
        reply = await driver(at).post("g0e0a0/rewards", {"reward": 1.0}, **headers)
        assert reply.status in (403, 421)

    played(program)


def test_a_run_begins_and_ends_its_episodes_itself() -> None:
    async def program(at: At) -> None:
        begun = await driver(at).send("POST", "", b"{}")
        ended = await driver(at).post("g0e0a0/end", {})
        assert (begun.status, ended.status) == (405, 405)

    played(program)


def test_the_account_shows_calls_and_stays_when_the_episode_has_ended() -> None:
    async def program(at: At) -> None:
        await at.client().post("chat/completions", {"messages": USER})
        await at.client().post("chat/completions", {"messages": USER, "stream": True}, leaves_after=1)
        at.notes["during"] = (await driver(at).get("g0e0a0")).json
        at.notes["driver"] = driver(at)

    got = played(program)
    during = got.notes["during"]
    assert [(call["call"], call["seat"], call["delivered"]) for call in during["calls"]] == [
        ("g0e0a0-0", "solver", True),
        ("g0e0a0-1", "solver", False),
    ]
    assert during["state"] == "open"
    assert during["delivered"] == during["calls"][0]["tokens"] == got.account.delivered
    after = asyncio.run(got.notes["driver"].get("g0e0a0")).json
    assert after["state"] == "ended"
    assert after["sampled"] == got.account.sampled == after["delivered"] + sum(after["undelivered"].values())
    assert asyncio.run(got.notes["driver"].post("g0e0a0/rewards", {"reward": 1.0})).status == 410


def test_keys_are_compared_whole_and_an_empty_one_opens_nothing() -> None:
    assert same_secret("5f1c", "5f1c")
    assert not any(same_secret(*pair) for pair in [("", ""), ("5f1", "5f1c"), ("5f1c", ""), ("schlüssel", "5f1c")])
