"""Overlap of rollout and training: a step in `microbatch` mode against the same step in `sync` mode.

    python benchmarks/pipeline.py --json

A real run of two agents in the ray world, one process for each of two engines and two trainers. A writer drafts, an
editor remarks, and they go on for as many rounds as the task asks: most tasks ask for one or two, a few for many, so a
step has a long tail in which most of its groups have ended. Nothing sleeps: what a process does is arithmetic of its
model, which is random and cannot end a message early, so that every variant samples the same number of tokens.

    sync               training begins when the step's rollout has ended; one thread per process
    sync, two threads  the same with two in each process: training has the machine to itself then
    microbatch         complete groups train while others play; one thread per process

Steps are measured after two of warm-up, in interleaved rounds. Work is CPU time of engines and of trainers, as the
system counts it; the share hidden is the run's own metric `overlap/training_hidden`.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import yaml
from character_model import save_character_model
from common import parser, report
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.events.journal import read_journal
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_events import ProcessStarted
from flexmarl.events.run_folder import RunFolder

GROUPS, EPISODES, DRAFT, REMARK, SLOTS, WARM_UP = 48, 2, 128, 8, 28, 2
WANTED = {"training_hidden": 0.8}
WANTED_AT_MOST = {"step_time_vs_sync": 0.8}
CODE = """
import random
from flexmarl.agents import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks import task_generator

@task_generator("stories")
def story(seed, index, split):
    # The rounds of 48 consecutive tasks are the same 48 numbers, shuffled: every step has the same work.
    rounds = [1] * 20 + [2] * 14 + [3] * 6 + [4] * 4 + [6] * 2 + [9, 12]
    random.Random(f"{seed}/{index // 48}").shuffle(rounds)
    return Task(input_id=f"{split}-{index}", prompt=f"{index:05d}", reference=str(rounds[index % 48]))

@workflow("write_and_edit")
async def write_and_edit(task: Task, team: Team) -> None:
    remark = task.prompt
    for _ in range(int(task.reference)):
        draft = await team.writer.act(remark[-8:])
        remark = (await team.editor.act(draft.text[-8:])).text
        draft.reward(draft.text.count("7") / len(draft.text))
    team.editor.reward(remark.count("3") / len(remark))
"""


@dataclass(frozen=True)
class Variant:
    """One way to run the step."""

    mode: str
    threads: int = 1


VARIANTS = {
    "sync": Variant("sync"),
    "sync, two threads": Variant("sync", threads=2),
    "microbatch": Variant("microbatch"),
}


@dataclass(frozen=True)
class Measured:
    """What one round of a variant showed."""

    step_s: float
    """Median over the measured steps."""
    hidden: float
    training_by_rollout: float
    """CPU time of the trainers by that of the engines."""


class WorkMeter:
    """Reads the CPU time of engines and trainers of a run, again and again, until they are gone."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._ended = Event()
        self._thread = Thread(target=self._watch, name="work meter")
        self._readings: list[Mapping[str, float]] = []

    def __enter__(self) -> "WorkMeter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def training_by_rollout(self) -> float:
        """Of the work since the warm-up: trainers by engines."""
        first, last = self._readings[0], self._readings[-1]
        work = {role: last[role] - first[role] for role in ("engine", "trainer")}
        return work["trainer"] / work["engine"]

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            if self._folder.metrics.exists() and max(read_metrics(self._folder.metrics), default=0) >= WARM_UP:
                work = {role: seconds for role in ("engine", "trainer") if (seconds := self._seconds(role))}
                if len(work) == 2:
                    self._readings.append(work)

    def _seconds(self, role: str) -> float:
        started = [event for event in read_journal(self._folder.journal) if isinstance(event, ProcessStarted)]
        pids = [event.pid for event in started if event.process.kind == role]
        try:
            times = [psutil.Process(pid).cpu_times() for pid in pids]
        except psutil.NoSuchProcess:
            return 0.0
        return sum(one.user + one.system for one in times)


def settings_of(variant: Variant, folder: Path, steps: int) -> dict[str, Any]:
    """The run's config."""
    policy = {
        "model": "model",
        # A draft is long and an engine has its process to itself: it need not offer the thread to others so often.
        "engine": {
            "type": "embedded",
            "slots": SLOTS,
            "max_len": 192,
            "threads": variant.threads,
            "steps_per_turn": 16,
        },
        "training": {"micro_batch": 16, "optimizer": {"learning_rate": 1e-3}},
    }
    return {
        "name": "pipeline",
        "steps": steps + WARM_UP,
        "out": str(folder / "runs"),
        "code": ["team.py"],
        "mode": variant.mode,
        "cluster": {"backend": "ray", "device": "cpu", "threads": variant.threads},
        "tasks": {"type": "generator", "name": "stories"},
        "policies": {"writer": policy, "editor": policy},
        "team": {
            "workflow": {"type": "custom", "name": "write_and_edit"},
            "agents": {
                "writer": {"policy": "writer", "sampling": {"max_tokens": DRAFT}},
                "editor": {"policy": "editor", "sampling": {"max_tokens": REMARK}},
            },
        },
        "batch": {"groups": GROUPS, "episodes": EPISODES},
        "rollout": {"inter_query": GROUPS, "intra_query": EPISODES},
        "credit": {"estimator": {"type": "grpo"}, "filter": None},
        "evaluate": {"tasks": 0},
        "checkpoint": {"every": 0},
    }


def measure(variant: Variant, folder: Path, steps: int) -> Measured:
    """Runs the variant once."""
    (folder / "run.yaml").write_text(yaml.safe_dump(settings_of(variant, folder, steps)))
    run = assemble_run(load_run(folder / "run.yaml"))
    with WorkMeter(RunFolder(run.folder)) as meter:
        run.train(Console(quiet=True))
    values = read_metrics(run.folder / "metrics.jsonl")
    measured = [values[step] for step in sorted(values) if step > WARM_UP]
    tokens = {step["rollout/tokens"] for step in measured}
    assert len(tokens) == 1, f"the steps sampled different numbers of tokens: {tokens}"
    return Measured(
        step_s=statistics.median(step["time/step_s"] for step in measured),
        hidden=statistics.median(step["overlap/training_hidden"] for step in measured),
        training_by_rollout=meter.training_by_rollout(),
    )


def main() -> None:
    """Runs the variants in turn, prints the table."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=4, help="measured steps per round and variant (default 4)")
    chosen = options.parse_args()
    rounds: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_character_model(folder / "model")
        (folder / "team.py").write_text(CODE)
        for _ in range(chosen.repeats):
            for variant in VARIANTS:
                rounds[variant].append(measure(VARIANTS[variant], folder, chosen.steps))
    ratios = [ours.step_s / sync.step_s for ours, sync in zip(rounds["microbatch"], rounds["sync"], strict=True)]
    report(
        f"One step: {GROUPS} groups x {EPISODES} episodes of 1 to 12 rounds, {chosen.repeats} rounds of {chosen.steps}",
        ["", "step, s (median)", "fastest", "slowest", "training hidden", "training / rollout work"],
        [row(name, measured) for name, measured in rounds.items()],
        {
            "step_time_vs_sync": statistics.median(ratios),
            "training_hidden": statistics.median(one.hidden for one in rounds["microbatch"]),
            "training_by_rollout": statistics.median(one.training_by_rollout for one in rounds["microbatch"]),
        },
        as_json=chosen.json,
        wanted=WANTED,
        wanted_at_most=WANTED_AT_MOST,
    )


def row(name: str, measured: Sequence[Measured]) -> list[str]:
    """One variant in the table."""
    seconds = [one.step_s for one in measured]
    hidden, work = (
        statistics.median(getattr(one, figure) for one in measured) for figure in ("hidden", "training_by_rollout")
    )
    return [name, *(f"{f(seconds):.2f}" for f in (statistics.median, min, max)), f"{hidden:.2f}", f"{work:.2f}"]


if __name__ == "__main__":
    main()
