"""Runs as a separate process for each run: removes what the controller left behind, however the controller ended.

Consumes: nothing. Waits for: the end of its stdin, whose other end the controller holds. Produces: a clean machine.
Unblocked by: the kernel, which closes a dead process's pipes.
"""

import sys
from pathlib import Path

from flexmarl.cluster.remains import release


def main(folder: Path) -> None:
    """Waits for the controller's end and releases the run. After a normal end the folder is gone already."""
    sys.stdin.buffer.read()
    if folder.exists():
        release(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
