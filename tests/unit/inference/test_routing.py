"""Which instance serves a request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import EngineError
from flexmarl.inference.routing import Router


def test_the_least_loaded_instance_is_chosen_and_the_reason_says_so():
    router = Router(["a", "b"])
    assert router.place(100).instance == "a"
    chosen = router.place(10)
    assert (chosen.instance, chosen.because) == ("b", "least work: 0 tokens")
    assert router.place(10).instance == "b"
    assert router.place(10).because == "least work: 20 tokens"


def test_equals_take_turns():
    router = Router(["a", "b", "c"])
    chosen = []
    for _ in range(6):
        chosen.append(router.place(5).instance)
        router.finish(chosen[-1], 5)
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_a_conversation_returns_to_its_prefix_unless_that_instance_has_more_to_do():
    router = Router(["a", "b"])
    assert router.place(10, "c").instance == "a"
    router.finish("a", 10)
    back = router.place(10, "c")
    assert (back.instance, back.because) == ("a", "keeps the prefix of 'c' and has no more work than others")
    assert router.place(10, "c").instance == "b"
    assert router.place(10, "c").instance == "b"


def test_a_removed_instance_is_never_chosen_and_its_conversations_move():
    router = Router(["a", "b"])
    router.place(1, "c")
    router.remove("a")
    router.finish("a", 1)
    assert router.place(1, "c").instance == "b"
    assert router.place(1).because == "the only instance"
    router.remove("b")
    router.remove("b")
    with pytest.raises(EngineError, match="no live instance"):
        router.place(1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["place", "finish", "remove", "add"]), st.integers(0, 50)), max_size=200))
def test_the_choice_is_always_a_least_loaded_live_instance(moves):
    router, open_work = Router(["i0", "i1"]), []
    loads, made = {"i0": 0, "i1": 0}, 2
    for move, number in moves:
        if move == "place" and loads:
            chosen = router.place(number).instance
            assert loads[chosen] == min(loads.values())
            loads[chosen] += number
            open_work.append((chosen, number))
        elif move == "finish" and open_work:
            instance, work = open_work.pop(number % len(open_work))
            router.finish(instance, work)
            if instance in loads:
                loads[instance] -= work
        elif move == "remove" and len(loads) > 1:
            gone = sorted(loads)[number % len(loads)]
            router.remove(gone)
            del loads[gone]
        elif move == "add" and made < 6:
            router.add(f"i{made}")
            loads[f"i{made}"] = 0
            made += 1
    assert {name: router.load(name) for name in router.instances} == loads
