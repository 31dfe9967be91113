"""Stop strings and ids."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.inference.backends.embedded.sampler import StopWatch
from flexmarl.records import Sampling

PIECES = ["a", "b", "ab", "</", "answer", ">", "x>", " ", "er>y", "\n\n", "é", ""]


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def utf8(ids):
    return bytes(ids).decode(errors="replace")


def end_of(ids, sampling, *, decoder=decode, size=12):
    """How many tokens the watch lets through, or None."""
    watch = StopWatch(size, decoder)
    watch.watch(sampling)
    for end in range(1, len(ids) + 1):
        response = np.array(ids[:end], np.int32)
        if watch.suspects(np.array([ids[end - 1]])) and watch.ended(sampling, response):
            return end
    return None


def test_a_stop_string_may_straddle_tokens_and_end_inside_one():
    sampling = Sampling(stop=("</answer>",))
    assert end_of([0, 3, 4, 5, 0], sampling) == 4
    assert end_of([3, 4, 6, 0], sampling) is None
    answer_y = [3, 4, 5]
    assert end_of(answer_y, sampling) == 3
    assert end_of([3, 4, 0, 3, 4, 5], sampling) == 6


def test_a_stop_string_made_of_parts_of_utf8_characters_is_found():
    assert end_of(list("caféx".encode()), Sampling(stop=("é",)), decoder=utf8, size=256) == 5


def test_a_stop_id_ends_only_the_request_that_names_it():
    watch = StopWatch(10, decode)
    watch.watch(Sampling(stop_ids=(4,)))
    assert list(watch.suspects(np.array([1, 4, 4]))) == [1, 2]
    assert watch.ended(Sampling(stop_ids=(4,)), np.array([1, 4], np.int32))
    assert not watch.ended(Sampling(), np.array([1, 4], np.int32))


def test_without_conditions_nothing_is_decoded():
    watch = StopWatch(10, lambda ids: 1 / 0)  # type: ignore[arg-type,return-value]
    assert list(watch.suspects(np.arange(10))) == []


def test_a_token_is_decoded_alone_once_and_only_suspects_are_looked_at_again():
    seen = []

    def counting(ids):
        seen.append(tuple(ids))
        return decode(ids)

    watch = StopWatch(len(PIECES), counting)
    watch.watch(Sampling(stop=("b",)))
    assert list(watch.suspects(np.array([0, 1, 2, 0, 0]))) == [1, 2]
    assert list(watch.suspects(np.array([0, 1, 0, 0, 2]))) == [1, 4]
    assert seen == [(0,), (1,), (2,)]


def test_later_conditions_widen_the_watch():
    watch = StopWatch(len(PIECES), decode)
    watch.watch(Sampling(stop=("b",)))
    assert list(watch.suspects(np.array([0, 5]))) == []
    watch.watch(Sampling(stop=(">",)))
    assert list(watch.suspects(np.array([0, 5]))) == [1]


def test_stop_strings_without_a_tokenizer_and_empty_ones_are_refused():
    assert "tokenizer" in StopWatch(10, None).refuse(Sampling(stop=("x",)))
    assert "empty" in StopWatch(10, decode).refuse(Sampling(stop=("",)))
    assert StopWatch(10, None).refuse(Sampling(stop_ids=(1,))) == ""


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=60),
    st.lists(st.text("ab</answer>y \né", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_the_watch_stops_at_the_first_token_whose_text_contains_a_stop_string(ids, stops):
    expected = next((n for n in range(1, len(ids) + 1) if any(s in decode(ids[:n]) for s in stops)), None)
    assert end_of(ids, Sampling(stop=tuple(stops))) == expected


@settings(max_examples=100, deadline=None)
@given(st.text("aé€😀", min_size=1, max_size=20), st.text("aé€😀", min_size=1, max_size=4))
def test_bytes_that_make_a_character_together_are_matched_when_the_last_one_is_there(text, stop):
    ids = list(text.encode())
    expected = next((n for n in range(1, len(ids) + 1) if stop in utf8(ids[:n])), None)
    assert end_of(ids, Sampling(stop=(stop,)), decoder=utf8, size=256) == expected
