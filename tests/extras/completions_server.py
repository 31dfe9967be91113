"""A server with OpenAI's completions API as vLLM extends it by token ids, on real sockets, without a model."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN_S = 0.005


def text_of(ids: list[int]) -> str:
    return "".join(chr(ord("a") + id % 26) for id in ids)


def sampled(seed: int, position: int) -> int:
    return hashlib.blake2b(f"{seed}/{position}".encode()).digest()[0]


@dataclass
class Told:
    """The way in which the server answers, and what it was asked."""

    key: str = ""
    statuses: list[int] = field(default_factory=list)
    """Of the next answers to completions, before it serves."""
    speaks_ids: bool = True
    hangs_up_after: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    """Callers that hung up."""


class Handler(BaseHTTPRequestHandler):
    told: Told

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self._admits():
            self._answer(200, {"object": "list", "data": [{"id": "judge", "object": "model"}]})

    def do_POST(self) -> None:
        if not self._admits():
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.told.bodies.append(body)
        if self.told.statuses:
            self._answer(self.told.statuses.pop(0), {"error": {"message": "busy"}})
        elif not body["prompt"]:
            self._answer(400, {"error": {"message": "the prompt must not be empty"}})
        else:
            self._stream(body)

    def _admits(self) -> bool:
        if self.told.key and self.headers["Authorization"] != f"Bearer {self.told.key}":
            self._answer(401, {"error": {"message": f"bad key: {self.headers['Authorization']}"}})
            return False
        return True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Retry-After", "0.01")
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        ids: list[int] = []
        try:
            while True:
                time.sleep(TOKEN_S)
                if len(ids) == self.told.hangs_up_after:
                    self.connection.close()
                    return
                ids.append(sampled(body["seed"], len(ids)))
                stopped = ids[-1] in body["stop_token_ids"] or any(
                    stop in text_of(ids) for stop in body.get("stop") or []
                )
                finish = "stop" if stopped else "length" if len(ids) == body["max_tokens"] else None
                choice: dict[str, Any] = {"index": 0, "text": text_of(ids[-1:]), "finish_reason": finish}
                choice["logprobs"] = {"token_logprobs": [-1.0 - ids[-1] / 256]}
                if self.told.speaks_ids:
                    choice["token_ids"] = ids[-1:]
                self._event(
                    {"id": "c", "object": "text_completion", "created": 1, "model": "judge", "choices": [choice]}
                )
                if finish:
                    self.wfile.write(b"data: [DONE]\n\n")
                    return
        except OSError:
            self.told.left += 1

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def completions_server(told: Told) -> Iterator[str]:
    """Serves for the length of a block; yields the URL of the API."""
    handler = type("TheHandler", (Handler,), {"told": told})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
