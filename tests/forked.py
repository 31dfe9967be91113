"""Commands in forks of a process that has imported what a run needs: five seconds less for each, where there are many.

Everything else is a process of its own: its session of signals, working folder, environment, standard output.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "flexmarl.cli",
        "flexmarl.assemble.commands",
        "flexmarl.training.backends.single",
        "flexmarl.inference.backends.embedded.engine",
        "transformers.models.qwen3.modeling_qwen3",
        "tests.odd_workflows",
    ]
)


class ForkedCommand:
    """`flexmarl` with these words, as far as tests use a `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path) -> None:
        self._process = FORKS.Process(target=_command, args=(list(words), folder, dict(environment), output))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("flexmarl", seconds or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _command(words: list[str], folder: Path, environment: dict[str, str], output: Path) -> None:
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    os.chdir(folder)
    written = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(written, stream.fileno())
        stream.reconfigure(write_through=True)
    sys.argv = ["flexmarl", *words]
    from flexmarl.cli import main

    main()
