"""Who comes onto training devices, and who is set aside for it."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.records import PolicyName
from flexmarl.training.settings import ProcessGroupSettings
from flexmarl.training.swapping import SHORTEST_S, Direction, Need, Standing, Where, gives_way, next_swap

ON_DEMAND = ProcessGroupSettings(prefetch=False)


def policy(name: str, where: Where = Where.AWAY, need: Need = Need.NOTHING, **known) -> Standing:
    known = {"resume_s": 4.0, "suspend_s": 2.0, "sample_s": 0.5, "micro_batch": 16, **known}
    return Standing(policy=PolicyName(name), where=where, need=need, **known)


def waiting(name: str, ready: int, since: float = 0.0, **known) -> Standing:
    return policy(name, need=Need.WAITING, ready=ready, since=since, **known)


def decided(*standings: Standing, free: int = 0, settings=ON_DEMAND, now: float = 0.0) -> tuple[str, str] | None:
    swap = next_swap(standings, free, settings, now)
    return swap and (swap.policy, swap.direction)


def test_a_small_swap_comes_before_a_large_one_with_the_same_work() -> None:
    large, small = waiting("large", 16, resume_s=60.0), waiting("small", 16)
    assert decided(large, small, free=1) == ("small", Direction.RESUME)


@given(
    rivals=st.integers(1, 5),
    ready=st.integers(1, 500),
    swap_s=st.floats(0, 100),
    sample_s=st.floats(0, 5),
)
def test_whoever_waits_long_enough_comes_before_all_who_have_just_come(
    rivals: int, ready: int, swap_s: float, sample_s: float
) -> None:
    old = waiting("old", 1, resume_s=300.0)
    now = 501 / SHORTEST_S * (300.0 + 2.0 + 0.5) ** 2  # no rate of 500 rows is higher than 500 / SHORTEST_S
    new = [waiting(f"new{i}", ready, since=now, resume_s=swap_s, sample_s=sample_s) for i in range(rivals)]
    assert decided(*new, old, free=1, now=now) == ("old", Direction.RESUME)


def test_no_one_is_set_aside_while_a_place_is_on_its_way() -> None:
    resting = policy("resting", Where.HERE)
    assert decided(waiting("solver", 16), resting) == ("resting", Direction.SUSPEND)
    assert decided(waiting("solver", 16), resting, policy("going", Where.GOING)) is None


def test_the_policy_with_fewest_rows_on_the_way_makes_room() -> None:
    some, none = policy("some", Where.HERE, ready=15), policy("none", Where.HERE, since=9.0)
    assert decided(waiting("solver", 16), some, none) == ("none", Direction.SUSPEND)


def test_a_policy_that_holds_is_never_set_aside() -> None:
    assert decided(waiting("solver", 500), policy("verifier", Where.HERE, Need.HOLDING)) is None


def test_a_policy_whose_rows_are_due_is_not_set_aside() -> None:
    due, other = policy("due", Where.HERE, ready=9, due=True), policy("other", Where.HERE, ready=9, suspend_s=9.0)
    assert decided(waiting("solver", 16), due) is None
    assert decided(waiting("solver", 16), due, other) == ("other", Direction.SUSPEND)


def test_a_prefetch_never_takes_devices_from_a_policy_with_rows_on_the_way() -> None:
    settings = ProcessGroupSettings()
    coming = policy("coming", ready=15)
    assert decided(coming, policy("verifier", Where.HERE, ready=1), settings=settings) is None
    assert decided(coming, policy("verifier", Where.HERE), settings=settings) == ("verifier", Direction.SUSPEND)
    assert decided(coming, policy("verifier", Where.HERE), settings=ON_DEMAND) is None


def test_a_holder_gives_way_only_when_the_wait_outweighs_the_swap() -> None:
    holder, rival = policy("solver", Where.HERE, Need.HOLDING, ready=100), waiting("verifier", 4)
    standings = [holder, rival]
    assert gives_way(holder, standings, 0, 1.0) == ""
    assert gives_way(holder, standings, 0, 30.0) == "'verifier' has waited 30.0 s: 2.38/s against 2/s"
    assert gives_way(holder, standings, 1, 30.0) == "", "there is a place without that"


def test_whoever_is_back_soonest_makes_room_unless_one_is_done() -> None:
    large = policy("large", Where.HERE, resume_s=7.0, suspend_s=4.0)
    small = policy("small", Where.HERE, ready=9)
    done = policy("done", Where.HERE, resume_s=7.0, suspend_s=4.0, done=True)
    assert decided(waiting("solver", 16), large, small) == ("small", Direction.SUSPEND)
    assert decided(waiting("solver", 16), large, small, done) == ("done", Direction.SUSPEND)


def test_a_prefetch_puts_nobody_out_whose_way_back_is_longer() -> None:
    settings, coming = ProcessGroupSettings(), policy("coming", ready=15)
    large = policy("large", Where.HERE, resume_s=7.0, suspend_s=4.0)
    assert decided(coming, large, settings=settings) is None
    assert decided(policy("unknown", ready=1, resume_s=0.0, suspend_s=0.0), large, settings=settings) is not None
