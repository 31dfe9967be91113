"""MCP servers as tools: real ones of PyPI and npm in boxes, over HTTP, and what happens when a server misbehaves."""

import asyncio
import json
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import psutil
import pytest

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.tools import Observation, ToolContext
from flexmarl.tools.mcp import McpServer
from flexmarl.tools.mcp_session import MOST_LINE
from tests.commands import run_commands
from tests.docs.pages import blocks
from tests.mcp_servers.conftest import HERE, PACKAGES, odd, of_npm, of_pypi

Calls = Sequence[tuple[str, Mapping[str, Any]]]
Call = Callable[..., Awaitable[Observation]]


def played(server: McpServer, sandbox: Any, play: Callable[[Call], Awaitable[Any]], **context: Any) -> Any:
    """What `play` returns, with a function that calls a tool of the server in one episode."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            given = ToolContext(**{"episode": "g0e0a0", "seed": 1, "sandbox": sandbox, **context})
            bound = {
                tool.name.partition(".")[2]: await stack.enter_async_context(tool.open(given))
                for tool in server.tools()
            }

            async def call(name: str, **arguments: Any) -> Observation:
                return await bound[name].call(arguments)

            return await play(call)

    return asyncio.run(run())


def called(server: McpServer, sandbox: Any, *calls: tuple[str, Mapping[str, Any]], **context: Any) -> list[Observation]:
    async def play(call: Call) -> list[Observation]:
        return [await call(name, **arguments) for name, arguments in calls]

    return played(server, sandbox, play, **context)


def programs(part: str) -> list[psutil.Process]:
    """Processes of servers below this one."""
    found = []
    for one in psutil.Process().children(recursive=True):
        try:
            if " ".join(one.cmdline()).endswith(part) and one.name() not in ("bwrap", "sh", "setpriv"):
                found.append(one)
        except psutil.Error:
            continue
    return found


def test_the_time_server_lists_calls_and_says_what_is_wrong(pinned, sandbox):
    server = pinned(of_pypi("mcp_server_time"))
    assert [tool.name for tool in server.tools()] == ["time.convert_time", "time.get_current_time"]
    noon = {"source_timezone": "Europe/Zurich", "time": "12:00", "target_timezone": "Asia/Tokyo"}
    right, wrong = called(
        server, sandbox, ("convert_time", noon), ("convert_time", {**noon, "target_timezone": "Nowhere"})
    )
    assert json.loads(right.text)["target"]["datetime"].endswith("20:00:00+09:00")
    assert not wrong.ok
    assert "Nowhere" in wrong.text


def test_the_git_server_reads_the_episodes_own_files(pinned, sandbox):
    server = pinned(of_pypi("mcp_server_git", name="git"))
    repository = {
        ".git/HEAD": "ref: refs/heads/main\n",
        ".git/config": "[core]\n\trepositoryformatversion = 0\n",
        ".git/objects/info/none": "",
        ".git/refs/heads/.none": "",
        "new.txt": "1",
    }
    (status,) = called(server, sandbox, ("git_status", {"repo_path": "/box"}), files=repository)
    assert status.ok, status.text
    assert "new.txt" in status.text


def test_everything_of_npm_adds_and_refuses_what_does_not_fit(pinned, sandbox):
    server = pinned(of_npm("everything"))
    name = next(tool.name.partition(".")[2] for tool in server.tools() if "sum" in tool.name)
    right, wrong = called(server, sandbox, (name, {"a": 2, "b": 3}), (name, {"a": "two", "b": 3}))
    assert right.ok
    assert "5" in right.text
    assert not wrong.ok


def test_the_memory_server_keeps_for_an_episode_and_no_longer(pinned, sandbox):
    server = pinned(of_npm("memory", environment={"MEMORY_FILE_PATH": "/box/memory.jsonl"}))
    entity = {"entities": [{"name": "Bern", "entityType": "city", "observations": ["a capital"]}]}
    made, read = called(server, sandbox, ("create_entities", entity), ("read_graph", {}))
    assert made.ok, made.text
    assert "a capital" in read.text
    (anew,) = called(server, sandbox, ("read_graph", {}), episode="g0e1a0")
    assert "a capital" not in anew.text


def test_the_filesystem_server_in_its_box_reads_nothing_outside(pinned, sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("nobody may read this")
    server = pinned(of_npm("filesystem", "/"))  # The server itself would allow everything.
    inside, outside, passwords, link = called(
        server,
        sandbox,
        ("read_text_file", {"path": "/box/data.txt"}),
        ("read_text_file", {"path": str(secret)}),
        ("read_text_file", {"path": "/etc/passwd"}),
        ("write_file", {"path": "/usr/planted", "content": "x"}),
        files={"data.txt": "of the task"},
    )
    assert inside.text == "of the task"
    assert [one.ok for one in (outside, passwords, link)] == [False, False, False]
    assert "nobody may read this" not in outside.text


def test_thirty_two_calls_at_once_are_answered_each(pinned, sandbox, odd_over_http):
    async def play(call: Call) -> list[str]:
        return [one.text for one in await asyncio.gather(*(call("echo", text=str(number)) for number in range(32)))]

    over_http = {"name": "odd", "url": odd_over_http}
    for server in (pinned(odd()), pinned(over_http)):
        assert played(server, sandbox, play) == [str(number) for number in range(32)]


def test_a_call_over_its_limit_is_a_mistake_and_the_session_goes_on(pinned, sandbox, odd_over_http):
    for settings in (odd(timeout_s=3), {"name": "odd", "url": odd_over_http, "timeout_s": 3}):
        first, late, second = called(
            pinned(settings, listed_by=odd()), sandbox, ("count", {}), ("wait", {"seconds": 60.0}), ("count", {})
        )
        assert (late.ok, late.text) == (False, "it took longer than 3 s")
        assert int(second.text) == int(first.text) + 1


def test_what_a_tool_gets_wrong_is_a_mistake_that_the_agent_reads(pinned, sandbox):
    fails, picture, asks, colours = called(
        pinned(odd()), sandbox, ("fail", {}), ("picture", {}), ("ask", {}), ("colours", {})
    )
    assert (fails.ok, fails.text) == (False, "Error executing tool fail")
    assert (picture.ok, picture.text) == (False, "the result holds content of type image, which cannot be shown")
    assert not asks.ok, "a question to the user is refused"
    assert "licit" in asks.text
    assert (colours.ok, colours.shown) == (True, "a\\x1b[2Jb")


def test_a_server_that_hangs_answers_no_call_and_holds_up_nobody(pinned, sandbox):
    hung, after = called(
        pinned(odd(timeout_s=0.5), listed_by=odd()), sandbox, ("hang", {}), ("echo", {"text": "are you there"})
    )
    assert [one.text for one in (hung, after)] == ["it took longer than 0.5 s"] * 2


def test_a_server_that_is_killed_before_its_first_answer_is_started_again_once(pinned, sandbox):
    async def play(call: Call) -> Observation:
        waiting = asyncio.create_task(call("wait", seconds=2.0))
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if programs("sleep 2.0"):
                break
        programs("odd_server.py")[0].kill()
        return await waiting

    assert played(pinned(odd()), sandbox, play).text == "waited"


def test_a_server_that_ends_with_what_it_kept_fails_the_episode(pinned, sandbox):
    with pytest.raises(EpisodeError, match="'odd' ended after 1 calls, with what it kept"):
        called(pinned(odd()), sandbox, ("count", {}), ("end", {}))


def test_a_server_for_all_episodes_that_ends_is_started_again_once(pinned, sandbox):
    server = pinned(odd(scope="run"), listed_by=odd())

    async def play(call: Call) -> list[str]:
        texts = [(await call("count")).text]
        (program,) = programs("odd_server.py")
        program.kill()
        return [*texts, (await call("count")).text]

    assert played(server, sandbox, play) == ["1", "1"]
    with pytest.raises(EpisodeError, match="'odd' ended for the second time"):
        called(server, sandbox, ("end", {}))


def test_agents_of_an_episode_share_a_session_and_episodes_do_not(pinned, sandbox):
    async def run(server: McpServer) -> list[str]:
        (count,) = [tool for tool in server.tools() if tool.name == "odd.count"]
        texts = []
        async with AsyncExitStack() as stack:
            for episode in ("a", "a", "b"):
                context = ToolContext(episode=episode, seed=1, sandbox=sandbox)
                bound = await stack.enter_async_context(count.open(context))
                texts.append((await bound.call({})).text)
        return texts

    assert asyncio.run(run(pinned(odd()))) == ["1", "2", "1"]
    assert asyncio.run(run(pinned(odd(scope="run"), listed_by=odd()))) == ["1", "2", "3"]


def test_a_message_without_an_end_ends_the_session_and_not_this_process(pinned, sandbox):
    before = psutil.Process().memory_info().rss
    with pytest.raises(EpisodeError, match="cannot be used"):
        called(pinned(odd("floods"), listed_by=odd()), sandbox, ("echo", {"text": "x"}))
    assert psutil.Process().memory_info().rss - before < 256 * 2**20


@pytest.mark.parametrize(
    ("misbehaving", "fault"),
    [
        ("hangs at start", r"did not start in start_s=3 seconds"),
        ("ends at start", r"cannot be used: .*; it does not want to"),
        ("has another tool", r"lists other tools than .*odd\.json: another; look at them"),
    ],
)
def test_a_server_that_cannot_be_used_fails_the_episode(misbehaving, fault, pinned, sandbox):
    start_s = 3.0 if misbehaving == "hangs at start" else 30.0
    server = pinned(odd(misbehaving, start_s=start_s), listed_by=odd())
    with pytest.raises(EpisodeError, match=fault):
        called(server, sandbox, ("echo", {"text": "x"}))


def test_a_program_that_is_not_there_is_named(pinned, sandbox):
    server = pinned(odd(command=("no-such-program",)), listed_by=odd())
    with pytest.raises(EpisodeError, match=r"no-such-program"):
        called(server, sandbox, ("echo", {"text": "x"}))


def test_a_cancelled_call_leaves_the_session_usable(pinned, sandbox):
    async def play(call: Call) -> str:
        await call("count")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await call("wait", seconds=60.0)
        return (await call("count")).text

    assert played(pinned(odd()), sandbox, play) == "2"


def test_nobody_who_listens_is_a_fault(pinned, sandbox):
    server = pinned({"name": "odd", "url": "http://127.0.0.1:9/mcp"}, listed_by=odd())
    with pytest.raises(EpisodeError, match="'odd' cannot be used"):
        called(server, sandbox, ("echo", {"text": "x"}))


@pytest.mark.parametrize(("seconds", "said"), [(0.0, "it has more than 16777216 bytes"), (1.0, "SSE stream failed")])
def test_an_answer_that_is_too_long_is_a_mistake_and_the_call_is_not_repeated(
    pinned, sandbox, odd_over_http, seconds, said
):
    server = pinned({"name": "odd", "url": odd_over_http, "timeout_s": 30.0}, listed_by=odd())
    first, much, second = called(server, sandbox, ("count", {}), ("much", {"seconds": seconds}), ("count", {}))
    assert (much.ok, said in much.text, len(much.text) < 1000) == (False, True, True)
    assert int(second.text) == int(first.text) + 2


class Flood(BaseHTTPRequestHandler):
    """Answers each request without end: as one message, as one event, or as what would unpack to far more."""

    protocol_version = "HTTP/1.1"
    headers_sent: Mapping[str, str] = {}
    sent = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        for name, value in {**self.headers_sent, "Transfer-Encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            while type(self).sent < 2**28:
                self.wfile.write(b"10000\r\n" + b"x" * 2**16 + b"\r\n")
                type(self).sent += 2**16

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json"},
        {"Content-Type": "text/event-stream"},
        {"Content-Type": "application/json; profile=text/event-stream"},
        {"Content-Type": "text/event-stream", "Content-Encoding": "deflate"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_a_server_that_sends_without_end_is_not_read_on(pinned, sandbox, headers):
    flood = type("TheFlood", (Flood,), {"headers_sent": headers})
    with ThreadingHTTPServer(("127.0.0.1", 0), flood) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        server = pinned({"name": "odd", "url": f"http://127.0.0.1:{http.server_port}/mcp"}, listed_by=odd())
        with pytest.raises(EpisodeError, match="'odd' cannot be used"):
            called(server, sandbox, ("echo", {"text": "x"}))
        http.shutdown()
    assert flood.sent < 4 * MOST_LINE


def test_a_header_comes_from_the_environment_or_is_missed(pinned, sandbox, odd_over_http, monkeypatch):
    given = {"name": "odd", "url": odd_over_http, "headers_from": {"Authorization": "ODD_TOKEN"}}
    monkeypatch.delenv("ODD_TOKEN", raising=False)
    with pytest.raises(EpisodeError, match="environment variable ODD_TOKEN, which is not set"):
        called(pinned(given, listed_by=odd()), sandbox, ("echo", {"text": "x"}))
    for token in ("Bearer x", "Basic c2VjcmV0\n"):  # Files of secrets often end in a line.
        monkeypatch.setenv("ODD_TOKEN", token)
        (said,) = called(pinned(given, listed_by=odd()), sandbox, ("echo", {"text": "x"}))
        assert said.text == "x"
    monkeypatch.setenv("ODD_TOKEN", "Basic c2Vj\ncmV0")
    with pytest.raises(EpisodeError, match="ODD_TOKEN holds characters that no header can have") as refused:
        called(pinned(given, listed_by=odd()), sandbox, ("echo", {"text": "x"}))
    assert "c2Vj" not in str(refused.value)


def test_only_some_tools_are_given_and_unknown_ones_are_named(pinned):
    assert [tool.name for tool in pinned(odd(only=("count",)), listed_by=odd()).tools()] == ["odd.count"]
    with pytest.raises(ConfigError, match=r"no tool 'fly', which `only` names; there are: .*count"):
        pinned(odd(only=("fly",)), listed_by=odd()).tools()


def test_a_file_of_tools_that_is_missing_or_none_says_how_it_is_made(tmp_path):
    path = tmp_path / "tools.json"
    server = McpServer(name="odd", url="http://x", tools_file=path)
    with pytest.raises(ConfigError, match="write it with `flexmarl mcp CONFIG`"):
        server.tools()
    path.write_text('[{"name": "x"}]')
    with pytest.raises(ConfigError, match="has no list of tools"):
        server.tools()


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({}, "needs one of command and url, got none"),
        ({"command": ("x",), "url": "http://x"}, "got both"),
        ({"url": "http://x", "reads": ("y",)}, "with which reads means nothing"),
        ({"url": "http://user:word@x"}, "url"),
        ({"command": ("x",), "headers_from": {"A": "B"}}, "with which headers_from means nothing"),
    ],
)
def test_settings_that_do_not_fit_are_named(wrong, fault):
    with pytest.raises(ValueError, match=fault):
        McpServer(name="odd", tools_file="x", **wrong)


def test_the_commands_of_the_page_pin_and_a_run_with_a_server_trains(small_run, tmp_path, sandbox):
    page = next(one.text for one in blocks("docs/howto/mcp.md", "yaml") if "mcp_server_time" in one.text)
    assert "tools_file: time.json" in page
    tool = (
        "{type: mcp, name: time, command: [python3, -m, mcp_server_time], "
        f"reads: [{PACKAGES}], environment: {{PYTHONPATH: {PACKAGES}}}, tools_file: {tmp_path}/time.json}}"
    )
    given = (str(small_run), f"team.agents.solver.tools=[{tool}]", "policies.one.engine.max_len=1024")
    early, listed, checked, trained = (
        run_commands((command, *given, *more), cwd=tmp_path)[0]
        for command, *more in (("check",), ("mcp",), ("check",), ("train", "steps=1", f"out={tmp_path}/out"))
    )
    assert early.returncode == 2
    assert b"write it with `flexmarl mcp CONFIG`" in early.stderr
    assert listed.returncode == 0, listed.stderr
    assert b"time.json: " in listed.stdout
    assert b"convert_time" in listed.stdout
    assert checked.returncode == 0, checked.stderr
    assert b"time.convert_time" in checked.stdout
    assert trained.returncode == 0, trained.stderr


def test_the_servers_of_npm_are_those_of_the_lock_file():
    wanted = json.loads((HERE / "package.json").read_text())["dependencies"]
    told = subprocess.run(["npm", "ls", "--json"], cwd=HERE, capture_output=True, text=True, check=False)
    there = {name: one["version"] for name, one in json.loads(told.stdout)["dependencies"].items()}
    assert there == wanted
