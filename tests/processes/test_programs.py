"""A run whose seats a program plays, over real sockets, in a process of its own."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

import flexmarl
from flexmarl.assemble.commands import assemble_run
from flexmarl.cli import app
from flexmarl.config import load_run
from flexmarl.errors import FlexmarlError
from tests.program_of_a_run import OVERRIDES, PROGRAM

STEPS = 3
REPEATED = (
    "deterministic=true",
    "cluster.threads=1",
    f"steps={STEPS}",
    "batch={groups: 2, episodes: 4}",
    "evaluate.tasks=0",
    "checkpoint={every: 1, keep: 9}",
)
KILLED = """
import os, signal, sys
from pathlib import Path
import flexmarl
from flexmarl.config import load_run
from flexmarl.events.training_events import Published

def kill(event):
    if event.version == 2:
        os.kill(os.getpid(), signal.SIGKILL)

flexmarl.train(load_run(Path(sys.argv[1]), sys.argv[2:]), on={Published: kill}, show=False)
"""
SMALL = ("steps=1", "batch={groups: 2, episodes: 2}", "evaluate.tasks=2")


@pytest.fixture(scope="module")
def folder(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs") / "team"
    shutil.copytree(small_run.parent, made)
    renamed = (made / "tasks.py").read_text()
    for name in ("sums", "echo", "talk"):
        renamed = renamed.replace(f'"{name}"', f'"{name}_of_programs"')
    (made / "tasks.py").write_text(renamed)
    config = (made / small_run.name).read_text().replace("name: sums}", "name: sums_of_programs}")
    (made / "config.yaml").write_text(config)
    (made / "program.py").write_text(PROGRAM)
    return made


def trained(folder: Path, *overrides: str) -> list[dict]:
    run = assemble_run(load_run(folder / "config.yaml", [*SMALL, *OVERRIDES, *overrides, f"out={folder / 'runs'}"]))
    try:
        run.train(Console(quiet=True))
    finally:
        lines = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
    return lines


def test_a_policy_learns_from_a_program_and_every_token_is_accounted_for(folder: Path) -> None:
    events = trained(folder)
    accounts = [event for event in events if event["event"] == "episode_account"]
    played = [event for event in accounts if event.get("purpose", "training") == "training"]
    assert len(played) == 4
    for account in played:
        assert account["continuity"] == {"root": 1, "extends": 1, "rendered": 1}
        assert account["sampled"] == account["delivered"]
    assert any(event["event"] == "updated" for event in events)
    shown = CliRunner().invoke(app, ["show", str(newest(folder)), "--step", "1", "--limit", "1"]).output
    tokens = next(one["sampled"] for one in played if f"episode {one['episode']} " in shown)
    prompts = "prompts: 1 root, 1 extends, 1 rendered (1 foreign reply)"
    assert f"gateway: 3 calls, {tokens} tokens = {tokens} delivered; {prompts}" in shown
    for told in ("prompt extends, lane 0, thread 0, chat;", "prompt rendered (foreign reply), lane 0"):
        assert told in shown


def test_two_policies_learn_from_a_program_and_a_frozen_third_seat_answers_it_and_is_never_trained(
    folder: Path,
) -> None:
    policy = "{model: model, engine: {type: embedded, slots: 16, max_len: 64}"
    seats = {"solver": "one", "verifier": "two", "referee": "fixed"}
    events = trained(
        folder,
        f"policies.two={policy}, training: {{micro_batch: 4, optimizer: {{learning_rate: 1e-2}}}}}}",
        f"policies.fixed={policy}, trainable: false}}",
        *(f"team.agents.{seat}={{policy: {name}, sampling: {{max_tokens: 8}}}}" for seat, name in seats.items()),
        "team.workflow.name=asks_every_seat",
        "steps=2",
        "batch.episodes=4",
    )
    updated = [event["policy"] for event in events if event["event"] == "updated"]
    assert sorted(updated) == ["one", "one", "two", "two"]
    said = CliRunner().invoke(app, ["show", str(newest(folder)), "--json", "--limit", "99"]).output
    turns = [turn for line in said.splitlines() for turn in json.loads(line)["turns"]]
    of_seat = {seat: [turn for turn in turns if turn["agent"] == seat] for seat in seats}
    assert {len(each) for each in of_seat.values()} == {2 * 2 * 4}, "witness: each seat answered in every episode"
    for seat in ("solver", "verifier"):
        assert {turn["versions"][0][1] for turn in of_seat[seat]} == {0, 1}
        assert any(turn["state"] == "trained" for turn in of_seat[seat])
    frozen = {(turn["state"], turn["reason"], turn["versions"][0][1]) for turn in of_seat["referee"]}
    assert frozen == {("filtered", "not a trained policy's turn", 0)}
    assert all(turn["reply"]["ids"] for turn in of_seat["referee"])


def newest(folder: Path) -> Path:
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def test_what_a_program_says_of_its_key_is_not_kept(folder: Path) -> None:
    with pytest.raises(FlexmarlError) as failed:
        trained(folder, "team.workflow.name=tells_its_key", "evaluate.tasks=0", "rollout.group_retries=0")
    texts = [path.read_bytes().decode(errors="replace") for path in newest(folder).rglob("*") if path.is_file()]
    because = [
        found for text in [*texts, str(failed.value)] for found in re.findall(r"(\S+) does not work at (\S+)", text)
    ]
    assert because
    assert {(key, re.sub(r":\d+/e/\*\*\*/", "/", url).rstrip('"\\n')) for key, url in because} == {
        ("***", "http://127.0.0.1/solver/v1")
    }


def test_a_program_that_raises_fails_its_episodes_and_the_error_says_where(folder: Path) -> None:
    with pytest.raises(FlexmarlError):
        trained(folder, "team.workflow.name=raises", "evaluate.tasks=0", "rollout.group_retries=0")
    failed = [
        event
        for event in map(json.loads, (newest(folder) / "journal.jsonl").read_text().splitlines())
        if event["event"] == "episode_failed"
    ]
    assert failed
    assert "program 'raises': ValueError: no such tool" in failed[0]["because"]
    assert "program.py" in failed[0]["because"]


def test_a_config_whose_seats_a_program_plays_can_be_checked(folder: Path) -> None:
    checked = CliRunner().invoke(app, ["check", str(folder / "config.yaml"), *SMALL, *OVERRIDES])
    assert checked.exit_code == 0, checked.output
    assert "no task is played here" in " ".join(checked.output.split())


def test_a_run_killed_in_mid_step_ends_with_the_bits_of_an_undisturbed_one(folder: Path) -> None:
    def overrides(out: str) -> list[str]:
        return [*REPEATED, *OVERRIDES, f"out={folder / out}"]

    straight = flexmarl.train(load_run(folder / "config.yaml", overrides("straight")), show=False)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder / "config.yaml"), *overrides("killed")], timeout=120, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    (left,) = (folder / "killed").iterdir()
    resumed = flexmarl.train(left / "config.yaml", resume=left, show=False)
    undisturbed, ended = weights(straight.folder), weights(resumed.folder)
    assert ended == undisturbed
    assert len({*ended.values()}) == STEPS, "witness: every step changes the weights"


def weights(folder: Path) -> dict[str, bytes]:
    """The bytes of all tensors of a run's checkpoints, by checkpoint."""
    return {
        step.name: b"".join(
            tensor.contiguous().view(-1).numpy().tobytes()
            for file in sorted(step.rglob("*weights*.safetensors"))
            for tensor in load_file(file).values()
        )
        for step in sorted((folder / "checkpoints").iterdir())
        if step.is_dir()
    }
