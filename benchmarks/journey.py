"""How many files of the package a reader passes on the two journeys that matter, counted while they are made.

    python benchmarks/journey.py --json
    python benchmarks/journey.py --json --before ../another/checkout

A tiny team trains in this process (`cluster.backend: inline`) while a profile hook notes every function of the package
that runs, in every thread:

    tokens    from the first `Seat.act` of a training step to the first `backward()`
    weights   from `step` of the trainer until the pool has acknowledged the version, and from the first request that
              an engine gets afterwards until its core has sampled a token; not what the team does in between

Two counts of each journey:

    files_...       files that the tokens or the weights run through: a function there is given them, holds or returns
                    them. Tokens: ids, texts and encoded rows that hold the call's prompt or reply, records of them, and
                    the tensors that engine and trainer compute from them. Weights: tensors, modules, object keys
    files_..._all   files any of whose functions run in the span, in any task and thread: rules that see ids and counts
                    only, rows that are marked, journal, metrics and screen

`--before` counts the same in another checkout, in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import yaml
from character_model import save_character_model
from common import parser, report
from rich.console import Console

import flexmarl
from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run

PACKAGE = str(Path(next(iter(flexmarl.__path__))).resolve())
FIGURES = {
    "tokens": "files_tokens",
    "weights": "files_weights",
    "tokens_all": "files_tokens_all",
    "weights_all": "files_weights_all",
}
WANTED_AT_MOST = {"files_tokens": 45, "files_weights": 12}

CODE = """
from flexmarl.agents import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks import task_generator

@task_generator("digits")
def digit(seed, index, split):
    return Task(input_id=f"{split}-{index}", prompt=f"{index:04d}", reference="7")

@workflow("say_a_digit")
async def say_a_digit(task: Task, team: Team) -> None:
    reply = await team.writer.act("Say any number of digits: " + task.prompt)
    reply.reward(sum(map(ord, reply.text)) % 7)
"""
CONFIG = {
    "name": "journey",
    "steps": 2,
    "code": ["team.py"],
    "cluster": {"backend": "inline", "threads": 1},
    "tasks": {"type": "generator", "name": "digits"},
    "policies": {
        "writer": {
            "model": "model",
            "engine": {"type": "embedded", "slots": 4, "max_len": 64},
            "training": {"micro_batch": 8},
        }
    },
    "team": {
        "workflow": {"type": "custom", "name": "say_a_digit"},
        "agents": {"writer": {"policy": "writer", "sampling": {"max_tokens": 8}}},
    },
    "batch": {"groups": 1, "episodes": 8},
    "evaluate": {"tasks": 0},
    "checkpoint": {"every": 0},
}


OPENS = {"Seat.act": "tokens", "SingleProcessTrainer.step": "weights", "EmbeddedEngine.generate": "weights"}
"""Function -> the span that its call opens. `generate` counts once a version has been acknowledged."""
CLOSES = {"Tensor.backward": "tokens", "Versions.acknowledged": "weights", "EngineCore.step": "weights"}
"""Function -> the span that ends with its call, or, for `EngineCore.step`, with its return."""


PROMPT = "number of digits"
"""In every prompt of the run, and nowhere else."""
RECORDS = {"GenerationRequest", "Generation", "Turn", "Sample", "MicroBatch"}
"""Classes of the package whose objects hold tokens."""
LOOKED_AT = 64
"""Elements of a collection that are looked at, and levels of nesting 4: a list of rows is known by its first ones."""


def holds_tokens(value: Any, depth: int = 4) -> bool:
    """Whether tokens of a call are in the value; what objects other than records refer to is not looked at."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return bool(np.issubdtype(value.dtype, np.int32)) if isinstance(value, np.ndarray) else value.numel() > 0
    if isinstance(value, str):
        return PROMPT in value
    if isinstance(value, bytes):
        return PROMPT.encode() in value
    if type(value).__name__ in RECORDS:
        return True
    return any(holds_tokens(inner, depth - 1) for inner in _parts(value)) if depth else False


def holds_weights(value: Any, depth: int = 4) -> bool:
    """Whether weights, or where they are to be found, are in the value."""
    if isinstance(value, torch.Tensor | torch.nn.Module | torch.optim.Optimizer):
        return True
    if isinstance(value, str):
        return value.startswith("weights/")  # an object key
    return any(holds_weights(inner, depth - 1) for inner in _parts(value)) if depth else False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [each for pair in islice(value.items(), LOOKED_AT) for each in pair]
    if isinstance(value, list | tuple | set | frozenset):
        return islice(value, LOOKED_AT)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return ()


HOLDS = {"tokens": holds_tokens, "weights": holds_weights}


class Journeys:
    """Notes the files of the package whose functions run in a span; a span opens and closes at calls of functions."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {"tokens": [], "weights": [], "tokens_all": [], "weights_all": []}
        """Files of each journey, in the order in which they are first entered; and all that run meanwhile."""
        self._open: set[str] = set()
        self._acknowledged = False
        self._ended: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """The profile hook (`sys.setprofile`)."""
        if event == "call":
            self._called(frame.f_code)
        elif event == "return":
            self._returned(frame, argument)
            if frame.f_code.co_qualname == "EngineCore.step" and self._acknowledged:
                self._close("weights")

    def _called(self, code: CodeType) -> None:
        name = code.co_qualname
        span = OPENS.get(name)
        if span and span not in self._ended and (name != "EmbeddedEngine.generate" or self._acknowledged):
            self._open.add(span)
        if self._open and code.co_filename.startswith(PACKAGE) and not name.startswith("<module>"):
            for journey in self._open:
                self._note(f"{journey}_all", code)
        if name == "Tensor.backward":
            self._close("tokens")
        elif name == "Versions.acknowledged" and "weights" in self._open:
            self._acknowledged = True
            self._open.discard("weights")

    def _returned(self, frame: FrameType, value: object) -> None:
        """A function or coroutine returns, or waits: all that it has been given and has made is in its frame."""
        if self._open and frame.f_code.co_filename.startswith(PACKAGE):
            for journey in self._open:
                if any(map(HOLDS[journey], [value, *frame.f_locals.values()])):
                    self._note(journey, frame.f_code)

    def _note(self, journey: str, code: CodeType) -> None:
        file = code.co_filename.removeprefix(PACKAGE).lstrip("/")
        if file not in self.files[journey]:
            self.files[journey].append(file)

    def _close(self, span: str) -> None:
        if span in self._open:
            self._open.discard(span)
            self._ended.add(span)

    def check(self) -> None:
        """Raises RuntimeError where a journey has not come to its end: a function of the marks has another name now."""
        if missing := {"tokens", "weights"} - self._ended:
            raise RuntimeError(f"no end of {', '.join(sorted(missing))}: is each of these functions there? {marks()}")


def marks() -> str:
    """The functions at which spans open and close."""
    return ", ".join(sorted({*OPENS, *CLOSES}))


def walk() -> dict[str, list[str]]:
    """Trains for two steps under the hook; returns the files of each journey."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_character_model(folder / "model")
        (folder / "team.py").write_text(CODE, encoding="utf-8")
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(CONFIG | {"out": str(folder / "runs")}), encoding="utf-8")
        run = assemble_run(load_run(config))
        journeys = Journeys()
        threading.setprofile(journeys)
        sys.setprofile(journeys)
        try:
            run.train(Console(quiet=True))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    journeys.check()
    return journeys.files


def walk_in(checkout: Path) -> dict[str, list[str]]:
    """The same of another checkout's package, in a process of its own."""
    command = [sys.executable, __file__, "--files"]
    paths = os.pathsep.join([str(checkout.resolve() / "src"), str(Path(__file__).parent)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def rows(now: Mapping[str, Sequence[str]], before: Mapping[str, Sequence[str]] | None) -> list[list[str]]:
    """A row for each journey and folder of the package: files now, files before."""
    table = []
    for journey, files in now.items():
        earlier = before[journey] if before else []
        table.append([journey, "", str(len(files)), str(len(earlier)) if before else ""])
        for folder in sorted({file.split("/")[0] for file in [*files, *earlier]}):
            counts = [sum(file.split("/")[0] == folder for file in some) for some in (files, earlier)]
            table.append(["", folder, str(counts[0]), str(counts[1]) if before else ""])
    return table


def main() -> None:
    """Walks both journeys, prints the table."""
    options = parser(__doc__)
    options.add_argument("--files", action="store_true", help="print the files of both journeys as JSON, nothing else")
    options.add_argument("--before", type=Path, help="another checkout, to be counted beside this one")
    chosen = options.parse_args()
    now = walk()
    if chosen.files:
        print(json.dumps(now))
        return
    before = walk_in(chosen.before) if chosen.before else None
    figures = {FIGURES[journey]: float(len(files)) for journey, files in now.items()}
    if before:
        figures |= {f"{FIGURES[journey]}_before": float(len(files)) for journey, files in before.items()}
    report(
        "Files of the package on the way",
        ["journey", "folder", "files", "before"],
        rows(now, before),
        figures,
        as_json=chosen.json,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
