"""What a table looks like on a screen."""

from io import StringIO

from rich.console import Console
from rich.table import Table


def as_text(table: Table, width: int = 200) -> str:
    screen = StringIO()
    Console(width=width, file=screen).print(table)
    return screen.getvalue()
