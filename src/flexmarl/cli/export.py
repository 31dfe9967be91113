"""`flexmarl export`: writes trained policies as Hugging Face folders."""

from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cli.options import assemble, load_run_folder
from flexmarl.cli.terminal import say


def export(
    run: Annotated[Path, typer.Argument(help="A run folder; its newest checkpoint is exported.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(help="Where to write; each policy gets a folder of its own.", show_default=False)
    ],
) -> None:
    """Write each trained policy so that `AutoModelForCausalLM.from_pretrained` loads it."""
    settings, folder = load_run_folder(run)
    for path in assemble.export_policies(settings, folder.checkpoints, out):
        say(str(path))
