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
