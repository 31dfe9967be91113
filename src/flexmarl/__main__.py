"""Starts the command line: `flexmarl`, or `python -m flexmarl`. Ctrl-C ends it without a traceback from here on."""

import sys

from flexmarl.imports import collected_later


def main() -> None:
    """Loads the commands, which takes half a second, and runs one."""
    try:
        with collected_later():
            from flexmarl.cli import main as run_command
    except KeyboardInterrupt:
        print("flexmarl: stopped", file=sys.stderr)
        sys.exit(130)
    run_command()


if __name__ == "__main__":
    main()
