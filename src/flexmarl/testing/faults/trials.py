"""Runs many seeds in several processes, adds up the results, and makes tables of them.

consumes     seeds
waits for    worker processes, each of which plays whole runs in virtual time
produces     a tally of faults, reactions and broken laws; its tables, and the commands that repeat a failure
unblocked by a worker that has played its share
"""

import gc
import hashlib
import json
import logging
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flexmarl.events.event import to_json
from flexmarl.testing.faults.fault_plan import DRAWN, PLACED
from flexmarl.testing.faults.laws import LAWS, broken
from flexmarl.testing.faults.lives import live
from flexmarl.testing.faults.mutations import MUTATIONS, Mutation
from flexmarl.testing.faults.schedule import draw
from flexmarl.testing.faults.story import Story
from flexmarl.testing.faults.witness import COMBINATIONS, combined, seen

T = TypeVar("T")
SHARE = 20
"""Number of seeds that a worker plays before it reports. They take a second or two, so the progress bar moves."""
SAID = 500
"""Without a terminal for a progress bar, a line is printed each time that this many seeds are done."""
REPEATED = 50
"""Every seed that this number divides is played twice. Its events must be the same to the last byte."""


@dataclass(slots=True)
class Tally:
    """The results of a set of seeds."""

    seeds: int = 0
    lives: int = 0
    repeated: int = 0
    modes: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    combined: Counter[str] = field(default_factory=Counter)
    """Number of runs in which each of COMBINATIONS came together."""
    ends: Counter[str] = field(default_factory=Counter)
    broken: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    """The reasons, by seed and then by law."""
    seconds: float = 0.0

    def add(self, other: "Tally") -> None:
        """Adds another tally to this one."""
        self.seeds, self.lives = self.seeds + other.seeds, self.lives + other.lives
        self.repeated += other.repeated
        for mine, theirs in (
            (self.modes, other.modes),
            (self.struck, other.struck),
            (self.answered, other.answered),
            (self.combined, other.combined),
            (self.ends, other.ends),
        ):
            mine.update(theirs)
        self.broken |= other.broken

    def rare(self, least: int) -> dict[str, int]:
        """Returns kinds of faults and combinations that were witnessed fewer than `least` times, with the counts."""
        witnessed = {kind.value: self.answered[kind.value] for kind in (*DRAWN, *PLACED)}
        witnessed |= {name: self.combined[name] for name in COMBINATIONS}
        return {name: times for name, times in witnessed.items() if times < least}

    def figures(self) -> dict[str, Any]:
        """Returns the tally as values for JSON."""
        return {
            "seeds": self.seeds,
            "lives": self.lives,
            "repeated": self.repeated,
            "seconds": round(self.seconds, 1),
            "modes": dict(self.modes),
            "struck": dict(self.struck),
            "witnessed": dict(self.answered),
            "combined": dict(self.combined),
            "ends": dict(self.ends),
            "broken": {str(seed): laws for seed, laws in sorted(self.broken.items())},
        }


@dataclass(frozen=True, slots=True)
class Caught:
    """The result of a mutation."""

    name: str
    breaks: str
    seed: int | None
    """The first seed at which a law caught the mutation; None if no law did."""
    laws: Sequence[str] = ()
    because: str = ""


def try_all(seeds: Sequence[int], jobs: int, console: Console, mode: str | None = None) -> Tally:
    """Plays every seed, in `jobs` processes, and prints each broken law when it is found."""
    began, tally = time.perf_counter(), Tally()
    shares = [seeds[at : at + SHARE] for at in range(0, len(seeds), SHARE)]
    for share in _in_processes(partial(_try_share, mode=mode), shares, jobs, console, "seeds"):
        tally.add(share)
        for seed, laws in sorted(share.broken.items()):
            console.print(f"seed {seed} breaks law {', '.join(laws)}: {next(iter(laws.values()))[0]}")
    tally.seconds = time.perf_counter() - began
    return tally


def catch_all(seeds: Sequence[int], jobs: int, console: Console) -> list[Caught]:
    """Plays seeds with each mutation until a law catches it. Returns the results in the order of MUTATIONS."""
    names = [mutation.name for mutation in MUTATIONS]
    found = {one.name: one for one in _in_processes(partial(_catch_named, seeds), names, jobs, console, "mutations")}
    return [found[name] for name in names]


def try_seed(seed: int, mode: str | None = None) -> Tally:
    """Plays one seed and checks all laws."""
    schedule = draw(seed, mode=mode)
    story = live(schedule)
    found = broken(story)
    repeated = seed % REPEATED == 0
    if repeated and digest(live(schedule)) != digest(story):
        found["repeat"] = ["the same seed gave another journal"]
    struck, answered = seen(story)
    return Tally(
        seeds=1,
        lives=len(story.lives),
        repeated=int(repeated),
        modes=Counter([schedule.mode]),
        struck=Counter({kind.value: count for kind, count in struck.items()}),
        answered=Counter({kind.value: count for kind, count in answered.items()}),
        combined=combined(story),
        ends=Counter([type(story.lives[-1].error).__name__ if story.lives[-1].error else "finished"]),
        broken={seed: found} if found else {},
    )


def catch(mutation: Mutation, seeds: Sequence[int]) -> Caught:
    """Plays seeds with a broken rule until a law catches it."""
    for seed in seeds:
        if found := broken(live(draw(seed, mode=mutation.mode), mutation)):
            because = next(iter(found.values()))[0]
            return Caught(mutation.name, mutation.breaks, seed, sorted(found), because)
    return Caught(mutation.name, mutation.breaks, None)


def digest(story: Story) -> str:
    """Returns a hash of all events, without the name of the folder, which differs each time."""
    events = json.dumps([to_json(event) for event in story.events], sort_keys=True).replace(story.folder, "")
    return hashlib.blake2b(events.encode()).hexdigest()


def _try_share(seeds: Sequence[int], *, mode: str | None) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.add(try_seed(seed, mode))
    return tally


def _catch_named(seeds: Sequence[int], name: str) -> Caught:
    return catch(next(mutation for mutation in MUTATIONS if mutation.name == name), seeds)


def _in_processes(work: Any, items: Sequence[Any], jobs: int, console: Console, what: str) -> Iterator[Any]:
    """Does `work` on each item, in `jobs` processes, with a progress bar. Yields results in the order of completion."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")  # A fork copies torch's state, but not its threads.
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ProcessPoolExecutor(jobs, mp_context=context, initializer=_settle) as workers,
    ):
        bar, done = progress.add_task(what, total=sum(map(_size, items))), 0
        futures: dict[Future[Any], int] = {workers.submit(work, item): _size(item) for item in items}
        for future in as_completed(futures):
            progress.advance(bar, futures[future])
            done += futures[future]
            if not console.is_terminal and done // SAID > (done - futures[future]) // SAID:
                console.print(f"{done} of {sum(futures.values())} {what}")
            yield future.result()


def _size(item: Any) -> int:
    return 1 if isinstance(item, str) else len(item)


def _settle() -> None:
    """Prepares a worker: one thread, no garbage collection of imports, no asyncio messages about killed tasks."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def fault_table(tally: Tally) -> Table:
    """Makes the table of faults that struck, faults that were noticed, and laws that held."""
    table = Table(
        title=f"{tally.seeds} runs, {tally.lives} lives, {tally.seconds:.0f} s, {tally.repeated} played twice"
    )
    for name in ("fault", "struck", "witnessed"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind in (*DRAWN, *PLACED):
        table.add_row(kind.value, str(tally.struck[kind.value]), str(tally.answered[kind.value]))
    table.add_section()
    for name in COMBINATIONS:
        table.add_row(name, "", str(tally.combined[name]))
    table.add_section()
    for law in (*LAWS, "repeat"):
        broken = sum(law in laws for laws in tally.broken.values())
        table.add_row(f"law {law}", str(tally.seeds), f"{broken} broken" if broken else "held")
    return table


def failure_lines(tally: Tally, most: int = 10) -> Iterator[str]:
    """Yields the first failures, each with the command that plays it again."""
    for seed, laws in sorted(tally.broken.items())[:most]:
        for law, because in laws.items():
            yield f"seed {seed} breaks law {law}: {because[0]}"
        yield f"    again: python -m flexmarl.testing.faults --seeds {seed}:{seed + 1} --jobs 1"


def mutation_table(caught: Sequence[Caught]) -> Table:
    """Makes the table of mutations, and of the laws that caught each one."""
    table = Table(title="rules broken on purpose")
    for name in ("mutation", "what it breaks", "seed", "laws", "the first word of it"):
        table.add_column(name)
    for one in caught:
        seed = "NOT CAUGHT" if one.seed is None else str(one.seed)
        table.add_row(one.name, one.breaks, seed, ", ".join(one.laws), one.because)
    return table
