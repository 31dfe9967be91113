"""Decides the order of numbered names.

>>> sorted(["level_10", "level_2"], key=natural)
['level_2', 'level_10']
"""

import re


def natural(name: str) -> list[tuple[int, str]]:
    """Key by which numbers inside names count as numbers."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
