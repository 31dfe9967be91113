"""Agents of the command line in real boxes, at a real gateway: their way out, their ends, and what is kept of them."""

import asyncio
import json
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError
from rich.console import Console

from flexmarl.agents.black_box import Command
from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.gateway.runners.boxed_commands import RELAY_PORT, CommandHost
from flexmarl.gateway.server import seats_alone, serving, unix_socket
from tests.sandbox.boxed_play import payload_of, played, tokenizer_of
from tests.sandbox.conftest import remains
from tests.unit.gateway.doors import At, TokenModel, play

ASKS = """
import json, os, sys
from urllib.request import Request, urlopen

def ask(url, body, **headers):
    headers["authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.loads(reply.read())

said = [{"role": "user", "content": sys.argv[1]}]
chat = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "solver", "messages": said})
print(chat["choices"][0]["message"]["content"])
body = {"model": "verifier", "max_tokens": 9, "messages": said}
message = ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body)
print(message["content"][0]["text"], file=sys.stderr)
print("my key is", os.environ["ANTHROPIC_API_KEY"], file=sys.stderr)
"""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return ("python3", "-c", code, *arguments)


def test_an_agent_asks_both_apis_and_its_output_is_kept_without_its_key(sandbox, place):
    got = played(sandbox, place, Command(argv=python(ASKS, "{prompt}")))
    assert got.notes.get("answer") == "seven", got.notes
    assert [(turn.agent, turn.tags["dialect"]) for turn in got.episode.turns] == [
        ("solver", "chat"),
        ("verifier", "messages"),
    ]
    assert got.account.sampled == got.account.delivered == got.engine_tokens
    assert (place / "commands" / "g0e0a0.out").read_text() == "seven\n"
    assert (place / "commands" / "g0e0a0.err").read_text() == "seven\nmy key is ***\n"
    assert remains() == []


def test_an_agent_has_no_way_out_but_the_seats(sandbox, place):
    code = """
import os, sys, urllib.error, urllib.request
def status(url):
    asked = urllib.request.Request(url, headers={"x-api-key": os.environ["OPENAI_API_KEY"]})
    try:
        return urllib.request.urlopen(asked, timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return "none"
base = os.environ["ANTHROPIC_BASE_URL"].split("/e/")[0]
print(status(os.environ["OPENAI_BASE_URL"] + "/models"), status(base + "/e/" + "0" * 32 + "/v1/models"))
print(status(base + "/episodes/g0e0a0"), status(base + "/episodes"))
print(status(sys.argv[1]), status("http://192.0.2.1/"), status("http://pypi.org/"))
"""
    got = played(sandbox, place, lambda at: Command(argv=python(code, at.door.rewards.url)))
    assert got.notes.get("error") is None
    assert got.notes["answer"].split("\n") == ["200 403", "404 404", "none none none"]


def test_an_agent_finds_its_own_key_and_never_that_of_its_rewards(sandbox, place):
    code = """
import glob, os
for pattern in ("/proc/*/environ", "/proc/*/cmdline", "/box/**", "/tmp/**", "/run/**", "/*"):
    for path in glob.glob(pattern, recursive=True, include_hidden=True):
        try:
            print(path, open(path, errors="replace").read())
        except OSError:
            pass
"""
    files = {"notes/todo.txt": "the task's own file"}
    got = played(sandbox, place, Command(argv=python(code), output_kib=512), files=files)
    assert got.notes["seat"].key in got.notes["answer"]
    assert "the task's own file" in got.notes["answer"]
    assert got.notes["reward_key"] not in got.notes["answer"]
    kept = (place / "commands" / "g0e0a0.out").read_text()
    assert "***" in kept
    assert got.notes["seat"].key not in kept


def test_a_daemonised_child_ends_with_the_episode(sandbox, place):
    marker = f"outlives-{place.name}"
    code = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("python3", ["python3", "-c", "import time; open('/tmp/up', 'w'); time.sleep(1000)", "{marker}"])
    os._exit(0)
os.wait()
while not os.path.exists("/tmp/up"):
    time.sleep(0.01)
print(any({marker!r} in open("/proc/%s/cmdline" % name).read() for name in os.listdir("/proc") if name.isdigit()))
"""
    got = played(sandbox, place, Command(argv=python(code)))
    assert got.notes["answer"] == "True", "the child was there"
    running = [one for one in psutil.process_iter(["cmdline"]) if marker in (one.info["cmdline"] or [])]
    assert running == []
    assert remains() == []


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ({"argv": python("import sys; sys.exit('no such tool')")}, "ended with exit status 1: no such tool"),
        ({"argv": ("no-such-program",)}, "command 'no-such-program' ended with exit status 127"),
        (
            {"argv": python("import time; time.sleep(1000)"), "deadline_s": 0.5},
            "longer than team.workflow.deadline_s=0.5",
        ),
        ({"argv": python("x = [bytearray(1 << 20) for _ in range(4000)]")}, "took more memory than sandbox.memory_mib"),
        ({"argv": python("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")}, "ended its box"),
        ({"argv": ("true",), "answer": "answer.txt"}, "left no answer in team.workflow.answer"),
        ({"argv": python("import os; os.symlink('/etc/hostname', 'answer.txt')"), "answer": "answer.txt"}, "no answer"),
    ],
)
def test_an_agent_that_fails_is_the_episodes_failure_by_name(command, named, sandbox, place):
    got = played(sandbox, place, Command(**command))
    assert named in got.notes["error"]
    assert remains() == []


def test_other_exits_may_be_fine_and_a_file_may_hold_the_answer(sandbox, place):
    code = "import sys; print('chatter'); open('answer.txt', 'w').write(' 7 '); sys.exit(4)"
    got = played(sandbox, place, Command(argv=python(code), answer="answer.txt", ok_exits=(0, 4)))
    assert got.notes["answer"] == "7"


def test_what_floods_its_outputs_is_cut(sandbox, place):
    code = "import os\nfor _ in range(400): os.write(1, b'x' * 65536)"
    got = played(sandbox, place, Command(argv=python(code), output_kib=3))
    assert len(got.notes["answer"]) <= sandbox.settings.output_kib * 1024
    assert (place / "commands" / "g0e0a0.out").stat().st_size == 3 * 1024


def test_an_episode_that_is_cancelled_ends_its_box(sandbox, place):
    async def program(at: At) -> None:
        path = place / "gateway.sock"
        host = CommandHost(sandbox, path, base=place, outputs=None)
        asks = ASKS + "\nimport time; time.sleep(1000)"
        async with serving(seats_alone(at.sessions), unix_socket(path)), asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(host.play(Command(argv=python(asks, "hi")), payload_of(at)))
            while len(at.door.calls) < 2:  # noqa: ASYNC110 - the door has no event for it
                await asyncio.sleep(0.01)
            playing.cancel()

    tokenizer = tokenizer_of()
    play(program, TokenModel(tokenizer, lambda *_: "7", token_s=0.0), tokenizer, sockets=True)
    assert remains() == []


def test_folders_that_the_agent_may_read_are_there_and_others_are_not(sandbox, place):
    (place / "agent").mkdir()
    (place / "agent" / "main.py").write_text("print(open('/box/task.txt').read() + '!')")
    (place / "hidden").write_text("hidden")
    command = Command(argv=("python3", "{base}/agent/main.py"), reads=(Path("agent"),))
    got = played(sandbox, place, command, files={"task.txt": "3+4"})
    assert got.notes["answer"] == "3+4!"
    got = played(sandbox, place, Command(argv=("cat", f"{place}/hidden")))
    assert "No such file" in got.notes["error"]


def test_a_folder_that_boxes_cannot_read_is_refused_before_the_first_episode(sandbox, place):
    async def check() -> None:
        path = place / "nothing.sock"
        with unix_socket(path):
            host = CommandHost(sandbox, path, base=place, outputs=None)
            await host.check(Command(argv=("true",)))
            await host.check(Command(argv=("true",), reads=(place / "not there",)))

    with pytest.raises(ConfigError, match=r"team\.workflow.*reads.*not there"):
        asyncio.run(check())


def test_a_policy_learns_from_a_command(sandbox, small_run, tmp_path):
    folder = tmp_path / "team"
    folder.mkdir()
    code = (small_run.parent / "tasks.py").read_text()
    for name in ("sums", "echo", "talk"):
        code = code.replace(f'"{name}"', f'"{name}_of_a_command"')
    judge = """
from flexmarl.agents.black_box import judge


@judge("digits_of_a_command")
def digits_of_a_command(task, team, answer, calls):
    for call in calls:
        call.reward(sum(letter.isdigit() for letter in call.text) / 4)
    team.report(success=float(answer == calls[0].text.strip()))
"""
    (folder / "tasks.py").write_text(code + judge)
    (folder / "model").symlink_to(small_run.parent / "model")
    config = small_run.read_text().replace("name: sums}", "name: sums_of_a_command}")
    (folder / "config.yaml").write_text(config)
    asks = ASKS.partition("body = ")[0].replace('"messages": said', '"messages": said, "max_tokens": 4')
    workflow = {"type": "command", "argv": python(asks, "{prompt}"), "judge": "digits_of_a_command"}
    overrides = [
        "steps=1",
        "batch={groups: 2, episodes: 2}",
        "evaluate.tasks=0",
        "credit.filter=null",
        f"team.workflow={json.dumps(workflow)}",
        f"out={folder / 'runs'}",
    ]
    run = assemble_run(load_run(folder / "config.yaml", overrides))
    run.train(Console(quiet=True))
    events = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    accounts = [one for one in events if one["event"] == "episode_account"]
    assert len(accounts) == 4
    assert all(one["sampled"] == one["delivered"] > 0 for one in accounts)
    assert any(one["event"] == "updated" for one in events)
    assert len(list((run.folder / "commands").glob("*.out"))) == 4
    assert remains() == []


def test_a_placeholder_that_is_none_is_refused_by_name():
    assert Command(argv=("true",), env={"CONFIG": '{"url": "{openai_url}", "n": {"a": 1}}'})
    with pytest.raises(ValidationError, match=r"argv: there is no placeholder \{promt\}.*\{prompt\}"):
        Command(argv=("agent", "{promt}"))
    with pytest.raises(ValidationError, match=r"env\.URL: there is no placeholder \{url\}"):
        Command(argv=("agent",), env={"URL": "{url}"})


def test_the_relay_has_a_port_that_no_agent_expects():
    assert 1024 < RELAY_PORT < 32768, "free for a plain user, and never an outgoing connection's own"
