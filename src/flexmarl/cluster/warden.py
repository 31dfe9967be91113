"""Runs beside a run as a process of its own: when the controller ends in whatever way, removes what that left.

Consumes: nothing. Waits for: the end of its stdin, whose other end the controller holds. Produces: order.
Unblocked by: the kernel, which closes a dead process's pipes.
"""

import sys
from pathlib import Path

from flexmarl.cluster.remains import release


def main(folder: Path) -> None:
    """Waits for the controller's end; after a normal one the folder is gone, and there is nothing to do."""
    sys.stdin.buffer.read()
    if folder.exists():
        release(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
