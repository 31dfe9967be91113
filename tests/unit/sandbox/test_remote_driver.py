"""The programs that a kernel of a service gets: they run on the Python of SandboxFusion, which is an old one."""

import ast
import inspect
import json
from pathlib import Path

import pytest

from flexmarl.sandbox import driver, remote_driver
from flexmarl.sandbox.remote_calls import boot_cell, call_cell, new_nonce, plain_path, reply_of
from flexmarl.sandbox.remote_driver import packed


def test_the_programs_are_of_python_3_10_and_import_nothing_of_flexmarl():
    for module in (driver, remote_driver):
        tree = ast.parse(inspect.getsource(module), feature_version=(3, 10))
        named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [name for name in named if name.startswith("flexmarl")]
    ast.parse(boot_cell("box", {"RLIMIT_CPU": 1}, 1024, "files.json"), feature_version=(3, 10))


def test_a_request_is_ascii_in_its_cell_whatever_its_code_holds():
    cell = call_cell(new_nonce(), {"kind": "code", "code": '\'\ud800\' \0 \n """'})
    cell.encode("ascii")
    ast.parse(cell)


@pytest.mark.parametrize("text", ["", "None", "[]", "{", '{"nonce": "other"}', "[" * 10_000, '{"nonce": NaN}'])
def test_a_value_that_is_no_reply_to_this_request_is_none(text):
    assert reply_of(text, "mine") is None


def test_a_forged_reply_claims_no_more_than_a_status_and_texts():
    forged = {"nonce": "mine", "exit": True, "ended": {}, "stdout": 3, "stderr": None, "dropped": -1, "error": [1]}
    reply = reply_of(json.dumps(forged), "mine")
    assert reply is not None
    assert (reply.ended, reply.exit, reply.text("stdout"), reply.dropped) == ("exited", True, "", 0)
    assert reply_of(json.dumps(forged | {"exit": "0"}), "mine").exit == 1


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "", ".", "a/../..", "a\0b", "/boxes/a"])
def test_a_path_that_is_not_below_the_box_is_refused(path):
    with pytest.raises(ValueError, match="is not below"):
        plain_path(path)


def test_regular_files_alone_are_packed_and_no_more_of_them_than_may_be(tmp_path):
    root, out = tmp_path / "box", tmp_path / "packed"
    (root / "folder").mkdir(parents=True)
    (root / "folder" / "a").write_bytes(b"12345")
    (root / "link").symlink_to("/etc/passwd")
    (root / "folders").symlink_to("/usr")
    packed(str(root), str(out), 5)
    assert list(json.loads(out.read_text())) == [str(Path("folder") / "a")]
    packed(str(root), str(out), 4)
    assert json.loads(out.read_text()) is None
