"""The gateway: processor time per call, short and with a long history, and calls per second on one core.

`flexmarl serve` is a process of its own, on one core, with an engine that answers at once and a durable store; what it
takes is all of it: HTTP, history, rendering, scheduling, rows. The client is on another core, and is not counted.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
from common import parser, report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONDER = """
from flexmarl.simulator.replies import responder


@responder("benchmark")
def benchmark(prompt, rng):
    return f"The answer to this question is {rng.randrange(10)}, as far as I can see."
"""
CONFIG = """
name: gateway
code: [speaks.py]
tasks: {type: jsonl, file: tasks.jsonl, held_out_share: 0.1}
policies:
  solver: {model: model, trainable: false, engine: {type: scripted, name: benchmark, reads: 16, token_s: 1.0e-9}}
team:
  workflow: {type: sequential, agents: [solver]}
  agents: {solver: {policy: solver}}
rollout: {episode_timeout_s: 3600}
gateway: {max_calls: 100000}
"""
TURNS = 50
"""Turns before the one that is measured with a long history."""
CLIENTS = 32
"""Requests that are under way at the same time."""


def write_project(folder: Path) -> None:
    """Config, responder, tasks, and a model's config with a byte-level BPE that was trained on the documentation."""
    texts = [page.read_text("utf-8") for page in (Path(__file__).parents[1] / "docs").rglob("*.md")]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, eos_token=SPECIAL[1])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tokenizer.save_pretrained(folder / "model")
    Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1).save_pretrained(folder / "model")
    (folder / "speaks.py").write_text(RESPONDER)
    rows = [{"prompt": f"question {number}", "reference": ""} for number in range(100)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(CONFIG)


class Gateway:
    """A server that is running, and the processor time that it takes."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "flexmarl", "serve", str(folder / "run.yaml"), f"out={folder / 'runs'}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.announced = json.loads(self.process.stdout.readline())
        self._server = psutil.Process(self.process.pid)
        cores = psutil.Process().cpu_affinity() or []
        for thread in self._server.threads():
            psutil.Process(thread.id).cpu_affinity(cores[:1])
        psutil.Process().cpu_affinity(cores[1:] or cores)

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        times = self._server.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        """Ends the server."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Episode:
    """A client at one seat."""

    def __init__(self, client: httpx2.AsyncClient, begun: dict[str, Any]) -> None:
        seat = begun["seats"]["solver"]
        self._client, self._url = client, f"{seat['openai_url']}/chat/completions"
        self._headers = {"authorization": f"Bearer {seat['key']}"}

    async def ask(self, messages: list[dict[str, str]]) -> str:
        """The reply."""
        answer = await self._client.post(self._url, json={"messages": messages}, headers=self._headers)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]


async def begun(client: httpx2.AsyncClient, gateway: Gateway) -> Episode:
    """A new episode."""
    headers = {"authorization": f"Bearer {gateway.announced['admin_key']}"}
    answer = await client.post(f"{gateway.announced['url']}/episodes", headers=headers, json={})
    answer.raise_for_status()
    return Episode(client, answer.json())


async def short(gateway: Gateway, calls: int) -> tuple[float, float]:
    """Milliseconds of the server's processor per call of 0.4 kB, and calls per second."""
    async with httpx2.AsyncClient(timeout=None) as client:
        episodes = [await begun(client, gateway) for _ in range(CLIENTS // 4)]
        numbers = iter(range(calls))

        async def ask_on(episode: Episode) -> None:
            for number in numbers:
                await episode.ask([{"role": "user", "content": f"{number}: " + "why is that so? " * 22}])

        cpu, began = gateway.cpu_s(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for place in range(CLIENTS):
                tasks.create_task(ask_on(episodes[place % len(episodes)]))
        return 1000 * (gateway.cpu_s() - cpu) / calls, calls / (time.perf_counter() - began)


async def long(gateway: Gateway, calls: int) -> float:
    """Milliseconds of the server's processor per call that follows `TURNS` turns of 100 kB together."""
    async with httpx2.AsyncClient(timeout=None) as client:
        episode, said = await begun(client, gateway), list[dict[str, str]]()
        for turn in range(TURNS):
            said.append({"role": "user", "content": f"{turn}: " + "and what follows from that? " * 70})
            said.append({"role": "assistant", "content": await episode.ask(said)})
        assert 95_000 < len(json.dumps(said)) < 115_000
        cpu = gateway.cpu_s()
        for number in range(calls):
            await episode.ask([*said, {"role": "user", "content": f"And number {number}?"}])
        return 1000 * (gateway.cpu_s() - cpu) / calls


def measured(options: argparse.Namespace) -> tuple[list[tuple[float, float]], list[float]]:
    """(ms, calls per second) of short calls and ms of long ones, for each repeat after a warm-up."""
    with tempfile.TemporaryDirectory() as place:
        write_project(Path(place))
        gateway = Gateway(Path(place))
        try:
            asyncio.run(short(gateway, options.calls // 4))
            shorts = [asyncio.run(short(gateway, options.calls)) for _ in range(options.repeats)]
            longs = [asyncio.run(long(gateway, options.calls // 20)) for _ in range(options.repeats)]
        finally:
            gateway.close()
    return shorts, longs


def main() -> None:
    """Prints the table."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--calls", type=int, default=2000, help="short calls of one repeat (default 2000)")
    chosen = options.parse_args()
    shorts, longs = measured(chosen)
    cpu_ms, rate, long_ms = min(ms for ms, _ in shorts), max(rate for _, rate in shorts), min(longs)
    report(
        "The gateway",
        ("what", "measured"),
        [
            ("processor time of a call of 0.4 kB, best repeat", f"{cpu_ms:.2f} ms"),
            ("calls of 0.4 kB, best repeat", f"{rate:.0f} per second"),
            (f"processor time of turn {TURNS + 1} of a history of 100 kB, best repeat", f"{long_ms:.2f} ms"),
        ],
        {"cpu_ms_short": cpu_ms, "calls_per_s": rate, "cpu_ms_100kB": long_ms},
        as_json=chosen.json,
        wanted={"calls_per_s": 450.0},
        wanted_at_most={"cpu_ms_short": 1.5, "cpu_ms_100kB": 6.0},
    )


if __name__ == "__main__":
    main()
