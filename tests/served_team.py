"""A small team at `flexmarl serve` in a process of its own, and plain HTTP to it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

RESPONDER = """
from flexmarl.simulator.replies import responder


@responder("{name}")
def answer(prompt, rng):
    return "2+2"
"""


@dataclass
class Served:
    """What the command announced, and the process."""

    url: str
    admin_key: str
    run: Path
    process: subprocess.Popen[str]

    def post(self, path: str, key: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON."""
        return asked(f"{self.url}{path}", key, {} if body is None else body)

    def get(self, path: str, key: str) -> tuple[int, Any]:
        return asked(f"{self.url}{path}", key)


def asked(url: str, key: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of a request; without a body, it is GET."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def said(seat: dict[str, str], text: str) -> dict[str, Any]:
    """The reply of a seat to one message, over OpenAI's API."""
    messages = [{"role": "user", "content": text}]
    status, reply = asked(f"{seat['openai_url']}/chat/completions", seat["key"], {"messages": messages})
    assert status == 200, reply
    return reply


@contextmanager
def served(config: Path, *overrides: str, out: Path) -> Iterator[Served]:
    """Serves a config for the length of a block, then sends SIGTERM."""
    command = [sys.executable, "-m", "flexmarl", "serve", str(config), *overrides, f"out={out}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        announced = json.loads(line)
        yield Served(announced["url"], announced["admin_key"], Path(announced["run"]), process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
