"""Any exception of anybody's has a text that can be written anywhere."""

import gc
import json
import sys
import threading
from dataclasses import dataclass
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import (
    MAX_TEXT,
    EngineError,
    EpisodeError,
    boundary,
    cause_of,
    described,
    frame_of,
    place_of,
    writable,
)
from flexmarl.events.safe_json import plain


def repr_of_kind(value):
    return type(value).__name__


@given(text=st.text(st.characters(), max_size=200))
def test_a_text_that_was_made_writable_can_be_written_and_is_otherwise_the_same(text):
    made = writable(text)
    made.encode()
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in made)
    if text.isprintable():
        assert made == text


def test_a_long_text_is_cut_and_says_how_long_it_was():
    assert writable("x" * 10**6) == f"{'x' * MAX_TEXT}... (1000000 characters)"


def test_the_place_of_an_error_in_a_method_that_dataclass_wrote_is_the_line_that_called_it():
    @dataclass(order=True)
    class Move:
        sticks: int | str

    with pytest.raises(TypeError) as raised:
        assert Move(1) < Move("one")
    assert place_of(raised.value) == f"test_errors.py:{raised.tb.tb_lineno}"


@pytest.mark.parametrize("broken", [ValueError, SystemExit, GeneratorExit])
def test_an_error_whose_text_raises_is_described_by_its_type(broken):
    class Wordless(Exception):
        def __str__(self):
            raise broken

    said = f"Wordless: (its __str__ raised {broken.__name__})"
    assert described(Wordless()) == plain(Wordless()) == said
    with pytest.raises(EpisodeError) as raised, boundary(EpisodeError, "playing"):
        raise Wordless
    assert str(raised.value) == f"playing: {said}"


def test_an_error_whose_type_has_no_name_for_who_asks_is_described_all_the_same():
    class Nameless(type):
        @property
        def __name__(cls):
            raise SystemExit("no name")

    class Odd(Exception, metaclass=Nameless):
        pass

    assert described(Odd("x")) == "Odd: x"


def test_the_cause_of_groups_in_groups_is_found_however_deep():
    error = ExceptionGroup("", [ValueError("torn"), EngineError("lost")])
    for _ in range(5000):
        error = ExceptionGroup("", [error])
    assert str(cause_of(error)) == "lost"


@pytest.mark.parametrize("value", [10**5000, "\ud83d", "\0", float("nan"), {"\ud83d": 1}], ids=repr_of_kind)
def test_any_value_goes_into_a_line_of_the_journal(value):
    json.dumps(plain({"value": value}), allow_nan=False).encode()


def test_nothing_is_collected_while_the_frames_of_threads_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection there can wait for a thread that waits for the lookup: see `frame_of`."""
    real, inside, collected = sys._current_frames, [False], list[bool]()

    def looked_up() -> dict[int, FrameType]:
        inside[0] = True
        found = [real() for _ in range(50)][-1]  # Objects enough for some collections, if there are any.
        inside[0] = False
        return found

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(inside[0])

    monkeypatch.setattr(sys, "_current_frames", looked_up)
    before = gc.get_threshold()
    gc.set_threshold(1)
    gc.callbacks.append(note)
    try:
        [[] for _ in range(100)]
        assert collected, "the witness: objects are collected all the time"
        found = frame_of(threading.get_ident())
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert found is not None
    assert not any(collected)


def test_a_thread_that_has_ended_has_no_frame() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert frame_of(thread.ident) is None
    assert frame_of(None) is None
