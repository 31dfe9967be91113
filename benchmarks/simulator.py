"""What simulating costs: one step of 1 000 instances and 100 agents, with 1 000, 10 000 and 100 000 turns, on one core.

    python benchmarks/simulator.py --json

A synthetic workload on modelled devices: the production loops and rules, the store, the journal and every agent's
conversation are those of any run; only the devices are not there. Each size is played in a process of its own.

    seconds_100k_turns   CPU seconds of the largest step
    gib                  peak memory of its process
    growth               CPU time per turn at 100 000 turns by that at 1 000, by log 100 000 / log 1 000
"""

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from common import parser, report

from flexmarl.assemble.simulation import simulate
from flexmarl.config import load_run
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Called

AGENTS, INSTANCES, EPISODES, TURNS = 100, 10, 10, 20
"""Agents with a policy each; instances of each; episodes of a task; turns of an episode."""
SIZES = (1_000, 10_000, 100_000)
WANTED_AT_MOST = {"seconds_100k_turns": 60.0, "gib": 2.0, "growth": 1.0}


@dataclass(frozen=True)
class Played:
    """One simulated step."""

    turns: int
    """Calls in its journal."""
    seconds: float
    """CPU time, from settings to the end of the run."""
    gib: float
    virtual_s: float

    @property
    def ms_per_turn(self) -> float:
        """CPU time of a turn."""
        return 1000 * self.seconds / self.turns


def settings_of(turns: int, out: Path) -> dict[str, Any]:
    """A config whose one step has so many turns."""
    agents = [f"agent{number:02d}" for number in range(AGENTS)]
    groups = turns // (EPISODES * TURNS)
    return {
        "name": f"turns-{turns}",
        "steps": 1,
        "out": str(out),
        "cluster": {"backend": "simulated"},
        "tasks": {
            "type": "generator",
            "name": "workload",
            "params": {"agents": dict.fromkeys(agents, 1.0), "turns_min": TURNS, "turns_max": TURNS},
        },
        "policies": {agent: {"model": "none", "instances": INSTANCES} for agent in agents},
        "team": {
            "workflow": {"type": "custom", "name": "call_graph"},
            "agents": {agent: {"policy": agent, "sampling": {"max_tokens": 8192}} for agent in agents},
        },
        "batch": {"groups": groups, "episodes": EPISODES},
        "rollout": {
            "inter_query": groups,
            "intra_query": EPISODES,
            "episode_timeout_s": 1e6,
            "call_timeout_s": 1e6,
        },
        "credit": {"filter": None},
        "evaluate": {"tasks": 0},
        "simulation": {"replies": {"default": {"type": "asked"}}, "costs": {"default": "paper_14b"}},
    }


def play(turns: int) -> Played:
    """Simulates the step in this process."""
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "run.yaml"
        config.write_text(yaml.safe_dump(settings_of(turns, Path(name) / "runs")))
        began = time.process_time()
        folder = RunFolder(simulate(load_run(config)))
        seconds = time.process_time() - began
        calls, ended = 0, 0.0
        for event in read_run(folder.journal):
            calls += isinstance(event, Called)
            ended = event.t
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Played(turns=calls, seconds=seconds, gib=peak_kib / 2**20, virtual_s=ended)


def play_apart(turns: int) -> Played:
    """The same in a new process, whose peak memory is that of this step."""
    done = subprocess.run(
        [sys.executable, __file__, "--play", str(turns)], check=True, capture_output=True, text=True
    ).stdout
    return Played(**json.loads(done.splitlines()[-1]))


def main() -> None:
    """Plays every size, fastest of the repeats; prints the table."""
    options = parser(__doc__)
    options.add_argument("--play", type=int, metavar="TURNS", help="play one size in this process, print it as JSON")
    options.set_defaults(repeats=1)
    chosen = options.parse_args()
    if chosen.play:
        print(json.dumps(asdict(play(chosen.play))))
        return
    played = [min((play_apart(size) for _ in range(chosen.repeats)), key=lambda one: one.seconds) for size in SIZES]
    first, last = played[0], played[-1]
    report(
        f"One step of {AGENTS * INSTANCES} instances and {AGENTS} agents",
        ["turns", "CPU seconds", "ms per turn", "peak GiB", "virtual seconds"],
        [
            [f"{one.turns:,}", f"{one.seconds:.1f}", f"{one.ms_per_turn:.3f}", f"{one.gib:.2f}", f"{one.virtual_s:.0f}"]
            for one in played
        ],
        {
            "seconds_100k_turns": last.seconds,
            "gib": last.gib,
            "growth": last.ms_per_turn / first.ms_per_turn / (math.log(last.turns) / math.log(first.turns)),
        },
        as_json=chosen.json,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
