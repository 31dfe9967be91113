"""What `flexmarl check` has to say about one thing."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One thing that was looked at."""

    subject: str
    found: str
    todo: str = ""
    """What to do; empty when it is fine as it is."""
