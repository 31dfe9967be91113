"""More policies than places, with real processes: all train in every step, and the bits are those of places for all."""

from pathlib import Path

import psutil
import pytest
from rich.console import Console

import flexmarl
from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.errors import FlexmarlError
from flexmarl.events.journal import read_journal
from flexmarl.events.run_events import ProcessStarted
from flexmarl.events.training_events import MicroBatchDone, Swapped, Updated
from tests.ray.child_run import Left, assert_same

pytestmark = pytest.mark.ray

STEPS, PLACES = 2, 2
SIX = ["one", *(f"p{number}" for number in range(1, 6))]
THREE = SIX[:3]


def team_of(names: list[str]) -> list[str]:
    """Overrides: a policy and an agent of each name."""
    return [
        *("deterministic=true", "cluster.threads=1", f"steps={STEPS}", "batch={groups: 2, episodes: 3}"),
        *("evaluate.tasks=0", "checkpoint={every: 1, keep: 9}"),
        *(
            f"policies.{name}={{model: model, engine: {{type: embedded, slots: 16, max_len: 64}}, "
            "training: {micro_batch: 2, optimizer: {learning_rate: 3e-3}}}"
            for name in names
        ),
        *(
            f"team.agents.a{number}={{policy: {name}, system: write, sampling: {{max_tokens: 6}}}}"
            for number, name in enumerate(names[1:], start=1)
        ),
    ]


SHARED = ["cluster.backend=ray", f"process_groups={{at_once: {PLACES}}}"]


def train(small_run: Path, out: Path, *settings: str) -> Left:
    run = assemble_run(load_run(small_run, [*settings, f"out={out}"]))
    before = psutil.Process().children(recursive=True)
    try:
        run.train(Console(quiet=True))
    finally:
        assert set(psutil.Process().children(recursive=True)) <= set(before), "nothing outlives the run"
    return Left(run.folder)


def test_six_policies_train_on_two_places_as_on_places_of_their_own(small_run: Path, tmp_path: Path) -> None:
    alone = train(small_run, tmp_path / "alone", *team_of(SIX), "cluster.backend=inline")
    shared = train(small_run, tmp_path / "shared", *team_of(SIX), *SHARED)
    assert_same(alone, shared, steps=STEPS)
    events = list(read_journal(shared.path / "journal.jsonl"))
    updated = [(event.policy, event.version) for event in events if isinstance(event, Updated)]
    assert sorted(updated) == sorted((name, version) for name in SIX for version in range(1, STEPS + 1))
    assert all(any(one.policy == name for one in events if isinstance(one, MicroBatchDone)) for name in SIX)
    processes = {event.process for event in events if isinstance(event, ProcessStarted)}
    assert {name for name in processes if name.kind in ("rank", "trainer")} == {f"rank/{n}/0" for n in range(PLACES)}
    swaps = [event for event in events if isinstance(event, Swapped)]
    assert {swap.place for swap in swaps} == {*range(PLACES)}
    assert all(swap.because for swap in swaps)
    there: set[str] = set()
    most = 0
    for swap in swaps:  # In the order of their ends: who resumes has a place until its suspend has ended.
        (there.add if swap.direction == "resume" else there.discard)(swap.policy)
        most = max(most, len(there))
    assert most <= PLACES


def test_a_place_whose_process_is_killed_ends_the_run_and_a_resumed_one_ends_with_the_same_bits(
    small_run: Path, tmp_path: Path
) -> None:
    straight = train(small_run, tmp_path / "straight", *team_of(THREE), "cluster.backend=inline")
    out = tmp_path / "killed"
    victims: dict[str, int] = {}
    witness: list[str] = []

    def started(event: ProcessStarted) -> None:
        victims[event.process] = event.pid

    def kill(event: Updated) -> None:
        if event.version == STEPS and not witness:
            witness.append(event.policy)
            psutil.Process(victims["rank/0/0"]).kill()

    with pytest.raises(FlexmarlError, match=r"rank/0/0.*go on from the last checkpoint with --resume"):
        flexmarl.train(
            load_run(small_run, [*team_of(THREE), f"out={out}", *SHARED]),
            on={ProcessStarted: started, Updated: kill},
            show=False,
        )
    assert witness, "witness: it was killed in the second step"
    (folder,) = out.iterdir()
    flexmarl.train(folder / "config.yaml", resume=folder, show=False)
    assert_same(straight, Left(folder), steps=STEPS)


TOGETHER = [
    "cluster.backend=ray",
    *(
        f"policies.{name}.training={{lora: {{rank: {rank}}}, together: true, micro_batch: 2, "
        "optimizer: {learning_rate: 3e-3}}"
        for rank, name in enumerate(THREE, start=2)
    ),
]


def test_adapters_on_one_base_have_one_process_and_end_with_the_same_bits_when_it_is_killed(
    small_run: Path, tmp_path: Path
) -> None:
    inline = train(small_run, tmp_path / "inline", *team_of(THREE), *TOGETHER, "cluster.backend=inline")
    out, victims, witness = tmp_path / "killed", dict[str, int](), list[str]()

    def started(event: ProcessStarted) -> None:
        victims[event.process] = event.pid

    def kill(event: Updated) -> None:
        if event.version == STEPS and not witness:
            witness.append(event.policy)
            (trainer,) = [pid for process, pid in victims.items() if str(process).startswith("trainer/")]
            psutil.Process(trainer).kill()

    with pytest.raises(FlexmarlError, match=r"policy 'one', .*'p2': the trainer's process|go on from the last check"):
        flexmarl.train(
            load_run(small_run, [*team_of(THREE), *TOGETHER, f"out={out}"]),
            on={ProcessStarted: started, Updated: kill},
            show=False,
        )
    assert witness, "witness: it was killed in the second step"
    (folder,) = out.iterdir()
    flexmarl.train(folder / "config.yaml", resume=folder, show=False)
    assert_same(inline, Left(folder), steps=STEPS)
