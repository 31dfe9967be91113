from hypothesis import given
from hypothesis import strategies as st

from flexmarl.analysis.timeline import Lanes

slices = st.lists(
    st.tuples(st.integers(min_value=0, max_value=60), st.integers(min_value=0, max_value=20)).map(
        lambda span: (span[0], span[0] + span[1])
    ),
    max_size=30,
)


def placed(spans):
    lanes = Lanes()
    return [(lanes.place(*span), span) for span in spans], lanes


def test_slices_one_after_the_other_share_a_lane():
    assert [lane for lane, _ in placed([(0, 2), (2, 3), (5, 6)])[0]] == [0, 0, 0]


def test_slices_at_the_same_time_have_lanes_of_their_own():
    assert [lane for lane, _ in placed([(0, 2), (1, 3), (2, 4), (0, 5)])[0]] == [0, 1, 0, 2]


@given(slices)
def test_no_slice_hides_another_in_whatever_order_they_come(spans):
    found, _ = placed(spans)
    for index, (lane, (began, ended)) in enumerate(found):
        for other, (start, end) in found[:index]:
            assert lane != other or began >= end or ended <= start


@given(slices)
def test_in_the_order_of_their_ends_there_are_no_more_lanes_than_slices_at_once(spans):
    ordered = sorted((span for span in spans if span[1] > span[0]), key=lambda span: span[1])
    at_once = max((sum(began <= moment < ended for began, ended in ordered) for moment in range(81)), default=0)
    assert len(placed(ordered)[1]) == at_once
