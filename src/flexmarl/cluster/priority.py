"""Scheduling priority of a worker's process, where processes outnumber cores."""

import os

LOWEST_NICENESS = 19


def give_way() -> None:
    """From now on this process, with the threads it will start, computes in what others of the run leave free.

    A step waits for its slowest episode, so engines go first and training fills the gaps. Linux's idle class gives way
    at once; a nice process would first end its time slice, 3 ms, as long as four decode steps of a tiny model.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LOWEST_NICENESS)
