"""Every command of the pages is one that there is, with arguments that it takes; the cheap ones are run."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flexmarl.cli import app
from flexmarl.config import load_run
from tests.docs.pages import PAGES, ROOT, commands, links, read

COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


def arguments(program: str) -> list[tuple[str, list[str]]]:
    """(page, words behind the program) of every command that runs it."""
    split = [(page, shlex.split(command)) for page, command in COMMANDS]
    return [(page, words[1:]) for page, words in split if words[0] == program]


def test_only_these_programs_are_named() -> None:
    assert {shlex.split(command)[0] for _, command in COMMANDS} == {
        "make",
        "flexmarl",
        "python",
        "grep",
        "ray",
        "export",
    }


def test_make_has_every_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    wanted = {word for _, words in arguments("make") for word in words}
    assert {"quickstart", "test", "check"} <= wanted <= set(targets)
    said = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(re.search(rf"^{target}\s+\S", said.stdout, re.M) for target in wanted)


@pytest.mark.parametrize(("page", "words"), arguments("flexmarl"))
def test_flexmarl_takes_the_command(page: str, words: list[str]) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.commands[words[0]]
    context = command.make_context(words[0], words[1:])
    config = next(
        (value for value in context.params.values() if isinstance(value, Path) and value.suffix == ".yaml"), None
    )
    if config is not None and (ROOT / config).is_file():
        load_run(ROOT / config, context.params["overrides"] or ())


def test_the_help_names_every_command_of_the_readme() -> None:
    said = CliRunner().invoke(app, ["--help"]).output
    assert all(re.search(rf"\b{words[0]}\b", said) for page, words in arguments("flexmarl") if page == "README.md")


def test_check_passes_the_example() -> None:
    (words,) = [words for page, words in arguments("flexmarl") if page == "README.md" and words[0] == "check"]
    result = CliRunner().invoke(app, [words[0], str(ROOT / words[1])])
    assert result.exit_code == 0, result.output
    assert "level L3" in " ".join(result.output.split())


@pytest.mark.parametrize(("page", "words"), arguments("python"))
def test_scripts_are_there_and_print_the_figures_of_the_page(page: str, words: list[str]) -> None:
    script = (ROOT / words[0]).read_text()
    if words[0].startswith("benchmarks/"):
        assert words[0].removeprefix("benchmarks/").removesuffix(".py") in page or page == "docs/benchmarks.md"
        section = read(page).split(words[0], 1)[1].split("```bash", 1)[0]
        figures = re.findall(r"^\| `(\w+)` \|", section, re.M)
        assert figures
        assert all(f'"{figure}"' in script for figure in figures)


@pytest.mark.parametrize(("page", "words"), arguments("grep"))
def test_a_search_finds_something(page: str, words: list[str]) -> None:
    found = subprocess.run(["grep", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "unblocked by" in found.stdout


def test_every_benchmark_has_its_place_on_the_page() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {
        "common.py",
        "character_model.py",
        "dispatch_team.py",
        "gateway_rivals.py",
        "kept_runs.py",
        "tree_workloads.py",
        "vllm_beside.py",
    }
    assert scripts <= {Path(words[0]).name for page, words in arguments("python") if page == "docs/benchmarks.md"}
    assert "benchmarks" in " ".join(links("docs/benchmarks.md"))
