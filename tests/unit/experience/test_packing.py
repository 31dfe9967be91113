import itertools

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.experience.packing import cut_micro_batches, padding_groups
from flexmarl.experience.settings import PackingSettings

COUNTS = st.lists(st.integers(1, 50), max_size=40)
SETTINGS = st.builds(PackingSettings, max_samples=st.integers(1, 8), max_padded_tokens=st.none() | st.integers(1, 120))


@given(COUNTS, SETTINGS)
def test_every_sample_is_in_one_micro_batch_and_in_order(counts, settings):
    cuts = cut_micro_batches(counts, settings)
    assert [index for cut in cuts for index in cut.indices] == list(range(len(counts)))
    assert all(cut.indices and cut.because for cut in cuts)


@given(COUNTS, SETTINGS)
def test_no_micro_batch_of_several_samples_exceeds_a_limit(counts, settings):
    for cut in cut_micro_batches(counts, settings):
        assert len(cut.indices) <= settings.max_samples
        if settings.max_padded_tokens is not None and len(cut.indices) > 1:
            assert len(cut.indices) * max(counts[i] for i in cut.indices) <= settings.max_padded_tokens


@given(COUNTS, SETTINGS)
def test_a_micro_batch_ends_only_where_the_next_sample_does_not_fit(counts, settings):
    cuts = cut_micro_batches(counts, settings)
    for cut, after in itertools.pairwise(cuts):
        wider = [*cut.indices, after.indices[0]]
        limit = settings.max_padded_tokens
        too_many = len(wider) > settings.max_samples
        assert too_many or (limit is not None and len(wider) * max(counts[i] for i in wider) > limit)


def test_each_cut_says_why():
    cuts = cut_micro_batches([2, 2, 2, 7, 4, 4, 12, 1], PackingSettings(max_samples=3, max_padded_tokens=10))
    assert [(cut.indices, cut.because) for cut in cuts] == [
        ((0, 1, 2), "3 samples are the most allowed"),
        ((3,), "one more would pad to 14 tokens, more than 10"),
        ((4, 5), "one more would pad to 36 tokens, more than 10"),
        ((6,), "it alone has 12 tokens, more than 10"),
        ((7,), "no sample is left"),
    ]


@given(COUNTS, st.floats(0, 0.9))
def test_padding_groups_hold_every_sample_once_and_keep_the_share(counts, share):
    groups = padding_groups(counts, share)
    assert sorted(index for group in groups for index in group) == list(range(len(counts)))
    for group in groups:
        padded = len(group) * max(counts[i] for i in group)
        assert padded - sum(counts[i] for i in group) <= share * padded


def test_without_padding_equal_lengths_go_together():
    assert padding_groups([5, 3, 5, 3, 4], 0.0) == [(0, 2), (4,), (1, 3)]
    assert padding_groups([], 0.0) == []
