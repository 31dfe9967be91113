"""Failed episodes: the first of each kind is kept, all are counted, and none is kept with a secret."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.events.event import Events
from flexmarl.events.failures import MOST_KINDS, MOST_TRACE, Failures, read_failures, trace_of
from flexmarl.events.notices import EpisodeBroke
from flexmarl.events.untrained import counted, in_words
from flexmarl.records import EpisodeId, Failure, Purpose


def broke(failure, error=None, episode="g0e0a0"):
    return EpisodeBroke(
        episode=EpisodeId(episode), task="task-0", purpose=Purpose.TRAINING, failure=failure, error=error
    )


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def log_in(folder):
    events = Events(lambda: 1.5)
    return Failures(folder, events), events


def test_the_first_failure_of_each_kind_is_kept_with_its_traceback_and_read_back(tmp_path):
    log, events = log_in(tmp_path / "failures")
    events.emit(broke(Failure(kind="ValueError", text="boom", place="team.py:61"), raised(ValueError("boom"))))
    events.emit(broke(Failure(kind="ValueError", text="bang", place="team.py:61"), raised(ValueError("bang"))))
    events.emit(broke(Failure(kind="ValueError", text="boom", place="team.py:70"), episode="g1e0a0"))
    assert [(one.kind, one.text, one.place) for one in log.kept] == [
        ("ValueError", "boom", "team.py:61"),
        ("ValueError", "boom", "team.py:70"),
    ]
    assert log.kept[0].traceback.endswith("ValueError: boom")
    assert "in raised" in log.kept[0].traceback
    assert (log.kept[1].episode, log.kept[1].traceback, log.kept[1].t) == ("g1e0a0", "", 1.5)
    assert read_failures(tmp_path / "failures") == log.kept
    assert [path.name for path in sorted((tmp_path / "failures").iterdir())] == [
        "01-ValueError-team.py-61.txt",
        "02-ValueError-team.py-70.txt",
    ]


def test_a_resumed_run_keeps_no_kind_twice(tmp_path):
    failure = Failure(kind="KeyError", text="1", place="team.py:3")
    log_in(tmp_path)[1].emit(broke(failure))
    again, events = log_in(tmp_path)
    events.emit(broke(failure))
    events.emit(broke(Failure(kind="OSError")))
    assert [one.kind for one in again.kept] == ["KeyError", "OSError"]
    assert len(list(tmp_path.iterdir())) == 2


def test_the_number_and_the_size_of_kept_failures_are_bounded(tmp_path):
    _, events = log_in(tmp_path)
    for number in range(MOST_KINDS + 20):
        error = raised(ValueError("x" * 100_000))
        events.emit(broke(Failure(kind="ValueError", place=f"team.py:{number}"), error))
    files = list(tmp_path.iterdir())
    assert len(files) == MOST_KINDS
    assert all(file.stat().st_size < MOST_TRACE + 1_000 for file in files)
    assert len(read_failures(tmp_path)) == MOST_KINDS


def test_no_secret_is_kept(tmp_path):
    secret = "hf_abcdefgh12345678"
    _, events = log_in(tmp_path)
    try:
        raise KeyError("inner") from ValueError(f"password={secret}")
    except KeyError as error:
        events.emit(broke(Failure(kind="KeyError", text=f"token={secret}", place="team.py:1"), error))
    (file,) = tmp_path.iterdir()
    assert secret not in file.read_text() + file.name
    assert "password=***" in file.read_text()
    assert secret not in " ".join(counted([Failure(kind="KeyError", text=f"token={secret}")]))


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "failures").write_text("a file in the place of the folder")
    log, events = log_in(tmp_path / "failures")
    events.emit(broke(Failure(kind="ValueError")))
    assert [one.kind for one in log.kept] == ["ValueError"]


class Odd(Exception):
    def __str__(self):
        raise SystemError("no text")


@pytest.mark.parametrize("error", [Odd(), ValueError("\ud83d \x1b[2J"), ExceptionGroup("g", [ValueError("in it")])])
def test_any_exception_has_a_trace_that_a_file_takes(error):
    trace = trace_of(raised(error))
    trace.encode()
    assert "\x1b" not in trace
    assert type(error).__name__ in trace


KINDS = st.builds(
    Failure,
    kind=st.sampled_from(["ValueError", "KeyError"]),
    text=st.sampled_from(["", "a", "b"]),
    place=st.sampled_from(["", "team.py:1", "team.py:2"]),
)


@given(st.lists(st.one_of(st.none(), KINDS)))
def test_every_failure_is_counted_once_under_its_kind_and_place(failures):
    counts = counted(failures)
    kinds = Counter((one.kind, one.place) for one in failures if one)
    assert sum(counts.values()) == sum(kinds.values())
    assert sorted(counts.values(), reverse=True) == list(counts.values())
    assert sorted(counts.values()) == sorted(kinds.values()) or len(counts) < len(kinds)


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 9), min_size=1))
def test_words_name_the_first_reasons_and_count_the_rest(counts):
    words = in_words(counts, 2)
    first = next(iter(counts))
    assert first in words
    if len(counts) > 2:
        left = sum(list(counts.values())[2:])
        assert words.endswith(f"{left} other" if left == 1 else f"{left} others")
