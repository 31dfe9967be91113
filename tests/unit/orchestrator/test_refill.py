"""Which groups a step admits and keeps, in whatever order they end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.credit.filters import Effect, OutcomeFilter
from flexmarl.errors import EpisodeError
from flexmarl.orchestrator.crediting import Judged
from flexmarl.orchestrator.feed import Refill
from flexmarl.records import AgentName

EFFECTS = {AgentName("solver"): {Effect.TOO_EASY: 1}}
KEPT, DULL, FAILED = Judged(""), Judged("too_easy", EFFECTS), Judged("it failed")
fates = st.lists(st.sampled_from([KEPT, DULL, DULL, FAILED]), min_size=60, max_size=60)
shortfalls = st.sampled_from(["train_short", "unfiltered", "error"])


def refill_of(groups: int, batches: int, on_shortfall: str = "train_short") -> Refill:
    return Refill(groups, OutcomeFilter(refill=True, max_gen_batches=batches, on_shortfall=on_shortfall))  # type: ignore[arg-type]


def played(refill: Refill, fates, choose) -> set[int]:
    """Admits as the feed does; `choose` says which group in flight ends next. The groups that are kept."""
    flying, waiting, kept = set[int](), set[int](), set[int]()
    next_judged = 0
    while True:
        while refill.needs_another:
            flying.add(refill.admitted)
            refill.admit()
        if not flying:
            assert refill.over, "nothing is in flight, and another group may still be asked for"
            return kept
        ended = choose(sorted(flying))
        flying.remove(ended)
        waiting.add(ended)
        while waiting and (not refill.in_order or next_judged in waiting):
            group = next_judged if refill.in_order else ended
            waiting.remove(group)
            next_judged += 1
            if keeps := refill.keeps(fates[group]):
                kept.add(group)
            refill.judged(kept=keeps)


@given(fates=fates, groups=st.integers(1, 5), batches=st.integers(1, 4), on_shortfall=shortfalls, data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_step_admits_the_smallest_prefix_with_enough_kept_groups_whichever_ends_first(
    fates, groups, batches, on_shortfall, data
):
    limit = groups * batches
    good = [group for group in range(limit) if fates[group] is KEPT]
    dull = [group for group in range(limit) if fates[group] is DULL]
    short = max(groups - len(good), 0)
    refill = refill_of(groups, batches, on_shortfall)

    def play():
        return played(refill, fates, lambda flying: data.draw(st.sampled_from(flying)))

    if short and on_shortfall == "error":
        with pytest.raises(EpisodeError, match=r"groups cannot be filled: .* raise credit.filter.max_gen_batches="):
            play()
        return
    kept = play()
    if not short:
        assert kept == set(good[:groups])
        assert refill.admitted == good[groups - 1] + 1
        assert refill.because == f"{groups} groups are kept"
    else:
        assert refill.admitted == limit
        spare = _last_that_cannot_be_replaced(fates, groups, limit) if on_shortfall == "unfiltered" else set()
        assert kept == set(good) | spare
        assert len(kept) == groups or "groups were generated" in refill.because
        assert spare <= set(dull)
    assert refill.dropped == refill.admitted - len(kept)


def _last_that_cannot_be_replaced(fates, groups: int, limit: int) -> set[int]:
    dropped = [group for group in range(limit) if fates[group] is not KEPT]
    return {group for group in dropped[limit - groups :] if fates[group] is DULL}


def test_without_refill_a_step_is_its_groups_and_what_is_dropped_is_missing():
    for settings_ in (None, OutcomeFilter()):
        refill = Refill(3, settings_)
        assert played(refill, [DULL, KEPT, FAILED], min) == {1}
        assert (refill.admitted, refill.dropped, refill.refills) == (3, 2, False)


def test_tasks_that_end_while_a_step_is_refilled_make_it_short_whatever_on_shortfall_says():
    for on_shortfall in ("train_short", "error", "unfiltered"):
        refill = refill_of(2, 5, on_shortfall)
        for _ in range(2):
            assert not refill.exhausted("no task at position 0")
            refill.admit()
        refill.judged(kept=refill.keeps(DULL))
        assert refill.needs_another
        assert refill.exhausted("no task at position 2 of 2")
        assert not refill.keeps(DULL)
        refill.judged(kept=False)
        assert refill.over
        assert refill.because == "0 of 2 groups are kept: no task at position 2 of 2"


def test_what_follows_a_shortfall_is_refused_where_nothing_is_refilled():
    with pytest.raises(ValidationError, match="on_shortfall: 'error' applies when refill does not suffice"):
        OutcomeFilter(on_shortfall="error")
