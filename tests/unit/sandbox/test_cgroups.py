"""Where control groups for boxes are made, in trees of files."""

from pathlib import Path

import pytest

from flexmarl.sandbox.backends.cgroups import BoxGroup, CgroupTree, tree_of
from flexmarl.sandbox.interface import Limits


def tree(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_groups_of_version_1_are_below_our_own_in_each_hierarchy(tmp_path):
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    found = tree_of(tmp_path, "8:pids:/\n4:memory:/job\n0::/\n")
    assert found == CgroupTree(tmp_path / "memory" / "job", tmp_path / "pids", 1)


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "pids").mkdir()
    found = tree_of(tmp_path, "8:pids:/docker/1\n4:memory:/docker/1\n")
    assert found == CgroupTree(tmp_path / "memory", tmp_path / "pids", 1)


def test_in_version_2_this_process_moves_into_a_leaf_before_controllers_are_handed_down(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    scope = {
        "cgroup_dot_controllers": "cpu memory pids",
        "user__scope__cgroup_dot_controllers": "cpu memory pids",
        "user__scope__cgroup_dot_subtree_control": "",
    }
    tree(tmp_path, **scope)
    own = tmp_path / "user" / "scope"
    assert tree_of(tmp_path, "0::/user/scope\n") == CgroupTree(own, own, 2, own)
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (own / "flexmarl-controller" / "cgroup.procs").read_text() == "0"


def test_without_the_controllers_the_reason_names_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    tree(tmp_path, cgroup_dot_controllers="cpu io", cgroup_dot_subtree_control="")
    assert "but cpu io" in str(tree_of(tmp_path, "0::/\n"))
    assert "no control groups" in str(tree_of(tmp_path / "nowhere", "0::/\n"))


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_has_the_limits_of_its_box(tmp_path, version):
    name = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
    group = BoxGroup(CgroupTree(tmp_path, tmp_path, version), "box", Limits(memory_bytes=2**20, pids=9))
    assert (tmp_path / "box" / name).read_text() == str(2**20)
    assert (tmp_path / "box" / "pids.max").read_text() == "9"
    assert group.entries == [str(tmp_path / "box" / "cgroup.procs")]
    (tmp_path / "box" / "cgroup.procs").write_text("")
    (tmp_path / "box" / "memory.events").write_text("low 0\noom_kill 2\n")
    (tmp_path / "box" / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert group.out_of_memory() == 2
    peak = tmp_path / "box" / {1: "memory.max_usage_in_bytes", 2: "memory.peak"}[version]
    peak.write_text(str(2**20 - 4096))
    assert group.out_of_memory() == 2
    peak.write_text(str(2**19))
    assert group.out_of_memory() == 0, "the machine had no memory, and the box had half of its own left"


def test_a_process_that_a_moved_one_started_makes_its_groups_beside_that(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    files = {"cgroup_dot_controllers": "memory pids", "scope__cgroup_dot_controllers": "memory pids"}
    tree(tmp_path, **files, scope__cgroup_dot_subtree_control="memory pids")
    (tmp_path / "scope" / "flexmarl-controller").mkdir()
    scope = tmp_path / "scope"
    assert tree_of(tmp_path, "0::/scope/flexmarl-controller\n") == CgroupTree(scope, scope, 2, scope)


@pytest.mark.parametrize("container", [True, False])
def test_from_the_root_of_a_container_all_processes_move_into_a_leaf(tmp_path, container):
    files = {"cgroup_dot_procs": "17\n", "cgroup_dot_controllers": "memory pids", "cgroup_dot_subtree_control": ""}
    tree(tmp_path, **files)
    if container:
        tree(tmp_path, cgroup_dot_type="domain")
    assert tree_of(tmp_path, "0::/\n") == CgroupTree(tmp_path, tmp_path, 2, tmp_path)
    leaf = tmp_path / "flexmarl-controller" / "cgroup.procs"
    assert (leaf.read_text() == "17") if container else not leaf.exists()
