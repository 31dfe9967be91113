"""Law 14: where a guarantee is missing, `check` and `train` end with 2 and name it, before anything of an agent ran."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexmarl.assemble.boxes import check_sandbox_of
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.probe import GUARANTEES, check_guarantees, probe_now
from flexmarl.sandbox.settings import SandboxSettings
from tests.commands import run_commands
from tests.sandbox.conftest import PLAIN, as_plain_user

TOOL = "team.agents.solver.tools=[{type: python}]"
WRAPPER = {
    "no user namespaces": 'echo "bwrap: No permissions to create new namespace, likely because..." >&2; exit 1',
    "no seccomp": (
        'words=""; for word in "$@"; do shift; if [ "$word" = --seccomp ]; then skip=1; '
        'elif [ "$skip" = 1 ]; then skip=0; else set -- "$@" "$word"; fi; done; exec "$BWRAP" "$@"'
    ),
}


def path_with(folder: Path, wrapper: str | None) -> str:
    """A PATH on which bwrap is a script, or is missing."""
    folder.mkdir(exist_ok=True)
    for program in ("setpriv", "sh", "env", "git"):
        if (found := shutil.which(program)) and not (folder / program).exists():
            (folder / program).symlink_to(found)
    if wrapper is not None:
        real = shutil.which("bwrap") or "bwrap"
        (folder / "bwrap").write_text("#!/bin/sh\n" + wrapper.replace("$BWRAP", real) + "\n")
        (folder / "bwrap").chmod(0o755)
    return str(folder)


@pytest.mark.without_bwrap
def test_without_bubblewrap_check_and_train_end_with_2_and_say_how_to_get_it(small_run, tmp_path):
    path = path_with(tmp_path / "programs", None)
    out = tmp_path / "out"
    commands = (("check", small_run, TOOL), ("train", small_run, TOOL, f"out={out}"))
    for said in run_commands(*commands, cwd=tmp_path, environment={"PATH": path}):
        assert said.returncode == 2, said.stderr
        assert b"apt-get install bubblewrap" in said.stderr
        assert all(name.encode() in said.stderr for name in GUARANTEES)
    assert not out.exists()


@pytest.mark.without_bwrap
def test_a_command_that_plays_seats_is_refused_without_boxes(small_run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", path_with(tmp_path / "programs", None))
    with pytest.raises(ConfigError, match="apt-get install bubblewrap") as refused:
        check_sandbox_of(load_run(small_run, ["team.workflow={type: command, argv: [agent]}"]))
    assert "team.workflow of type command would run code of a model" in str(refused.value)
    assert all(name in str(refused.value) for name in GUARANTEES)


@pytest.mark.without_bwrap
def test_a_run_without_boxed_tools_needs_no_bubblewrap(small_run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", path_with(tmp_path / "programs", None))
    assert check_sandbox_of(load_run(small_run, ["team.agents.solver.tools=[{type: calculator}]"])) == []


@pytest.mark.without_bwrap
def test_a_simulation_needs_boxes_only_for_what_it_calls_for_real(small_run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", path_with(tmp_path / "programs", None))
    simulated = [TOOL, "cluster.backend=simulated"]
    assert check_sandbox_of(load_run(small_run, [*simulated, "simulation.tools.python.result=done"])) == []
    with pytest.raises(ConfigError, match="solver's python would run code of a model"):
        check_sandbox_of(load_run(small_run, [*simulated, "simulation.tools.python.result=real"]))


@pytest.mark.parametrize(("lacking", "named"), [("no user namespaces", "network"), ("no seccomp", "syscalls")])
def test_what_is_missing_is_named(lacking, named, small_run, tmp_path, monkeypatch, sandbox):
    monkeypatch.setenv("PATH", path_with(tmp_path / "programs", WRAPPER[lacking]))
    with pytest.raises(ConfigError, match=named) as refused:
        check_sandbox_of(load_run(small_run, [TOOL]))
    assert "solver's python would run code of a model" in str(refused.value)
    program = "open('/tmp/ran', 'w')\nprint('ran')"
    done = subprocess.run(
        [sys.executable, "-m", "flexmarl", "sandbox", "exec"],
        input=program,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without control groups")
def test_without_control_groups_memory_and_pids_are_missing_unless_rlimits_are_accepted(sandbox):
    def work() -> object:
        os.chdir("/")
        from flexmarl.sandbox.backends import bubblewrap

        bubblewrap._CGROUPS[:] = ["/sys/fs/cgroup cannot be written: Permission denied"]
        found = [one.name for one in probe_now(Bubblewrap()) if not one.held]
        try:
            check_guarantees(probe_now(Bubblewrap()), "a test runs")
            said = ""
        except ConfigError as error:
            said = str(error)
        accepting = SandboxSettings(accept=("rlimits",))
        weaker = [one.name for one in probe_now(Bubblewrap(accepting), accepting) if not one.held]
        return [os.getuid(), found, said, weaker]

    uid, found, said, weaker = as_plain_user(work)  # type: ignore[misc]
    assert (uid, found, weaker) == (PLAIN, ["memory", "pids"], [])
    assert "systemd-run --user --scope -p Delegate=yes" in said
    assert "sandbox.accept=[rlimits]" in said


def test_probe_prints_a_line_for_each_guarantee(sandbox):
    done = subprocess.run(
        [sys.executable, "-m", "flexmarl", "sandbox", "probe"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in GUARANTEES)


def test_exec_prints_the_outcome_of_a_program(sandbox):
    done = subprocess.run(
        [sys.executable, "-m", "flexmarl", "sandbox", "exec", "--json", "--timeout", "5", "--memory", "64"],
        input="print(6 * 7)",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"stdout": "42\\n"' in done.stdout
