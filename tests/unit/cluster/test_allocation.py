"""The ledger of training places (law 4)."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.cluster.allocation import Places
from flexmarl.records import PolicyName

NAMES = [PolicyName(name) for name in ("critic", "planner", "solver", "verifier")]


@given(number=st.integers(0, 3), turns=st.lists(st.sampled_from(NAMES), max_size=60))
def test_no_place_is_leased_twice_and_none_is_lost(number: int, turns: list[PolicyName]) -> None:
    places, held, last = Places(number), {}, {}
    for policy in turns:  # whoever has a place gives it back, whoever has none asks for one
        if policy in held:
            places.release(policy)
            last[held.pop(policy)] = policy
            continue
        free = set(range(number)) - set(held.values())
        lease = places.lease(policy)
        assert (lease is None) == (not free)
        if lease:
            assert lease.place in free
            assert last.get(lease.place) == policy or policy not in {last.get(place) for place in free}
            held[policy] = lease.place
        assert {lease.holder: lease.place for lease in places.leases} == held
        assert places.free == number - len(held)


def test_a_policy_gets_the_place_it_had_then_an_unused_one_then_the_one_that_was_left_first() -> None:
    places = Places(2)

    def lease(policy: str) -> tuple[int, str]:
        found = places.lease(PolicyName(policy))
        assert found
        return found.place, found.because

    assert lease("solver") == (0, "nobody has been there")
    places.release(PolicyName("solver"))
    assert lease("verifier") == (1, "nobody has been there")
    places.release(PolicyName("verifier"))
    assert lease("verifier") == (1, "it was there last")
    places.release(PolicyName("verifier"))
    assert lease("critic") == (0, "'solver' left it first")
    assert places.free == 1
