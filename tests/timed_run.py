"""A run whose engines are timed and move, in any world, and what must be true of it."""

from collections import Counter
from pathlib import Path

from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import RunSettings, load_run
from flexmarl.events.journal import read_run
from flexmarl.events.run_events import ProcessStarted
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Called, InstanceLost, Loaded, Moved
from flexmarl.experience.store_file import read_store

STEPS, CALLS = 2, 2 * 4 * 4
OVERRIDES = [
    *("cluster.threads=1", f"steps={STEPS}", "evaluate.tasks=0", "checkpoint.every=0"),
    *("rollout={inter_query: 4, intra_query: 4}", "credit.filter=null"),
    "team.agents.writer={policy: two, system: write, sampling: {max_tokens: 400}}",
    "team.agents.solver.sampling.max_tokens=400",
    "policies={one: {model: model, instances: 5, engine: {type: timed}}, "
    "two: {model: model, instances: 1, engine: {type: timed}}}",
    "balance={rule: drain_time, poll_s: 0.02, move_s: 0.01}",
    "simulation.costs.default={origin: a test, engine: {slots: 1, decode_s: 2e-3, decode_request_s: 0, move_s: 0.01}}",
    "simulation.replies={solver: {type: lengths, mean: 4}, writer: {type: lengths, mean: 60, shape: exponential}}",
    "pool.max_running=1",
]
"""The writer's replies take fifteen times as long as the solver's, and its policy has a fifth of the instances."""


def play(config: Path, *overrides: str) -> RunFolder:
    """Trains, and checks what is left."""
    folder = train(load_run(config, [*OVERRIDES, *overrides]))
    check(folder)
    return folder


def check(folder: RunFolder) -> None:
    """Asserts that every call was answered once and is in the store, and that instances loaded weights and moved."""
    events = list(read_run(folder.journal))
    calls = [event for event in events if isinstance(event, Called)]
    assert Counter(Counter(call.request for call in calls).values()) == {1: STEPS * CALLS}
    assert {call.finish for call in calls} == {"stop"}
    with read_store(folder.store) as store:
        rows = [row for agent in store.agents for row in store.rows(agent)]
        lengths = {row.sample_id: len(row.values["response_ids"]) for row in rows}
    assert lengths == {call.request: call.sampled_tokens for call in calls}
    moves = [event for event in events if isinstance(event, Moved)]
    assert "two" in {move.to for move in moves}, "witness: instances have moved"
    assert [event for event in events if isinstance(event, Loaded)]
    assert not [event for event in events if isinstance(event, InstanceLost)]


def train(settings: RunSettings) -> RunFolder:
    """Trains, and returns the run's folder."""
    run = assemble_run(settings)
    run.train(Console(quiet=True))
    return RunFolder(run.folder)


def processes(folder: RunFolder) -> list[str]:
    """The kinds of processes that took part."""
    started = [event for event in read_run(folder.journal) if isinstance(event, ProcessStarted)]
    return sorted(event.process.kind for event in started)
