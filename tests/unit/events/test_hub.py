"""Who hears of an event, and that every event is read back as it was written."""

import typing
from dataclasses import fields
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.events.catalogue import CATALOGUE, PAGES, events_in
from flexmarl.events.event import NOW, Event, Events, Notice, Timed
from flexmarl.events.group_events import GroupFailed, GroupFiltered
from flexmarl.events.journal import Journal, RememberedEvents, read_journal
from flexmarl.events.notices import RowsReady
from flexmarl.events.run_events import RunFailed, StepEnded
from flexmarl.records import CONTROLLER, InstanceId, WorkerId

names = st.text("abcdefgh_-.0123456789", min_size=1, max_size=8)
instances = st.builds(InstanceId, names, st.integers(0, 99))
workers = st.one_of(st.just(CONTROLLER), instances.map(WorkerId.engine), names.map(WorkerId.trainer))
moments = st.floats(0, 1e6).map(lambda t: round(t, 6))
plain_values = st.dictionaries(names, st.integers() | names | st.booleans() | st.floats(-1e9, 1e9), max_size=3)


def strategy_of(hint):
    hint = getattr(hint, "__supertype__", hint)
    origin = typing.get_origin(hint)
    if origin is tuple:
        return st.lists(strategy_of(typing.get_args(hint)[0]), max_size=4).map(tuple)
    if origin is not None:
        value = typing.get_args(hint)[1]
        return st.dictionaries(names, plain_values if value is typing.Any else strategy_of(value), max_size=3)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    kinds = {InstanceId: instances, WorkerId: workers, str: names, int: st.integers(0, 10**9), bool: st.booleans()}
    return kinds.get(hint, st.floats(-1e9, 1e9))


@st.composite
def events(draw):
    kind = draw(st.sampled_from(list(CATALOGUE.values())))
    hints = typing.get_type_hints(kind)
    values = {one.name: draw(strategy_of(hints[one.name])) for one in fields(kind) if one.name != "command"}
    if issubclass(kind, Timed):
        values["began"], values["ended"], values["t"] = sorted(draw(moments) for _ in range(3))
    else:
        values["t"] = draw(moments)
    return kind(**values)


@given(st.lists(events(), max_size=5))
def test_every_event_is_read_back_as_it_was_written(tmp_path_factory, written):
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    path.unlink(missing_ok=True)
    journal = Journal(path)
    for event in written:
        journal.write(event)
    journal.close()
    assert list(read_journal(path)) == written


def test_every_type_has_a_name_of_its_own_and_says_what_its_fields_are():
    kinds = [kind for module in PAGES.values() for kind in events_in(module)]
    assert len({kind.name for kind in kinds}) == len(kinds) == len(CATALOGUE) > 40
    assert all(kind.__doc__ for kind in kinds)
    reserved = {"event", "format"}  # Keys of a line that are no field.
    assert not [one.name for kind in kinds for one in fields(kind) if one.name in reserved]


@pytest.mark.parametrize("turned", [False, True])
def test_two_who_listen_to_one_type_both_hear_whoever_came_first(turned):
    events, heard = Events(lambda: 1.0), {"journal": [], "monitor": []}
    for name in sorted(heard, reverse=turned):
        events.listen(GroupFailed, heard[name].append)
    events.emit(GroupFailed(group=1))
    events.emit(GroupFiltered(group=2))
    events.emit(GroupFailed(group=3))
    assert [[event.group for event in of_one] for of_one in heard.values()] == [[1, 3], [1, 3]]


@pytest.mark.parametrize("turned", [False, True])
def test_all_hear_events_in_one_order_also_those_that_a_listener_emits(turned):
    events, heard = Events(lambda: 1.0), []

    def answer(event):
        events.emit(RunFailed(because=f"of {event.group}"))

    def note(event):
        heard.append(event.name)

    for kind, hear in [(GroupFailed, answer), (Event, note)][:: -1 if turned else 1]:
        events.listen(kind, hear)
    events.emit(GroupFailed(group=1))
    assert heard == ["group_failed", "run_failed"]


def test_a_notice_reaches_who_listens_to_it_and_is_no_line_of_the_journal():
    events, heard = RememberedEvents(), []
    events.listen(Notice, lambda any: heard.append(type(any)))
    events.listen(RowsReady, lambda rows: heard.extend(rows.policies))
    events.emit(RowsReady(policies=frozenset({"solver"})))
    events.emit(GroupFailed(group=1))
    assert heard == [RowsReady, "solver", GroupFailed]
    assert [event.name for event in events.all] == ["group_failed"]


def test_after_a_listener_that_fails_the_next_event_is_heard():
    events, heard = Events(lambda: 1.0), []

    def fail(event):
        raise OSError("no space left")

    events.listen(GroupFailed, fail)
    events.listen(RunFailed, heard.append)
    with pytest.raises(OSError, match="no space"):
        events.emit(GroupFailed(group=1))
    events.emit(RunFailed(because="OSError"))
    assert [event.because for event in heard] == ["OSError"]


def test_an_event_that_took_time_ends_when_it_is_emitted_or_earlier_and_never_before_it_began():
    events = RememberedEvents(lambda: 5.0)
    for began, ended in ((1.0, NOW), (1.0, 4.0), (5.000001, NOW)):
        events.emit(StepEnded(process=CONTROLLER, began=began, ended=ended, step=0, trained=(), versions={}))
    assert [(event.began, event.ended, event.t) for event in events.of(StepEnded)] == [
        (1.0, 5.0, 5.0), (1.0, 4.0, 5.0), (5.0, 5.0, 5.0),
    ]  # fmt: skip


def test_ids_are_their_text_and_know_their_parts():
    engine = WorkerId.parse("engine/solver/3")
    assert (engine, engine.kind, engine.policy, engine.number) == ("engine/solver/3", "engine", "solver", 3)
    assert engine.instance == InstanceId("solver", 3) == "solver/3"
    assert (WorkerId.trainer("solver"), CONTROLLER) == ("trainer/solver", "controller")
    with pytest.raises(ValueError, match="'trainer/solver' is no engine"):
        _ = WorkerId.trainer("solver").instance
    with pytest.raises(ValueError, match="must look like 'solver/0', got 'solver'"):
        InstanceId.parse("solver")
