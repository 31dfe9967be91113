"""A folder of ours with a name that anybody can guess: what another user, or a mistake, may have put in its place."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flexmarl.cli.runs import cleaned
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.own_folder import check_not_planted, check_ours, own_folder
from flexmarl.cluster.remains import Leases, abandoned, foreign_paths, live_processes, parse_leases, release, writers
from flexmarl.errors import ConfigError, ObjectError
from flexmarl.objects.backends.memory import ShmObjectStore
from tests.conftest import everything_in

HOSTILE = '{"run": "theirs", "paths": ["%s"], "processes": [[%d, %r]]}'
PLANTED = {
    "a folder of theirs": 'mkdir -m 777 root; mkdir root/k3x9q2; printf "%s" "$record" > root/k3x9q2/leases.json',
    "a folder of theirs that others only read": "mkdir -m 755 root; mkdir root/k3x9q2",
    "a link to a folder of ours": 'ln -s "$ours" root',
    "a link to a folder of theirs": "mkdir -m 777 theirs; ln -s theirs root",
    "a link to nothing": "ln -s nowhere root",
    "a plain file": "echo mine > root",
    "a pipe": "mkfifo root",
}


@pytest.fixture
def victim() -> Iterator[psutil.Process]:
    """A process of ours that somebody may want to end."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield psutil.Process(process.pid)
        assert process.poll() is None, "it lives"
        process.kill()


@pytest.mark.parametrize("planted", PLANTED)
def test_what_another_user_put_in_the_place_of_our_folder_is_refused_by_name_and_not_touched(
    planted: str, stranger: Any, tmp_path: Path, victim: psutil.Process
) -> None:
    precious = tmp_path / "precious"
    (precious / "k3x9q2").mkdir(parents=True)
    record = HOSTILE % (precious, victim.pid, victim.create_time())
    (precious / "k3x9q2" / "leases.json").write_text(record)
    stranger.does(PLANTED[planted], ours=precious, record=record)
    root, before = stranger.folder / "root", (everything_in(stranger.folder), everything_in(precious))
    for refused in (
        lambda: list(cleaned(root, dry_run=False)),
        lambda: list(abandoned(root)),
        lambda: list(foreign_paths(root)),
        lambda: RunLeases("ours", root=root),
        lambda: release(root / "k3x9q2"),
    ):
        with pytest.raises((ConfigError, FileNotFoundError), match=re.escape(str(root))):
            refused()
    assert (everything_in(stranger.folder), everything_in(precious)) == before
    assert victim.is_running()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_in_is_refused(mode: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(f"'{root}' may be written to by others")):
        RunLeases("ours", root=root)


@pytest.mark.parametrize(("mode", "refused"), [(0o1777, False), (0o777, True), (0o775, True)])
def test_a_folder_is_refused_where_others_could_put_another_in_its_place(
    mode: int, refused: bool, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(mode)
    if not refused:
        assert own_folder(place / "root").stat().st_mode & 0o777 == 0o700
        return
    with pytest.raises(ConfigError, match=re.escape(f"'{place}' lets others put another folder in its place")):
        own_folder(place / "root")
    assert not (place / "root").exists()


def test_a_folder_is_refused_inside_one_of_another_users(stranger: Any) -> None:
    stranger.does("mkdir -m 1777 temp")
    with pytest.raises(ConfigError, match=f"'{stranger.folder}/temp' belongs to user 65534"):
        own_folder(stranger.folder / "temp" / "root")
    stranger.does("mkdir -m 1777 theirs; ln -s theirs link")
    with pytest.raises(ConfigError, match=f"'{stranger.folder}/theirs' belongs to user 65534"):
        own_folder(stranger.folder / "link" / "root")


def test_what_lies_in_our_root_and_is_no_run_of_ours_stays_and_is_named(stranger: Any) -> None:
    root = own_folder(stranger.folder / "root")
    dead = root / "k3x9q2"
    dead.mkdir()
    (dead / "leases.json").write_text("")  # As a power cut leaves it.
    root.chmod(0o1777)  # For a moment, by mistake.
    stranger.does("mkdir root/theirs; echo {} > root/theirs/leases.json; ln -s / root/link")
    root.chmod(0o700)
    (root / "plain").write_text("a file of ours")
    (root / "empty").mkdir()
    os.mkfifo(root / "pipe")
    (root / "odd").mkdir()
    os.mkfifo(root / "odd" / "leases.json")
    (root / "given").mkdir()
    (root / "given" / "leases.json").write_text("{}")
    os.chown(root / "given" / "leases.json", 65534, 65534)
    before = {name: everything_in(root / name) for name in ("theirs", "plain", "empty", "odd", "given")}
    said = list(cleaned(root, dry_run=False))
    assert {line.split("'")[1] for line in said if line.startswith("left as it is")} == {
        str(root / name) for name in ("theirs", "link", "plain", "empty", "pipe", "odd", "given")
    }
    assert before == {name: everything_in(root / name) for name in before}
    assert not dead.exists(), "witness: what was a run's is gone"


def test_shared_memory_of_our_name_that_another_user_made_is_refused_and_stays(stranger: Any, tmp_path: Path) -> None:
    with RunLeases("ours", root=tmp_path / "root") as leases:
        shared = leases.shared_memory()
        stranger.does('mkdir -m 777 "$shared"; echo mine > "$shared/file"', shared=shared)
        with pytest.raises(ObjectError, match=f"'{shared}' is there already, made by user 65534"):
            ShmObjectStore(shared).create()
    assert not leases.folder.exists()
    assert (shared / "file").read_text() == "mine\n"
    stranger.does('rm -r "$shared"', shared=shared)


def test_a_run_folder_of_another_users_is_not_gone_on_with(stranger: Any, tmp_path: Path) -> None:
    stranger.does("mkdir -m 755 run")
    with pytest.raises(ConfigError, match=f"--resume: '{stranger.folder}/run' belongs to user 65534"):
        check_ours(stranger.folder / "run", "--resume")
    os.chown(tmp_path, 65534, 65534)  # Also where only root could put it.
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        check_ours(tmp_path, "--resume")
    stranger.does('ln -s "$ours" link', ours=tmp_path)
    with pytest.raises(ConfigError, match=f"'{stranger.folder}/link' belongs to user 65534"):
        check_ours(stranger.folder / "link", "--resume")


@pytest.mark.parametrize("script", ["mkdir -m 777 runs", 'ln -s "$ours" runs', "mkdir -m 777 a; ln -s a runs"])
def test_a_place_that_another_user_planted_in_a_folder_of_everyones_is_refused(
    script: str, stranger: Any, tmp_path: Path
) -> None:
    stranger.does(script, ours=tmp_path)
    for path in (stranger.folder / "runs", stranger.folder / "runs" / "deeper", stranger.folder / "." / "runs"):
        with pytest.raises(ConfigError, match=f"out: '{stranger.folder}/runs' belongs to user 65534"):
            check_not_planted(path, "out")
    (tmp_path / "link").symlink_to(stranger.folder / "runs")
    with pytest.raises(ConfigError, match=f"'{stranger.folder}/runs' belongs to user 65534"):
        check_not_planted(tmp_path / "link", "out")
    (stranger.folder / "ours").mkdir()
    check_not_planted(stranger.folder / "ours" / "not there yet", "out")


@pytest.mark.parametrize("name", ["file/x", "x" * 300])
def test_a_place_that_no_folder_can_have_is_refused_by_setting_and_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"out: '{tmp_path / name}' cannot be a folder"):
        check_not_planted(tmp_path / name, "out")


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(ConfigError, match="too many symbolic links"):
        check_not_planted(tmp_path / "one", "out")


def json_of(value: object) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


COMPILED = "from flexmarl.cluster.own_folder import keep_compiled_code as k; k(); import torch._dynamo as d; %s"
SHOW = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"


def compiled(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Where torch, in a process of its own, keeps what it compiles."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR")}
    environment = {**kept, "XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder), **variables}
    command = [sys.executable, "-c", COMPILED % SHOW]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_what_torch_compiles_is_not_loaded_from_a_folder_that_anybody_may_have_made(
    stranger: Any, tmp_path: Path
) -> None:
    assert compiled(tmp_path).stdout.strip() == str(tmp_path / "cache" / "flexmarl" / "torchinductor")
    assert not list(tmp_path.glob("torchinductor*")), "torch's own choice, in the temp folder"
    (tmp_path / "file").write_text("no home")
    found = compiled(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file")).stdout.strip()
    assert found == str(tmp_path / f"flexmarl-{os.getuid()}-cache" / "torchinductor")
    stranger.does("mkdir -m 777 torchinductor_us")
    planted = compiled(tmp_path, TORCHINDUCTOR_CACHE_DIR=str(stranger.folder / "torchinductor_us"))
    assert f"ConfigError: TORCHINDUCTOR_CACHE_DIR: '{stranger.folder}/torchinductor_us' belongs" in planted.stderr


numbers = st.integers() | st.floats() | st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**400, os.getpid(), os.getppid()])
paths = st.sampled_from(["/", "..", "../..", "OUTSIDE", "../outside", "/dev/shm", "", "\0", "\ud800", "k3x9q2", "."])
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5) | paths,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
records = (
    st.binary(max_size=60)
    | plain.map(json_of)
    | st.fixed_dictionaries(
        {}, optional={"run": plain, "paths": st.lists(paths | plain), "processes": st.lists(st.lists(numbers) | plain)}
    ).map(json_of)
    | st.sampled_from([b"[" * 100_000, b'{"run":' * 50_000, b'{"run": ' + b"9" * 10_000 + b"}", b" " * (2**20 + 1)])
)


@given(record=records, name=st.sampled_from(["k3x9q2", "with space", "\udcff"]))
@example(
    record=b'{"run": "x", "paths": ["OUTSIDE"], "processes": [[-1, 0], [0, 0], [1, 0.0], [true, 1]]}', name="k3x9q2"
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_record_says_nothing_outside_the_runs_folder_is_touched(
    record: bytes, name: str, tmp_path_factory: pytest.TempPathFactory, victim: psutil.Process
) -> None:
    here = tmp_path_factory.mktemp("fuzz")
    outside, run = here / "outside", here / "root" / name
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "file").write_text("precious")
    run.mkdir(parents=True)
    run.parent.chmod(0o700)
    (run / "link").symlink_to(outside)
    (run / "folder").mkdir()
    (run / "folder" / "link").symlink_to(outside / "deep")
    (run / "leases.json").write_bytes(record.replace(b"OUTSIDE", str(outside).encode()))
    before = everything_in(outside)
    said = list(cleaned(run.parent, dry_run=False))
    assert all(line.isprintable() for line in said if "fuzz" not in line)
    assert list(run.parent.iterdir()) == [], "it is a run's folder, and that goes, whatever its record says"
    assert everything_in(outside) == before
    assert psutil.Process(os.getppid()).is_running()
    assert victim.is_running()


@given(record=records)
@settings(max_examples=150, deadline=None)
def test_only_processes_of_ours_that_started_when_the_record_says_are_found(record: bytes) -> None:
    found = parse_leases(record)
    assert all(1 < pid < 2**31 for pid, _ in found.processes)
    live = live_processes(found)
    assert all(abs(process.create_time() - dict(found.processes)[process.pid]) < 2 for process in live)


def test_a_process_that_began_at_another_time_has_only_the_same_number(victim: psutil.Process) -> None:
    began = victim.create_time()
    found = {shift: live_processes(Leases(run="?", processes=((victim.pid, began + shift),))) for shift in (-60, 0, 60)}
    assert found == {-60: [], 0: [victim], 60: []}


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**31])
def test_no_record_names_a_process_group_or_the_first_process(pid: int) -> None:
    assert parse_leases(json.dumps({"run": "x", "processes": [[pid, 1.5]]}).encode()).processes == ()


def test_a_process_of_another_users_that_writes_in_our_folder_is_left_alone(stranger: Any, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        asleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        with subprocess.Popen(asleep, stdout=file) as ours:
            with subprocess.Popen(["sleep", "600"], stdout=file, user=65534, group=65534, extra_groups=[]) as theirs:
                found = [process.pid for process in writers(tmp_path)]
                theirs.kill()
            ours.kill()
    assert (ours.pid in found, theirs.pid in found) == (True, False)


def test_a_process_of_another_users_is_none_of_ours(stranger: Any, victim: psutil.Process) -> None:
    with subprocess.Popen(["sleep", "600"], user=65534, group=65534, extra_groups=[]) as theirs:
        process = psutil.Process(theirs.pid)
        noted = Leases(run="?", processes=((theirs.pid, process.create_time()), (victim.pid, victim.create_time())))
        assert live_processes(noted) == [victim]
        theirs.kill()
