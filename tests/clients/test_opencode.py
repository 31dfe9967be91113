"""The opencode CLI of npm, unmodified and offline, in a box whose only way out is the gateway.

Its titles, its sub-agents (`task`) and its compaction are on. It comes with `make opencode`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexmarl.agents.black_box import Command
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.settings import SandboxSettings
from tests.docs.pages import ROOT
from tests.sandbox.boxed_play import played
from tests.sandbox.conftest import remains
from tests.unit.gateway.doors import Played, StoredTurn

BLACK_BOX = ROOT / "examples/black_box"
EXAMPLE: Any = yaml.safe_load((BLACK_BOX / "opencode.yaml").read_text())
PROGRAM = BLACK_BOX / "node_modules/opencode-ai/bin/opencode.exe"
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="opencode is not installed: make opencode")

TITLES, SUMS_UP, WORKS = "You are a title generator", "You are a context summarization agent", "You are opencode"
PROMPT = "Which number stands in notes.txt? Write it into result.txt"
FILES = {"notes.txt": "The number is 42.\n", "log.txt": "nothing happened here\n" * 800}
SUMMARY = "## Objective\n- Write the number of notes.txt, 42, into result.txt"


@dataclass
class Asked:
    """A request of opencode."""

    headers: Mapping[str, str]
    body: Mapping[str, Any]
    status: int = 0

    @property
    def system(self) -> str:
        return self.body["messages"][0]["content"]

    @property
    def ends_with_a_foreign_reply(self) -> bool:
        """True at opencode's limit of steps, where it writes a reply of its own at the end: that continues nothing."""
        return self.body["messages"][-1]["role"] == "assistant"

    def follows(self, earlier: "Asked") -> bool:
        """True if its history is the earlier one, the reply to that, and what followed."""
        before, messages = earlier.body["messages"], self.body["messages"]
        alike = all(self.body.get(name) == earlier.body.get(name) for name in ("model", "tools"))
        return alike and messages[: len(before)] == before and messages[len(before)]["role"] == "assistant"


class Listener:
    """Keeps what an application is asked, in order."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def around(self, app: Any) -> Any:
        async def listens(scope: Any, receive: Any, send: Any) -> None:
            data, mine = bytearray(), list[Asked]()

            async def received() -> Any:
                message = await receive()
                data.extend(message.get("body", b""))
                if message["type"] == "http.request" and not message.get("more_body"):
                    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
                    mine.append(Asked(headers, json.loads(data)))
                    self.asked.append(mine[0])
                return message

            async def sent(message: Any) -> None:
                if message["type"] == "http.response.start":
                    mine[0].status = message["status"]
                await send(message)

            await app(scope, received, sent)

        return listens


@dataclass
class Outcome:
    """An episode that opencode played, with its requests and their rows."""

    got: Played
    refused: list[Asked]
    rows: list[tuple[Asked, StoredTurn]]

    def of(self, begin: str) -> list[tuple[Asked, Any]]:
        """Requests whose system prompt begins so, with their turns."""
        pairs = zip((asked for asked, _ in self.rows), self.got.episode.turns, strict=True)
        return [(asked, turn) for asked, turn in pairs if asked.system.startswith(begin)]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def runs(name: str, command: str) -> str:
    return call("bash", command=command, description=name)


def command_of(config: Mapping[str, Any], **settings: Any) -> Command:
    """The example's command with another config of opencode."""
    given = EXAMPLE["team"]["workflow"]
    environment = {**given["env"], "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    kept = {name: given[name] for name in ("argv", "reads")}
    return Command.model_validate({**kept, "env": environment, "answer": "result.txt", **settings})


def as_it_comes(context: int) -> dict[str, Any]:
    """What opencode must be given: an address, names of models, their limits, and leave to use its tools."""
    own: Any = json.loads(EXAMPLE["team"]["workflow"]["env"]["OPENCODE_CONFIG_CONTENT"])
    provider = own["provider"]["flexmarl"]
    limits = {"solver": {"context": context, "output": 256}, "verifier": {"context": context, "output": 64}}
    models = {name: {"limit": limit} for name, limit in limits.items()}
    return {
        "provider": {"flexmarl": {**provider, "models": models}},
        "model": "flexmarl/solver",
        "small_model": "flexmarl/verifier",
        "permission": "allow",
    }


def solved(place: Path, command: Command, steps: Iterator[str], **options: Any) -> Outcome:
    """Plays an episode. `steps`: the replies to opencode's own agents, sub-agents included."""
    listener = Listener()

    def script(prompt: str, request: Any) -> str:
        if TITLES in prompt:
            return "The number of the notes"
        return SUMMARY if SUMS_UP in prompt else next(steps, "There is nothing left to do.")

    got = played(
        Bubblewrap(SandboxSettings(memory_mib=EXAMPLE["sandbox"]["memory_mib"])),
        place,
        command,
        prompt=PROMPT,
        files=FILES,
        base=BLACK_BOX,
        script=script,
        around=listener.around,
        scramble=True,
        **options,
    )
    assert got.notes.get("error") is None
    served = [one for one in listener.asked if one.status == 200]
    rows = list(zip(served, got.rows, strict=True))
    return Outcome(got, [one for one in listener.asked if one.status != 200], rows)


def honest_continuations_have_their_parent(rows: Sequence[tuple[Asked, StoredTurn]]) -> int:
    """Compares parents with what the requests say themselves; returns how many of them continue another one."""
    found = 0
    for place, (asked, row) in enumerate(rows):
        before = turn_before(asked, rows[:place])
        if before is not None and not asked.ends_with_a_foreign_reply:
            found += 1
            assert row.parent == str(before.sample_id), asked.body["messages"][-1]
            begun = [*before.prompt_ids, *before.response_ids]
            assert row.prompt_ids[: len(begun)] == begun
    return found


def turn_before(asked: Asked, rows: Sequence[tuple[Asked, StoredTurn]]) -> StoredTurn | None:
    """The latest turn whose reply the request holds, with all that came before that."""
    earlier = [(one, turn) for one, turn in rows if len(one.body["messages"]) < len(asked.body["messages"])]
    fits = [(one, turn) for one, turn in earlier if asked.follows(one)]
    return max(fits, key=lambda pair: len(pair[0].body["messages"]))[1] if fits else None


def account_is_exact(played: Outcome) -> None:
    got, account = played.got, played.got.account
    assert account.sampled == account.delivered == got.engine_tokens == sum(len(row.response_ids) for row in got.rows)
    assert account.undelivered == account.failed == {}
    foreign = [
        tokens_written_anew(before, row) if before else None
        for before, row in (
            (turn_before(asked, played.rows[:place]), row)
            for place, (asked, row) in enumerate(played.rows)
            if asked.ends_with_a_foreign_reply
        )
    ]
    # Where sampled ids happen to be those of their words, a prompt that is written anew continues its turn after all.
    assert account.why.get("foreign reply", 0) == len(foreign) - foreign.count(0)
    assert account.retokenised == sum(anew or 0 for anew in foreign)


def tokens_written_anew(before: StoredTurn, row: StoredTurn) -> int:
    """How many tokens of a turn a later prompt, which holds its words, does not begin with."""
    ids = [*before.prompt_ids, *before.response_ids]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(ids, row.prompt_ids, strict=False))
    return len(ids) - sum(1 for _ in alike)


def test_opencode_as_it_comes_solves_a_task_with_a_sub_agent_and_a_compaction(sandbox: Bubblewrap, place: Path) -> None:
    steps = iter(
        [
            call("read", filePath="/box/notes.txt") + runs("lists", "ls"),
            call("task", description="read", prompt="Which number is it?", subagent_type="general"),
            call("read", filePath="/box/notes.txt"),
            "The notes say 41.",
            call("write", filePath="/box/result.txt", content="41\n"),
            call("read", filePath="/box/log.txt"),
            runs("mends it", "echo 42 > result.txt"),
            runs("looks", "cat result.txt"),
            "It is 42.",
        ]
    )
    played = solved(place, command_of(as_it_comes(context=35_000)), steps)
    got = played.got
    assert got.notes["answer"] == "42", "witness: opencode's own tools wrote the file, in the box"
    assert played.refused == []
    account_is_exact(played)
    assert honest_continuations_have_their_parent(played.rows) == 6
    assert got.account.continuity == {"root": 4, "extends": 6, "rendered": 1}
    assert got.account.why == {"history rewritten": 1}

    (_, title), (summing, summary) = *played.of(TITLES), *played.of(SUMS_UP)
    assert (title.agent, summary.agent) == ("verifier", "solver")
    assert "nothing happened here" in summing.body["messages"][1]["content"]
    results = [
        one["content"] for asked, _ in played.of(WORKS) for one in asked.body["messages"] if one["role"] == "tool"
    ]
    assert "log.txt\nnotes.txt\n" in results, "witness: two calls of one message were run"
    by_session: dict[str, set[int]] = {}
    for asked, turn in played.of(WORKS):
        by_session.setdefault("sub" if "x-parent-session-id" in asked.headers else "own", set()).add(turn.tags["lane"])
    assert by_session == {"own": {0}, "sub": {1}}, "the sub-agent has a lane of its own"
    assert summary.tags["lane"] == 2
    last = played.of(WORKS)[-1][1]
    rewritten = next(turn for turn in got.episode.turns if turn.tags.get("why"))
    assert (rewritten.tags["lane"], rewritten.tags["thread"]) == (0, last.tags["thread"])
    assert remains() == []


def test_opencode_compacts_on_the_words_with_which_the_gateway_refuses_a_long_prompt(
    sandbox: Bubblewrap, place: Path
) -> None:
    steps = iter([call("read", filePath="/box/log.txt"), runs("writes", "echo 42 > result.txt"), "It is 42."])
    command = command_of(as_it_comes(context=1_000_000), ok_exits=(0, 1))
    played = solved(place, command, steps, limits={"p": 35_000})
    assert [(one.status, one.system.startswith(WORKS)) for one in played.refused] == [(400, True)]
    assert len(played.of(SUMS_UP)) == 1
    assert played.got.notes["answer"] == "42"
    account_is_exact(played)
    assert played.got.account.why == {"history rewritten": 1}
    assert honest_continuations_have_their_parent(played.rows) == 1


def test_the_example_gives_opencode_a_prompt_of_its_own_and_two_tools_that_fit_a_small_context(
    sandbox: Bubblewrap, place: Path
) -> None:
    text = EXAMPLE["team"]["workflow"]["env"]["OPENCODE_CONFIG_CONTENT"]
    config: Any = json.loads(text.replace("coder", "solver").replace("titler", "verifier"))
    # The tests' tokens are shorter than the model's.
    config["provider"]["flexmarl"]["models"]["solver"]["limit"] = {"context": 9000, "output": 256}
    steps = iter(
        [
            call("read", filePath="/box/notes.txt"),
            call("task", description="read", prompt="Which number?", subagent_type="general"),
            "42",
            call("read", filePath="/box/log.txt"),
            "So it is 42.",
            "42",
        ]
    )
    played = solved(place, command_of(config, answer="", ok_exits=EXAMPLE["team"]["workflow"]["ok_exits"]), steps)
    assert played.got.notes["answer"].split("\n")[-1] == "42"
    own = config["agent"]
    offered = {
        name: [{tool["function"]["name"] for tool in asked.body["tools"]} for asked, _ in played.of(agent["prompt"])]
        for name, agent in own.items()
        if "prompt" in agent
    }
    assert offered == {"build": [{"read", "task"}] * 5, "general": [{"read"}]}
    assert len(played.of(TITLES)) == len(played.of(SUMS_UP)) == 1
    account_is_exact(played)
    assert honest_continuations_have_their_parent(played.rows) == 2
