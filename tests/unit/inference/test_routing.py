"""Which instance serves a request."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import EngineError
from flexmarl.inference.routing import ROUTINGS, Load, Router


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


def test_a_conversation_returns_to_an_instance_with_little_more_to_do_but_not_with_far_more():
    router = Router(["a", "b"], "conversations")
    assert router.place(10, "c").instance == "a"
    back = router.place(10, "c")  # 10 tokens more than b, and the mean is 10
    assert (back.instance, back.because) == ("a", "keeps the prefix of 'c' and has little more work than others")
    assert router.place(10, "c").instance == "b", "20 tokens more are more than the mean of 15"
    assert router.place(10, "c").instance == "b", "the conversation has moved"


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


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["place", "finish", "remove", "add"]), st.integers(0, 50)), max_size=200),
    st.sampled_from(list(ROUTINGS)),
    st.sampled_from([None, 1, 3]),
)
def test_the_choice_is_always_a_least_loaded_live_instance_with_a_place(moves, routing, max_running):
    router, open_work = Router(["i0", "i1"], routing, max_running=max_running), []
    loads, made = {"i0": Load(), "i1": Load()}, 2
    for move, number in moves:
        free = [load for load in loads.values() if max_running is None or load.requests < max_running]
        assert router.has_place == bool(free)
        if move == "place" and free:
            chosen = router.place(number).instance
            measure = ROUTINGS[routing].measure
            assert loads[chosen] in free
            assert measure(loads[chosen]) == min(map(measure, free))
            loads[chosen] = Load(loads[chosen].tokens + number, loads[chosen].requests + 1)
            open_work.append((chosen, number))
        elif move == "finish" and open_work:
            instance, tokens = open_work.pop(number % len(open_work))
            router.finish(instance, tokens)
            if instance in loads:
                loads[instance] = Load(loads[instance].tokens - tokens, loads[instance].requests - 1)
        elif move == "remove" and len(loads) > 1:
            gone = sorted(loads)[number % len(loads)]
            router.remove(gone)
            del loads[gone]
        elif move == "add" and made < 6:
            router.add(f"i{made}")
            loads[f"i{made}"] = Load()
            made += 1
    booked = {name: (router.load(name).tokens, router.load(name).requests) for name in router.instances}
    assert booked == {name: (load.tokens, load.requests) for name, load in loads.items()}


def test_fewest_requests_counts_requests_and_equals_take_turns():
    router = Router(["a", "b"], "least_requests")
    assert [router.place(tokens).instance for tokens in (100, 1, 1)] == ["a", "b", "a"]
    assert router.place(1).because == "fewest requests: 1"
    router.finish("a", 100)
    router.finish("a", 1)
    assert router.place(1).because == "fewest requests: 0"


def test_round_robin_looks_at_no_load():
    router = Router(["a", "b", "c"], "round_robin")
    chosen = [router.place(100, "conversation") for _ in range(4)]
    assert [one.instance for one in chosen] == ["a", "b", "c", "a"]
    assert {one.because for one in chosen} == {"its turn"}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_an_instance_that_is_full_is_not_chosen_until_it_has_finished_a_request(routing):
    router = Router(["a", "b"], routing, max_running=2)
    assert sorted(router.place(10).instance for _ in range(4)) == ["a", "a", "b", "b"]
    assert not router.has_place
    with pytest.raises(EngineError, match="no live instance has a place"):
        router.place(10)
    router.finish("b", 10)
    assert router.place(10).instance == "b"
    router.add("c")
    assert [router.place(10).instance for _ in range(2)] == ["c", "c"]
    assert not router.has_place


def test_a_conversation_does_not_return_to_an_instance_that_is_full():
    router = Router(["a", "b"], max_running=1)
    assert router.place(0, "c").instance == "a"
    assert router.place(0, "c").instance == "b"
