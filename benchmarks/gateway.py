"""The gateway: processor time per call, short and with a long history, and calls per second on one core.

`flexmarl serve` is a process of its own, on one core, with an engine that answers at once and a durable store; what it
takes is all of it: HTTP, history, rendering, scheduling, rows. The client is on another core, and is not counted.

With `--vllm` and `--litellm`, other servers get the same short calls in turn with it, on the same core: vLLM's
frontend, whose engine answers at once too, and LiteLLM's proxy before a server that answers at once
(gateway_rivals.py). Neither keeps a row. `make bench-gateway` makes their environments.
"""

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

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
  solver: {model: model, trainable: false, engine: {type: scripted, name: benchmark, reads: 16, token_s: {token_s}}}
team:
  workflow: {type: sequential, agents: [solver]}
  agents: {solver: {policy: solver}}
rollout: {episode_timeout_s: 3600}
gateway: {max_calls: 100000}
"""
LITELLM = """
model_list:
- model_name: solver
  litellm_params: {{model: openai/solver, api_base: "{url}", api_key: none}}
litellm_settings: {{telemetry: false}}
general_settings: {{master_key: {key}}}
"""
VERSUS = {"vllm": "vs_vllm_frontend", "litellm": "vs_litellm"}
FIRST_CORE = (psutil.Process().cpu_affinity() or [0])[:1]
RIVALS = Path(__file__).with_name("gateway_rivals.py")
KEY = f"sk-{secrets.token_hex(16)}"
"""The key of other servers: LiteLLM's does not begin without one."""
START_S = 300
"""Most seconds that a server takes to begin. vLLM imports for a minute on a busy machine."""
TOKEN_S = {"run.yaml": 1e-9, "slow.yaml": 5.0, "spoken.yaml": 0.05}
"""Seconds per token of each config's engine."""
FIRST_TEXTS = 60
"""Streams, one after the other, whose first text is waited for."""
STREAMS = 1000
"""Streams that wait at the same time for a reply that does not come."""
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
    named = {"architectures": ["Qwen3ForCausalLM"], "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, **named)
    config.save_pretrained(folder / "model")
    (folder / "speaks.py").write_text(RESPONDER)
    rows = [{"prompt": f"question {number}", "reference": ""} for number in range(100)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, token_s in TOKEN_S.items():
        (folder / name).write_text(CONFIG.replace("{token_s}", str(token_s)))


class Seat:
    """A client of one model at one server."""

    def __init__(self, client: httpx2.AsyncClient, url: str, key: str) -> None:
        self._client, self._url = client, f"{url}/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"}

    async def ask(self, messages: list[dict[str, str]]) -> str:
        """The reply."""
        body = {"model": "solver", "messages": messages}
        answer = await self._client.post(self._url, json=body, headers=self._headers)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]

    async def wait(self, text: str, lives: asyncio.Semaphore) -> None:
        """Asks for a stream, and stays for ever. Releases `lives` at its first sign of life."""
        body = {"model": "solver", "messages": [{"role": "user", "content": text}], "stream": True}
        async with self._client.stream("POST", self._url, json=body, headers=self._headers) as answer:
            answer.raise_for_status()
            async for part in answer.aiter_bytes():
                if part:
                    lives.release()
                    break
            await asyncio.Event().wait()

    async def first_text_s(self, text: str) -> float:
        """Seconds until the first text of a stream, which it then leaves."""
        body = {"model": "solver", "messages": [{"role": "user", "content": text}], "stream": True}
        began = time.perf_counter()
        async with self._client.stream("POST", self._url, json=body, headers=self._headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if '"content": "' in line and '"content": ""' not in line:
                    return time.perf_counter() - began
        raise SystemExit("a stream ended without text")


class Server(Protocol):
    """A server that is running."""

    def cpu_s(self) -> float:
        """Processor seconds so far."""
        ...

    async def seat(self, client: httpx2.AsyncClient) -> Seat:
        """A new client of it."""
        ...


class Running:
    """A process, and the processor time that it takes."""

    def __init__(self, command: Sequence[str], **more: Any) -> None:
        self.process = subprocess.Popen(command, **more)
        self._all = psutil.Process(self.process.pid)

    def on_first_core(self) -> None:
        """Leaves the others to this process."""
        cores = psutil.Process().cpu_affinity() or []
        for thread in self._all.threads():
            psutil.Process(thread.id).cpu_affinity(FIRST_CORE)
        psutil.Process().cpu_affinity([core for core in cores if core not in FIRST_CORE] or cores)

    def cpu_s(self) -> float:
        """Processor seconds so far, of its children too."""
        times = [one.cpu_times() for one in (self._all, *self._all.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def resident_mib(self) -> float:
        """Its memory."""
        return self._all.memory_info().rss / 2**20

    def close(self) -> None:
        """Ends it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Gateway(Running):
    """`flexmarl serve`."""

    def __init__(self, folder: Path, config: str = "run.yaml") -> None:
        command = [sys.executable, "-m", "flexmarl", "serve", str(folder / config), f"out={folder / 'runs'}"]
        super().__init__(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.announced = json.loads(self.process.stdout.readline())
        self.on_first_core()

    async def seat(self, client: httpx2.AsyncClient) -> Seat:
        """That of a new episode."""
        headers = {"authorization": f"Bearer {self.announced['admin_key']}"}
        answer = await client.post(f"{self.announced['url']}/episodes", headers=headers, json={})
        answer.raise_for_status()
        seat = answer.json()["seats"]["solver"]
        return Seat(client, seat["openai_url"], seat["key"])


class Rival(Running):
    """Another server. `command` ends with its port. What it prints is in a file beside the project."""

    def __init__(self, folder: Path, *command: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        with open(folder / f"{port}.log", "w") as log:
            super().__init__([*command, str(port)], env=os.environ | offline, stdout=log, stderr=log)
        if not asyncio.run(self._answers()):
            raise SystemExit(f"{command} does not answer:\n{(folder / f'{port}.log').read_text()[-4000:]}")

    async def seat(self, client: httpx2.AsyncClient) -> Seat:
        """One more client of the same URL."""
        return Seat(client, self.url, KEY)

    async def _answers(self) -> bool:
        """Waits for its first answer."""
        async with httpx2.AsyncClient(timeout=None) as client:
            for _ in range(START_S):
                try:
                    await (await self.seat(client)).ask([{"role": "user", "content": "Are you there?"}])
                    return True
                except httpx2.HTTPError:
                    if self.process.poll() is not None:
                        break
                    await asyncio.sleep(1)
        return False


async def short(server: Server, calls: int) -> tuple[float, float]:
    """Milliseconds of the server's processor per call of 0.4 kB, and calls per second."""
    async with httpx2.AsyncClient(timeout=None) as client:
        seats = [await server.seat(client) for _ in range(CLIENTS // 4)]
        numbers = iter(range(calls))

        async def ask_on(seat: Seat) -> None:
            for number in numbers:
                await seat.ask([{"role": "user", "content": f"{number}: " + "why is that so? " * 22}])

        cpu, began = server.cpu_s(), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for place in range(CLIENTS):
                tasks.create_task(ask_on(seats[place % len(seats)]))
        return 1000 * (server.cpu_s() - cpu) / calls, calls / (time.perf_counter() - began)


async def long(server: Server, calls: int) -> float:
    """Milliseconds of the server's processor per call that follows `TURNS` turns of 100 kB together."""
    async with httpx2.AsyncClient(timeout=None) as client:
        seat, said = await server.seat(client), list[dict[str, str]]()
        for turn in range(TURNS):
            said.append({"role": "user", "content": f"{turn}: " + "and what follows from that? " * 70})
            said.append({"role": "assistant", "content": await seat.ask(said)})
        assert 95_000 < len(json.dumps(said)) < 115_000
        cpu = server.cpu_s()
        for number in range(calls):
            await seat.ask([*said, {"role": "user", "content": f"And number {number}?"}])
        return 1000 * (server.cpu_s() - cpu) / calls


async def first_text(gateway: Gateway, token_s: float) -> float:
    """Milliseconds from the engine's first token to the client's first text, the request's way included; median."""
    async with httpx2.AsyncClient(timeout=None) as client:
        seat = await gateway.seat(client)
        waits = [await seat.first_text_s(f"{number}: why is that so?") for number in range(FIRST_TEXTS)]
    return 1000 * (statistics.median(waits) - token_s)


async def idle(gateway: Gateway) -> float:
    """MiB that the gateway grows by for `STREAMS` streams that wait, 0.4 kB each."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(timeout=None, limits=limits) as client:
        seats = [await gateway.seat(client) for _ in range(CLIENTS)]
        live = asyncio.Semaphore(0)
        grown = list[float]()
        for streams in (CLIENTS, STREAMS):  # The first ones load what a first stream loads.
            before = gateway.resident_mib()
            waiting = [
                asyncio.create_task(seats[place % CLIENTS].wait(f"{place}: " + "why is that so? " * 22, live))
                for place in range(streams)
            ]
            for _ in waiting:
                await live.acquire()
            grown.append(gateway.resident_mib() - before)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    return grown[-1]


def rivals(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Rival]:
    """The other servers that are asked for."""

    def begun(*command: str) -> Rival:
        rival = Rival(folder, *command)
        stack.callback(rival.close)
        return rival

    found: dict[str, Rival] = {}
    if options.vllm:
        found["vllm"] = begun(options.vllm, str(RIVALS), "vllm", str(folder / "model"))
    if options.litellm:
        answers = begun(sys.executable, str(RIVALS), "answers")
        (folder / "litellm.yaml").write_text(LITELLM.format(url=answers.url, key=KEY))
        run = "from litellm import run_server; run_server()"
        place = ("--config", str(folder / "litellm.yaml"), "--host", "127.0.0.1")
        found["litellm"] = begun(options.litellm, "-c", run, *place, "--port")
    for rival in found.values():
        rival.on_first_core()
    return found


def measured(options: argparse.Namespace) -> tuple[dict[str, list[tuple[float, float]]], list[float], float, float]:
    """(ms, calls per second) of short calls by server, and ms of long ones, for each repeat after a warm-up; ms until
    the first text of a stream; MiB of idle streams.
    """
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        write_project(Path(place))
        servers: dict[str, Any] = dict(rivals(options, Path(place), stack))
        gateway = servers["ours"] = Gateway(Path(place))
        stack.callback(gateway.close)
        for server in servers.values():
            asyncio.run(short(server, options.calls // 4))
        shorts: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for _ in range(options.repeats):
            for name, server in servers.items():
                shorts[name].append(asyncio.run(short(server, options.calls)))
        longs = [asyncio.run(long(gateway, options.calls // 20)) for _ in range(options.repeats)]
        spoken = Gateway(Path(place), "spoken.yaml")
        stack.callback(spoken.close)
        first = asyncio.run(first_text(spoken, TOKEN_S["spoken.yaml"]))
        slow = Gateway(Path(place), "slow.yaml")
        stack.callback(slow.close)
        streams = asyncio.run(idle(slow))
    return shorts, longs, first, streams


def main() -> None:
    """Prints the table."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--calls", type=int, default=2000, help="short calls of one repeat (default 2000)")
    options.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM: its frontend is measured too")
    options.add_argument("--litellm", metavar="PYTHON", help="one that has litellm[proxy]: its proxy is measured too")
    chosen = options.parse_args()
    shorts, longs, first, streams = measured(chosen)
    cpu_ms = {name: min(ms for ms, _ in of_one) for name, of_one in shorts.items()}
    ours, rate, long_ms = cpu_ms.pop("ours"), max(rate for _, rate in shorts["ours"]), min(longs)
    report(
        "The gateway",
        ("what", "measured"),
        [
            ("processor time of a call of 0.4 kB, best repeat", f"{ours:.2f} ms"),
            *((f"the same of {name}", f"{ms:.2f} ms") for name, ms in cpu_ms.items()),
            ("calls of 0.4 kB, best repeat", f"{rate:.0f} per second"),
            (f"processor time of turn {TURNS + 1} of a history of 100 kB, best repeat", f"{long_ms:.2f} ms"),
            ("first text of a stream behind the engine's first token, median", f"{first:.1f} ms"),
            (f"memory of {STREAMS} streams that wait", f"{streams:.0f} MiB"),
        ],
        {"cpu_ms_short": ours, "calls_per_s": rate, "cpu_ms_100kB": long_ms}
        | {"first_text_ms": first, "idle_streams_mib": streams}
        | {f"cpu_ms_{name}": ms for name, ms in cpu_ms.items()}
        | {VERSUS[name]: ours / ms for name, ms in cpu_ms.items()},
        as_json=chosen.json,
        wanted={"calls_per_s": 450.0},
        wanted_at_most={"cpu_ms_short": 1.5, "cpu_ms_100kB": 6.0, "first_text_ms": 30.0, "idle_streams_mib": 95.0}
        | {"vs_vllm_frontend": 0.75},
    )


if __name__ == "__main__":
    main()
