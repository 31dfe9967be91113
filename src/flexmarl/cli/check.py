"""`flexmarl check`: is this config right, and can this machine run it?"""

from rich import box
from rich.table import Table

from flexmarl.cli.options import Config, Overrides, examine
from flexmarl.cli.terminal import SafeConsole
from flexmarl.config import load_run
from flexmarl.errors import ConfigError


def check(config: Config, overrides: Overrides = None) -> None:
    """Validate CONFIG and look at this machine. Exit code 2 if the config is wrong; a to-do is no error."""
    findings, problems = examine.examine(load_run(config, overrides or ()))
    table = Table(box=box.SIMPLE_HEAD, title=str(config))
    for column in ("", "subject", "found", "to do"):
        table.add_column(column, overflow="fold", no_wrap=column == "subject")
    for finding in findings:
        table.add_row("!" if finding.todo else "ok", *finding, style="yellow" if finding.todo else None)
    SafeConsole().print(table)
    if problems:
        raise ConfigError("\n".join(f"{config}: {problem}" for problem in problems))
    todos = sum(bool(finding.todo) for finding in findings)
    SafeConsole().print(f"The config is right; {todos or 'nothing'} to do.")
