"""Every Python block of the pages is run; those that are files of a how-to are run by test_newcomer."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter

from flexmarl.agents import load_code
from flexmarl.config.load import parse_yaml
from flexmarl.config.run_settings import RunSettings
from flexmarl.testing.scripted_run import ScriptedRun
from tests.docs.pages import PAGES, blocks

STANDALONE = {page for page in PAGES if any(not block.notes for block in blocks(page, "python"))}

OWN = {("docs/howto/estimator.md", "credit"), ("docs/howto/simulate.md", "faults")}
"""What only the reader's own copy knows (see test_newcomer), and a file that is no config: a plan of faults."""


@pytest.mark.parametrize("page", sorted(STANDALONE))
def test_blocks_run_one_after_the_other(page: str, run_blocks: Callable[[str], ModuleType]) -> None:
    run_blocks(page)


@pytest.fixture(scope="module")
def run_blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModuleType]:
    """Runs a page's blocks, once, as one module; a real one, so that what it defines can cross processes."""
    folder = tmp_path_factory.mktemp("pages")

    def run(page: str) -> ModuleType:
        file = folder / f"{Path(page).stem}.py"
        if not file.exists():
            file.write_text("\n".join(block.text for block in blocks(page, "python") if not block.notes))
        return load_code(file)

    return run


def test_the_workflow_of_the_readme_plays_and_trains(run_blocks: Callable[[str], ModuleType]) -> None:
    page = run_blocks("README.md")

    def say(prompt: str, request: Any) -> str:
        if "?" in prompt:
            return "yes" if " = a?" in prompt else "no"
        return "ab"[request.seed % 2]

    run = ScriptedRun(
        page.until_approved,
        say,
        agents={"solver": "solver", "verifier": "verifier"},
        steps=2,
        batch={"groups": 4, "episodes": 4},
    ).play()
    assert {name: trainer.version for name, trainer in run.trainers.items()} == {"solver": 2, "verifier": 2}
    assert run.metrics[2]["reward/verifier"] == 1.0, "this verifier is always right"
    assert {row.values["text"] for row in run.rows() if row.agent == "solver"} == {"a", "b"}


@pytest.mark.parametrize("page", [page for page in PAGES if any(not block.notes for block in blocks(page, "yaml"))])
def test_pieces_of_configs_have_keys_that_there_are(page: str) -> None:
    for block in (block for block in blocks(page, "yaml") if not block.notes):
        piece = parse_yaml(block.text)
        for key, value in piece.items():
            if (page, key) not in OWN:
                field = RunSettings.model_fields[key]
                TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
