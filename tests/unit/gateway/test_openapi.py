"""The gateway's own description: every path and field that is served, and no secret."""

import json

import pytest

from flexmarl.gateway.dialects import DIALECTS
from tests.unit.gateway.doors import At, play
from tests.unit.gateway.test_sessions import model


async def asked(at: At, **headers: str) -> tuple[int, str]:
    """Status and body of the description, asked for without a key."""
    status, body = [], []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        status.append(message.get("status"))
        body.append(message.get("body", b""))

    scope = {"type": "http", "method": "GET", "path": "/openapi.json", "raw_path": b"/openapi.json", "root_path": ""}
    given = [(name.encode(), value.encode()) for name, value in ({"host": "127.0.0.1"} | headers).items()]
    await at.app(scope | {"query_string": b"", "headers": given, "http_version": "1.1"}, receive, send)
    return status[0], b"".join(body).decode()


def test_it_names_every_path_and_field_and_no_key() -> None:
    async def program(at: At) -> None:
        at.notes["said"] = await asked(at)
        at.notes["keys"] = [at.door.seats["solver"].key, at.door.rewards.key]
        await at.chat(("user", "hello"))

    notes = play(program, *model()).notes
    (status, text), document = notes["said"], json.loads(notes["said"][1])
    assert status == 200
    assert not [key for key in notes["keys"] if key in text]
    for endpoint, dialect in DIALECTS.items():
        described = document["paths"][f"/e/{{key}}/{{seat}}/v1/{endpoint}"]["post"]
        name = described["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert document["components"]["schemas"][name]["properties"].keys() == dialect.body.model_fields.keys()
    named = {part for part in text.split('"') if part.startswith("#/components/schemas/")}
    assert {part.rpartition("/")[2] for part in named} <= document["components"]["schemas"].keys()


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "http://evil.example"}])
def test_pages_of_a_browser_do_not_get_it(headers: dict[str, str]) -> None:
    async def program(at: At) -> None:
        at.notes["status"], _ = await asked(at, **headers)
        await at.chat(("user", "hello"))

    assert play(program, *model()).notes["status"] in (403, 421)
