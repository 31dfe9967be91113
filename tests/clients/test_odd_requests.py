"""Requests made by rule from the gateway's own description, sound and unsound: each has an answer, and none is a fault.

FLEXMARL_CASES    requests of each kind at each path, 25 by default
"""

import asyncio
import json
import os
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from flexmarl.gateway.openapi import description
from tests.unit.agents.tokenizers_for_tests import byte_pairs
from tests.unit.gateway.doors import At, TokenModel, play

schemathesis = pytest.importorskip("schemathesis", reason="run by `make test-gateway`")
httpx = pytest.importorskip("httpx2", reason="run by `make test-gateway`")

CASES = int(os.environ.get("FLEXMARL_CASES", "25"))
TIMEOUT_S = 20.0
tokenizer_of = cache(byte_pairs)


class Asker:
    """A client that asks at every path. `seats`, `episodes`: key and places in the paths of each kind."""

    def __init__(self, url: str, seats: dict[str, str], episodes: dict[str, str]) -> None:
        self.url, self.places = url, {"/e/": seats, "/episodes": episodes, "/": {}}
        self.seen = Counter[tuple[str, int]]()
        self._client = httpx.Client(timeout=TIMEOUT_S)

    def ask_at(self, path: str) -> None:
        schema = schemathesis.openapi.from_dict(self._client.get(f"{self.url}/openapi.json").json())
        operations = [found.ok() for found in schema.get_all_operations()]
        for operation in operations:
            if operation.path == path:
                for mode in schemathesis.GenerationMode:
                    self._ask_at(operation, mode)

    def _ask_at(self, operation: Any, mode: Any) -> None:
        @settings(
            max_examples=CASES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            self._ask(operation.path, case)

        ask()

    def _ask(self, place: str, case: Any) -> None:
        names = next(names for begin, names in self.places.items() if place.startswith(begin))
        path = place
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", value)
        sent = case.as_transport_kwargs(base_url=self.url)
        content = sent["data"] if sent.get("data") is not None else json.dumps(sent.get("json")).encode()
        headers = {"authorization": f"Bearer {names['key']}"}
        answer = self._client.request(case.method, self.url + path, content=content, headers=headers)
        self.seen[place, answer.status_code] += 1
        told = (path, content, answer.status_code, answer.text)
        assert answer.status_code < 500, told
        if answer.headers["content-type"] == "application/json":
            said = answer.json()
            assert answer.status_code < 400 or said["error"]["message"], told


@pytest.mark.parametrize("path", sorted(description()["paths"]))
def test_every_request_is_answered_or_refused_with_a_reason(path: str) -> None:
    seen: Counter[tuple[str, int]] = Counter()

    async def program(at: At) -> None:
        seat, rewards = at.door.seats["solver"], at.door.rewards
        url, _, end = rewards.url.partition("/episodes/")
        seats = {"key": seat.key, "seat": "solver", "id": "resp_none"}
        asker = Asker(url, seats, {"key": rewards.key, "id": end.removesuffix("/rewards")})
        await asyncio.to_thread(asker.ask_at, path)
        seen.update(asker.seen)

    tokenizer = tokenizer_of()
    model = TokenModel(tokenizer, lambda prompt, request: "7", token_s=0.0)
    got = play(program, model, tokenizer, sockets=True, max_calls=10**9)
    print(sum(seen.values()), "requests:", dict(sorted(seen.items())))
    assert not got.episode.failure
    assert got.account.sampled == got.account.delivered + sum(got.account.undelivered.values())
    unserved = {"/e/{key}/{seat}/v1/responses/{id}", "/episodes", "/episodes/{id}/end"}
    assert bool(seen[path, 200]) == (path not in unserved), "witness: what is sound is served"
