"""A machine without Ray, vLLM and the other extras: everything else works there, and what does not says why."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MISSING = ("ray", "vllm", "trl", "datasets", "pyarrow", "openai", "reasoning_gym", "textarena", "e2b")
HIDE = f"""
import sys
for name in {MISSING!r}:
    sys.modules[name] = None  # As Python marks a package that cannot be imported.
"""
IMPORT_ALL = """
import importlib, pkgutil
import flexmarl
from flexmarl.errors import MissingExtra

def missing(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        return error.name.partition(".")[0]
    except MissingExtra as error:
        return error.__cause__.name

names = [m.name for m in pkgutil.walk_packages(flexmarl.__path__, "flexmarl.") if not m.name.endswith("__main__")]
print(sorted((name, lacks) for name in names if (lacks := missing(name))))
"""
TRAIN = """
from pathlib import Path
from rich.console import Console
from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run

settings = load_run(Path(sys.argv[1]), ["cluster.backend=" + sys.argv[2], "steps=1", f"out={sys.argv[3]}"])
summary = assemble_run(settings).train(Console(file=sys.stderr))
print(summary.policies["one"]["version"], "ray" in {name for name, module in sys.modules.items() if module})
"""
VALIDATE = """
from pathlib import Path
from flexmarl.config import load_run

print(load_run(Path(sys.argv[1]), []).cluster.backend)
"""


def python(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE + code, *map(str, words)], capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_everything_but_the_backends_on_missing_packages_is_imported() -> None:
    ended = python(IMPORT_ALL)
    assert ended.returncode == 0, ended.stderr
    left_out = ["ray", "ray_nodes", "ray_resident", "ray_session"]
    on_ray = [(f"flexmarl.cluster.backends.{name}", "ray") for name in left_out]
    of_vllm = ["engine_args", "vllm_engine", "vllm_requests", "vllm_worker"]
    on_vllm = [(f"flexmarl.inference.backends.vllm.{name}", "vllm") for name in of_vllm]
    on_openai = [("flexmarl.inference.backends.completions_server", "openai")]
    on_e2b = [("flexmarl.sandbox.backends.e2b_boxes", "e2b")]
    of_tasks = [(f"flexmarl.tasks.{name}", name) for name in ("reasoning_gym", "textarena")]
    assert ended.stdout.strip() == str(on_ray + on_openai + on_vllm + on_e2b + of_tasks)


def test_a_cluster_config_is_validated() -> None:
    ended = python(VALIDATE, ROOT / "examples/math_team/cluster.yaml")
    assert ended.stdout.strip() == "ray", ended.stderr


@pytest.mark.slow
def test_a_run_in_one_process_trains(small_run: Path, tmp_path: Path) -> None:
    ended = python(TRAIN, small_run, "inline", tmp_path)
    assert ended.stdout.split() == ["1", "False"], ended.stderr


def test_a_run_on_ray_names_what_is_missing_and_what_works(small_run: Path, tmp_path: Path) -> None:
    ended = python(TRAIN, small_run, "ray", tmp_path)
    assert ended.returncode != 0
    assert "ConfigError: cluster.backend is 'ray', which needs the package 'ray'" in ended.stderr
    assert "cluster.backend=inline" in ended.stderr
