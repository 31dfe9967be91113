"""What a table looks like on a wide screen."""

from io import StringIO

from rich.console import Console
from rich.table import Table


def as_text(table: Table) -> str:
    screen = StringIO()
    Console(width=200, file=screen).print(table)
    return screen.getvalue()
