"""The page of the Python interface and the notebook are run, from their first line to their last."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

import flexmarl
from tests.docs.pages import ROOT, blocks, rows

PAGE = "docs/howto/python.md"
NOTEBOOK = ROOT / "examples" / "notebooks" / "quickstart.ipynb"


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example, in the working directory."""
    ignored = shutil.ignore_patterns("__pycache__", "runs")
    shutil.copytree(ROOT / "examples" / "math_team", tmp_path / "examples" / "math_team", ignore=ignored)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "examples"


RUNNER = """
import ast, asyncio, inspect, json, sys
space = {}
for text in json.load(sys.stdin):
    ran = eval(compile(text, "python.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), space)
    if inspect.iscoroutine(ran):
        asyncio.run(ran)
"""
"""Runs blocks one after the other in one process of their own: names of workflows belong to one file per process."""


def test_the_blocks_of_the_page_are_a_script(examples: Path) -> None:
    texts = json.dumps([block.text for block in blocks(PAGE, "python")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-c", RUNNER], input=texts, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert len(list(Path("runs").iterdir())) == 3


def test_the_table_of_the_page_has_every_function() -> None:
    named = {re.split(r"[`(]", cell)[1] for cell, *_ in rows(PAGE, "# How to use flexmarl from Python")}
    functions = {name.removesuffix("_async") for name in flexmarl.__all__} - {"Run", "RunSettings"}
    assert named == functions
    members = {name for name in vars(flexmarl.Run) if not name.startswith("_")}
    listed = {word for cell, *_ in rows(PAGE, "## Train, and look at the run") for word in re.findall(r"\w+", cell)}
    assert listed == members


def test_the_notebook_runs_in_jupyter(examples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs before committing"
    folder = examples / "notebooks"
    folder.mkdir()
    with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as short:  # Another process could take a free port.
        sockets = Config({"KernelManager": {"transport": "ipc", "ip": f"{short}/socket"}})
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, config=sockets).execute()
    said = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in said if output["output_type"] == "error"]
    printed = "".join(output.get("text", "") for output in said)
    assert "trained groups" in printed
    assert "step 2/2" in printed
    assert "\x1b" not in printed, "a saved notebook has no frames of a live panel"
    assert said[-2]["data"]["text/plain"] == "3", "a resumed run"
    assert len(list((folder / "runs").iterdir())) == 1
