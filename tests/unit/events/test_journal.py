import asyncio
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from flexmarl.errors import EngineError, FlexmarlError
from flexmarl.events.group_events import GroupAdmitted, GroupFailed
from flexmarl.events.journal import FORMAT, Journal, RememberedEvents, read_journal
from flexmarl.events.run_events import RunFailed
from flexmarl.events.safe_json import MAX_ARRAY, MAX_TEXT, is_secret_key, masked, plain
from flexmarl.events.training_events import Updated
from flexmarl.records import WorkerId
from flexmarl.simulator.virtual_time import run_virtual
from tests.secret_texts import SECRET, secret_texts
from tests.unit.events.runs import events_on


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Move:
    instance: int
    to: str
    token: str = "x"


class Remote(BaseModel):
    url: str
    api_key: str
    password: SecretStr


def failed(because, t=0.0):
    return RunFailed(t=t, because=because)


def told(path):
    return [event.because for event in read_journal(path)]


def test_an_event_is_one_line_with_its_time_and_its_reason(tmp_path):
    now = [12.25]
    events = events_on(tmp_path / "journal.jsonl", lambda: now[0])
    events.emit(GroupAdmitted(group=3, step=1, task="add-3", because="2 of 4 slots free"))
    now[0] = 13.0000004
    events.emit(RunFailed())
    assert (tmp_path / "journal.jsonl").read_text().splitlines() == [
        f'{{"t":0.0,"event":"journal","format":{FORMAT}}}',
        '{"t":12.25,"event":"group_admitted","because":"2 of 4 slots free","group":3,"step":1,"task":"add-3"}',
        '{"t":13.0,"event":"run_failed"}',
    ]


def test_an_event_is_in_the_file_before_the_journal_is_closed(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(failed("a"))
    assert told(tmp_path / "journal.jsonl") == ["a"]
    journal.close()
    journal.close()


def test_values_of_every_kind_are_written_plainly():
    values = {
        "enum": Colour.RED,
        "path": Path("runs") / "a",
        "record": Move(instance=2, to="solver"),
        "settings": Remote(url="http://x", api_key="abc", password=SecretStr("abc")),
        "numpy": (np.float32(0.5), np.int64(3), np.bool_(True), np.array([[1, 2]], dtype=np.int32)),
        "large": np.zeros((MAX_ARRAY, 2), dtype=np.float32),
        "set": {3, 1},
        "bytes": b"1234",
        "error": EngineError("it broke"),
        "not finite": [float("nan"), float("-inf"), np.float64("nan")],
        "keys": {1: "one", Colour.RED: 2, ("a", 1): 3},
        "long": "x" * (MAX_TEXT + 1),
        "nothing": None,
    }
    events = RememberedEvents()
    events.emit(Updated(process=WorkerId.trainer("a"), began=0.0, policy="a", version=1, report=values))
    (written,) = events.of(Updated)
    assert written.report == {
        "enum": "red",
        "path": "runs/a",
        "record": {"instance": 2, "to": "solver", "token": "***"},
        "settings": {"url": "http://x", "api_key": "***", "password": "***"},
        "numpy": [0.5, 3, True, [[1, 2]]],
        "large": "float32[1024, 2]",
        "set": [1, 3],
        "bytes": "4 bytes",
        "error": "EngineError: it broke",
        "not finite": ["nan", "-inf", "nan"],
        "keys": {"1": "one", "red": 2, "('a', 1)": 3},
        "long": "x" * MAX_TEXT + "... (10001 characters)",
        "nothing": None,
    }


def test_what_holds_itself_is_written_to_a_bounded_depth():
    loop: list = []
    loop.append(loop)
    assert "..." in json.dumps(plain(loop))


def test_text_of_any_language_survives(tmp_path):
    text = "naïve 团队 \u2028 \n \x00 \ud800"
    Journal(tmp_path / "journal.jsonl").write(failed(text))
    assert told(tmp_path / "journal.jsonl") == [text]


@pytest.mark.parametrize("torn", [b'{"t":1,"ev', b'{"t":1,"event":"b"}', b"\xff\x00", b"x" * 10_000])
def test_a_torn_last_line_is_passed_over_and_cut_off_by_the_next_run(tmp_path, torn):
    path = tmp_path / "journal.jsonl"
    Journal(path).write(failed("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert told(path) == ["a"]
    Journal(path).write(failed("c"))
    assert told(path) == ["a", "c"]


@given(cut=st.integers(min_value=0, max_value=400))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_gives_all_whole_events(tmp_path_factory, cut):
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.unlink(missing_ok=True)
    journal = Journal(path)
    for index in range(10):
        journal.write(failed(str(index)))
    kept = path.read_bytes()[:cut]
    path.write_bytes(kept)
    assert told(path) == [str(index) for index in range(kept.count(b"\n") - 1)]


def test_a_spoiled_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path).write(failed("a"))
    with path.open("a") as file:
        file.write('nonsense\n{"t":2,"event":"run_failed"}\n')
    with pytest.raises(FlexmarlError, match=r"journal.jsonl, line 3: not JSON"):
        list(read_journal(path))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [('{"t":1,"event":"landed"}', "'landed' is no event"), ('{"t":1,"event":"group_failed"}', "lacks group")],
)
def test_a_line_that_is_no_event_is_an_error_that_names_it(tmp_path, line, wrong):
    path = tmp_path / "journal.jsonl"
    Journal(path).close()
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FlexmarlError, match=rf"journal.jsonl, line 2: .*{wrong}"):
        list(read_journal(path))


@pytest.mark.parametrize("found", [1, FORMAT - 1, FORMAT + 1])
def test_a_journal_of_another_format_is_neither_read_nor_continued(tmp_path, found):
    path = tmp_path / "journal.jsonl"
    first = '{"t":0.0,"event":"run_started","seed":1}'  # Format 1 had no line before it.
    first = first if found == 1 else f'{{"t":0.0,"event":"journal","format":{found}}}'
    path.write_text(first + "\n")
    for use in (Journal, lambda path: list(read_journal(path))):
        with pytest.raises(FlexmarlError, match=rf"format {found}, and this version of flexmarl reads format {FORMAT}"):
            use(path)
    assert path.read_text() == first + "\n"


def test_moments_of_the_event_loop_become_moments_of_the_journal():
    async def scenario():
        time = asyncio.get_running_loop().time
        await asyncio.sleep(5)
        events = RememberedEvents(lambda: time() - 5)
        began = time()
        await asyncio.sleep(2)
        assert (events.moment(began), events.now()) == (0.0, 2.0)

    run_virtual(scenario())


def test_events_are_found_by_type():
    events = RememberedEvents(clock=iter([1.0, 2.0, 3.0]).__next__)
    events.emit(failed("a"))
    events.emit(GroupFailed(group=2))
    events.emit(failed("b"))
    assert [(event.t, event.because) for event in events.of(RunFailed)] == [(1.0, "a"), (3.0, "b")]


secret_keys = st.sampled_from(
    ["token", "api_key", "password", "authorization", "HF_TOKEN", "X-Api-Key", "apiKey", "aws_secret_access_key"]
)
filler = st.text(alphabet=" \n\t'\"{}=:é", max_size=12)
leaf = (
    st.tuples(filler | st.sampled_from(["", "(", "a "]), secret_texts, st.sampled_from(["", " ", "\n", ", x"])).map(
        "".join
    )
    | st.dictionaries(secret_keys, st.just(SECRET) | st.just([SECRET]) | st.just({"a": SECRET}), max_size=2)
    | st.builds(Move, instance=st.just(1), to=st.just("a"), token=st.just(SECRET))
    | st.builds(EngineError, secret_texts)
    | st.integers()
    | st.floats()
)
nested = st.recursive(
    leaf,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(filler | secret_texts, inner, max_size=3)
        | st.just("x" * MAX_TEXT).flatmap(lambda pad: secret_texts.map(lambda text: pad[: MAX_TEXT - 8] + " " + text))
    ),
    max_leaves=12,
)


@given(value=nested, because=secret_texts)
@settings(max_examples=300, deadline=None)
def test_a_secret_is_never_in_the_file(tmp_path_factory, value, because):
    path = tmp_path_factory.getbasetemp() / "secret.jsonl"
    path.unlink(missing_ok=True)
    report = {"value": value, "api_key": SECRET}
    Journal(path).write(
        Updated(
            t=1.0,
            process=WorkerId.trainer("a"),
            began=0.0,
            ended=1.0,
            policy="a",
            version=1,
            report=report,
            because=because,
        )
    )
    assert SECRET not in path.read_text()
    assert len(list(read_journal(path))) == 1


@pytest.mark.parametrize("key", ["num_tokens", "tokens", "max_tokens", "tokenizer", "tokens_per_s", "key", "monkey"])
def test_counts_of_tokens_are_no_secrets(key):
    assert not is_secret_key(key)


@pytest.mark.parametrize("text", ["x = 12", "risk-averse", "a task-specific-adapter-with-a-long-name", "12 tokens"])
def test_harmless_text_is_left_alone(text):
    assert masked(text) == text
