"""A run whose seats a running agent plays: a server in a process of its own that calls the seat over HTTP."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run

AGENT = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen


class Agent(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        seat = asked["seats"]["solver"]
        body = json.dumps({"messages": [{"role": "user", "content": asked["task"]["prompt"]}], "max_tokens": 4})
        headers = {"authorization": "Bearer " + seat["key"]}
        with urlopen(Request(seat["openai_url"] + "/chat/completions", body.encode(), headers)) as reply:
            said = json.loads(reply.read())["choices"][0]["message"]["content"]
        text = json.dumps({"answer": said or "", "metrics": {"keys": len(asked), "success": 99}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Agent)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
JUDGE = """
from flexmarl.agents.black_box import judge


@judge("digits_of_a_service")
def digits_of_a_service(task, team, answer, calls):
    for call in calls:
        call.reward(sum(letter.isdigit() for letter in call.text) / 4)
    team.report(success=sum(letter.isdigit() for letter in answer) / 4)
"""


@pytest.fixture
def url() -> Iterator[str]:
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    yield f"http://127.0.0.1:{agent.stdout.readline().strip()}/play"
    agent.kill()
    agent.wait()


def test_a_policy_learns_from_a_running_agent(small_run: Path, tmp_path: Path, url: str) -> None:
    folder = tmp_path / "team"
    shutil.copytree(small_run.parent, folder)
    code = (folder / "tasks.py").read_text()
    for name in ("sums", "echo", "talk"):
        code = code.replace(f'"{name}"', f'"{name}_of_a_service"')
    (folder / "tasks.py").write_text(code + JUDGE)
    config = (folder / small_run.name).read_text().replace("name: sums}", "name: sums_of_a_service}")
    (folder / "config.yaml").write_text(config)
    workflow = f"team.workflow={{type: service, url: '{url}', judge: digits_of_a_service, deadline_s: 60}}"
    small = ("steps=1", "batch={groups: 2, episodes: 4}", "evaluate.tasks=2", "credit.filter=null")
    run = assemble_run(load_run(folder / "config.yaml", [*small, workflow, f"out={folder / 'runs'}"]))
    run.train(Console(quiet=True))
    events = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    played = [one for one in events if one["event"] == "episode_finished"]
    assert {one["metrics"]["keys"] for one in played} == {3.0}, "task, seats, deadline_s"
    assert all(one["metrics"]["success"] <= 1 for one in played), "a service cannot say how good it was"
    accounts = [one for one in events if one["event"] == "episode_account"]
    assert accounts
    assert all(one["sampled"] == one["delivered"] for one in accounts)
    assert any(one["event"] == "updated" for one in events)
