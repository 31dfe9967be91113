import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import StoreError, TransitionError
from flexmarl.experience.interface import Outcome
from flexmarl.experience.ledger import ClaimOrder, check_move, check_outcome, claim_order, set_once
from flexmarl.records import ROW_MOVES, RowState, SampleId, Version, make_sample_id, make_trajectory_id

NUMBER = st.integers(0, 10**6)


@given(st.text(st.characters(exclude_characters="\0")), NUMBER, NUMBER, NUMBER, NUMBER)
def test_the_order_is_read_from_the_sample_id(input_id, group, episode, attempt, hop):
    sample_id = make_sample_id(input_id, hop, make_trajectory_id(group, episode, attempt))
    assert claim_order(sample_id) == ClaimOrder(group, episode, attempt, hop)


def test_numbers_are_compared_as_numbers():
    ids = [SampleId(f"t_{hop}_g{group}e{episode}a0") for group in (2, 10) for episode in (9, 10) for hop in (3, 20)]
    shuffled = [*ids[4:], *ids[:4]]
    assert sorted(shuffled, key=claim_order) == ids


@pytest.mark.parametrize(
    "sample_id", ["", "t", "t_0", "t_x_g0e0a0", "t_0_g0e0", "t_0_g-1e0a0", "t_0_g0e0a0 ", "\0_0_g0e0a0"]
)
def test_an_id_of_another_form_is_refused(sample_id):
    with pytest.raises(StoreError, match="mul-7_2_g12e3a0"):
        claim_order(sample_id)


@pytest.mark.parametrize(("before", "after"), [*itertools.product(RowState, RowState)])
def test_rows_move_by_the_table_only(before, after):
    outcome = Outcome(state=after)
    if after in ROW_MOVES[before]:
        check_move("solver", SampleId("t_0_g0e0a0"), before, Version(0), outcome)
    else:
        with pytest.raises(TransitionError, match=f"'t_0_g0e0a0' is {before} and cannot become {after}; it may become"):
            check_move("solver", SampleId("t_0_g0e0a0"), before, Version(0), outcome)


def test_a_row_without_a_response_is_not_made_ready():
    with pytest.raises(TransitionError, match="no policy version"):
        check_move("solver", SampleId("t_0_g0e0a0"), RowState.OPEN, None, Outcome(state=RowState.READY))
    check_move("solver", SampleId("t_0_g0e0a0"), RowState.OPEN, None, Outcome(state=RowState.FAILED))


@pytest.mark.parametrize("state", [state for state in RowState if state is not RowState.CLAIMED])
def test_a_cache_goes_with_accumulated_and_a_version_with_trained(state):
    for cache, version in itertools.product((None, "c"), (None, Version(1))):
        outcome = Outcome(state=state, cache=cache, version=version)
        if ((cache is None) == (state is not RowState.ACCUMULATED)) and (
            (version is None) == (state is not RowState.TRAINED)
        ):
            check_outcome(outcome)
        else:
            with pytest.raises(StoreError, match=f"outcome {state}"):
                check_outcome(outcome)


def test_a_value_is_set_once():
    new = set_once("solver", SampleId("s"), {"text": "a", "reward": 1.0}, {"text": "a", "weight": 0.5})
    assert new == {"weight": 0.5}
    with pytest.raises(StoreError, match=r"reward is 1.0 and cannot become 0.0"):
        set_once("solver", SampleId("s"), {"reward": 1.0}, {"reward": 0.0})
