"""Which conversations keep their keys and values."""

import numpy as np

from flexmarl.inference.prefixes import KeptPrefixes


def ids(*values):
    return np.array(values, np.int32)


def test_a_conversation_finds_its_longest_common_prefix():
    kept = KeptPrefixes(range(10, 12))
    assert kept.keep("a", ids(1, 2, 3, 4)) == (10, 0)
    found = kept.find("a", ids(1, 2, 9, 9))
    assert found is not None
    assert (found[0].row, found[1]) == (10, 2)


def test_the_last_prompt_token_is_always_computed_anew():
    kept = KeptPrefixes(range(1))
    kept.keep("a", ids(1, 2, 3))
    found = kept.find("a", ids(1, 2, 3))
    assert found is not None
    assert found[1] == 2


def test_others_find_nothing():
    kept = KeptPrefixes(range(1))
    kept.keep("a", ids(1, 2, 3))
    assert kept.find("b", ids(1, 2, 3)) is None
    assert kept.find(None, ids(1, 2, 3)) is None
    assert kept.find("a", ids(7, 2, 3)) is None


def test_a_longer_turn_copies_only_what_is_new():
    kept = KeptPrefixes(range(5, 6))
    kept.keep("a", ids(1, 2, 3))
    assert kept.keep("a", ids(1, 2, 3, 4, 5)) == (5, 3)


def test_the_longest_unused_conversation_makes_room_and_its_tokens_are_not_trusted():
    kept = KeptPrefixes(range(2))
    kept.keep("a", ids(1, 2))
    kept.keep("b", ids(1, 2))
    assert kept.find("a", ids(1, 2, 3)) is not None
    assert kept.keep("c", ids(1, 2)) == (1, 0)
    assert kept.find("b", ids(1, 2, 3)) is None
    assert kept.find("a", ids(1, 2, 3)) is not None


def test_new_weights_clear_everything():
    kept = KeptPrefixes(range(2))
    kept.keep("a", ids(1, 2))
    kept.clear()
    assert kept.find("a", ids(1, 2, 3)) is None
    assert len(kept) == 0
    assert {kept.keep(name, ids(1))[0] for name in "bc"} == {0, 1}  # type: ignore[index]


def test_without_rows_nothing_is_kept():
    assert KeptPrefixes(range(0)).keep("a", ids(1)) is None
