"""Errors on the screen: no secret is in them, whoever raised them."""

import subprocess
import sys
from contextlib import redirect_stderr
from io import StringIO

import pytest
from hypothesis import given

from flexmarl import cli
from flexmarl.cli.terminal import print_text, working
from flexmarl.errors import ConfigError, EpisodeError
from tests.secret_texts import SECRET, secret_texts

RAISES = """
from flexmarl.cli.terminal import safe_streams

with safe_streams():
    raise ValueError({text!r})
"""


@given(secret_texts)
def test_a_text_on_stderr_has_no_secret(text: str) -> None:
    with redirect_stderr(StringIO()) as screen:
        print_text(f"the last reason: ValueError: boom {text}", err=True)
    assert "boom" in screen.getvalue()
    assert SECRET not in screen.getvalue()


@given(secret_texts)
def test_an_error_that_ends_a_command_has_no_secret(text: str) -> None:
    error = ExceptionGroup("two tasks", [EpisodeError(f"boom {text}"), ConfigError(f"two\nlines, bearer\n{SECRET}")])
    with redirect_stderr(StringIO()) as screen:
        assert cli.print_error(error) == 2
    assert "boom" in screen.getvalue()
    assert SECRET not in screen.getvalue()


def test_the_traceback_of_a_bug_has_no_secret() -> None:
    text = f"boom token={SECRET}"
    done = subprocess.run([sys.executable, "-c", RAISES.format(text=text)], capture_output=True, text=True, check=False)
    assert "ValueError: boom token=***" in done.stderr
    assert SECRET not in done.stderr


def test_an_error_that_is_not_ours_is_not_printed_as_a_line() -> None:
    with pytest.raises(ValueError, match="boom"):
        cli.print_error(ValueError("boom"))


INTERRUPTED = """
import sys
from importlib.abc import MetaPathFinder


class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt


sys.meta_path.insert(0, Interrupt())
sys.argv = ["flexmarl", "check", {config!r}]
from flexmarl.__main__ import main

main()
"""


@pytest.mark.parametrize("module", ["flexmarl.cli", "flexmarl.assemble.blueprint"])
def test_ctrl_c_while_modules_are_loaded_is_one_line(module: str) -> None:
    code = INTERRUPTED.format(module=module, config="examples/math_team/cpu.yaml")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "flexmarl: stopped\n")


def test_a_terminal_shows_what_is_worked_on_and_a_log_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        with redirect_stderr(StringIO()) as screen, working("loading \x1b[2J things"):
            pass
        return screen.getvalue()

    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert shown() == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "loading ?[2J things" in shown().replace("\\x1b", "?")
    assert shown().endswith("\x1b[2K"), "nothing of it stays"
