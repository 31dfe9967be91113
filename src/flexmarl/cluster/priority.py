"""Scheduling priority of a worker's process, where processes outnumber cores."""

import os

NICENESS = 5
"""A third of an engine's weight. Linux's idle class hides more of training behind rollout, but starves it where the
machine has other work to do."""


def give_way() -> None:
    """From now on this process, with the threads it will start, goes after the others of the run.

    A step waits for its slowest episode, so engines go first and training fills the gaps.
    """
    os.nice(NICENESS)
