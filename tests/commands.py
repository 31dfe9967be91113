"""Several commands of `flexmarl`, each in a process of its own, for one start of an interpreter.

Most of the time of a short command goes into imports. So one process imports, and a fork of it is each command.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FORKS = """
import json, os, sys
import flexmarl.assemble.commands, flexmarl.inference.backends.embedded.engine, flexmarl.training.backends.single
from flexmarl.cli import main

folder, codes = sys.argv[1], []
for number, words in enumerate(json.load(sys.stdin)):
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = ["flexmarl", *words]
        main()
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
Command = Sequence[object]


def run_commands(
    *commands: Command, cwd: Path, environment: Mapping[str, str] = {}
) -> list[subprocess.CompletedProcess[bytes]]:
    """Runs the commands one after the other, whatever becomes of each, and returns how they ended."""
    words = [list(map(str, command)) for command in commands]
    with tempfile.TemporaryDirectory() as folder:
        codes = subprocess.run(
            [sys.executable, "-c", FORKS, folder],
            cwd=cwd,
            env={**os.environ, **environment},
            input=json.dumps(words),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        return [
            subprocess.CompletedProcess(
                command, code, *((Path(folder) / f"{number}.{name}").read_bytes() for name in ("stdout", "stderr"))
            )
            for number, (command, code) in enumerate(zip(words, json.loads(codes), strict=True))
        ]
