from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.analysis.costs import EngineCosts
from flexmarl.simulator.decoding import Batch, BatchedRequest, Segment

COSTS = st.builds(
    EngineCosts,
    decode_s=st.floats(0.001, 0.1),
    decode_request_s=st.floats(0.0, 0.01),
    decode_kv_s=st.floats(0.0, 1e-4),
    prefill_token_s=st.floats(0.0, 0.01),
    prefill_steps=st.integers(0, 3).map(float),
)


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, its prompt, its response, and after how long it is aborted, if it is."""

    at: float
    prompt: int
    tokens: int
    patience_s: float | None


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at=st.floats(0.0, 3.0),
        prompt=st.integers(1, 30),
        tokens=st.integers(1, 40),
        patience_s=st.none() | st.floats(0.01, 2.0),
    ),
    min_size=1,
    max_size=8,
)


def in_segments(costs: EngineCosts, arrivals: list[Arrival]) -> dict[int, tuple[float, int]]:
    """When each request ends, and with how many tokens: from event to event."""
    batch: Batch[int] = Batch(costs)
    places: dict[int, BatchedRequest[int]] = {}
    ends: dict[int, tuple[float, int]] = {}
    events = sorted(
        [(a.at, 0, i) for i, a in enumerate(arrivals)]
        + [(a.at + a.patience_s, 1, i) for i, a in enumerate(arrivals) if a.patience_s is not None]
    )
    waiting: list[int] = []

    def run_until(now: float) -> None:
        while batch.next_end <= now:
            at = batch.next_end
            batch.go_to_next_end()
            ends.update({place.item: (at, place.sampled_at(batch.steps)) for place in batch.pop_ended()})
            admit(at)

    def admit(now: float) -> None:
        batch.settle(now)
        while waiting and not batch.ending:
            name = waiting.pop(0)
            arrival = arrivals[name]
            places[name] = batch.join(
                name, tokens=arrival.tokens, prompt_tokens=arrival.prompt, prefill_tokens=arrival.prompt
            )

    for at, kind, name in events:
        run_until(at)
        if kind == 0:
            waiting.append(name)
            admit(at)
        elif name in waiting:
            waiting.remove(name)
            ends[name] = (at, 0)
        elif name not in ends:
            batch.settle(at)
            batch.end_now(places[name])
    run_until(1e9)
    return ends


def token_by_token(costs: EngineCosts, arrivals: list[Arrival]) -> dict[int, tuple[float, int]]:
    """The same, step after step, with every request's tokens counted one by one."""
    boundary, ends = 0.0, dict[int, tuple[float, int]]()
    steps_of: dict[int, int] = {}
    left = set(range(len(arrivals)))
    while left or steps_of:
        if not steps_of:
            boundary = max(boundary, min(arrivals[i].at for i in left))
        joiners = sorted((i for i in left if arrivals[i].at <= boundary), key=lambda i: (arrivals[i].at, i))
        for name in joiners:
            left.discard(name)
            steps_of[name] = 0
            # While its prompt is computed, others may come: they join at the same boundary.
            boundary += costs.prefill_token_s * arrivals[name].prompt
        if any(arrivals[i].at <= boundary for i in left):
            continue
        if steps_of:
            held = sum(arrivals[i].prompt + steps for i, steps in steps_of.items())
            boundary += costs.decode_s + costs.decode_request_s * len(steps_of) + costs.decode_kv_s * held
        for name in list(steps_of):
            steps_of[name] += 1
            tokens = max(0, steps_of[name] - int(costs.prefill_steps))
            if tokens == arrivals[name].tokens:
                ends[name] = (boundary, tokens)
                del steps_of[name]
    return ends


@given(COSTS, ARRIVALS)
def test_segments_end_requests_when_single_steps_do(costs: EngineCosts, arrivals: list[Arrival]) -> None:
    patient = [Arrival(a.at, a.prompt, a.tokens, None) for a in arrivals]
    ends, expected = in_segments(costs, patient), token_by_token(costs, patient)
    assert {name: tokens for name, (_, tokens) in ends.items()} == {n: a.tokens for n, a in enumerate(patient)}
    assert {name: at for name, (at, _) in ends.items()} == pytest.approx(
        {name: at for name, (at, _) in expected.items()}
    )


@given(COSTS, ARRIVALS)
def test_everything_ends_once_whatever_is_aborted(costs: EngineCosts, arrivals: list[Arrival]) -> None:
    ends = in_segments(costs, arrivals)
    assert ends.keys() == set(range(len(arrivals)))
    for name, (at, tokens) in ends.items():
        arrival = arrivals[name]
        assert at >= arrival.at
        assert tokens == arrival.tokens or (arrival.patience_s is not None and 0 <= tokens < arrival.tokens)


@given(
    first_s=st.floats(1e-4, 1.0),
    growth_s=st.floats(0.0, 1e-3),
    start=st.floats(0.0, 1e5),
    late_s=st.floats(0.0, 1e4),
    most=st.integers(0, 10**6),
)
def test_the_closed_form_finds_the_first_boundary_that_is_not_before_now(
    first_s: float, growth_s: float, start: float, late_s: float, most: int
) -> None:
    segment = Segment(start, first_s, min(growth_s, first_s))
    now = start + late_s
    steps = segment.steps_until(now, most)
    assert steps == most or segment.instant(steps) >= now
    assert steps == 0 or segment.instant(steps - 1) < now


@given(first_s=st.floats(1e-4, 1.0), growth_s=st.floats(0.0, 1e-3), steps=st.integers(0, 10**6))
def test_who_comes_exactly_at_a_boundary_is_there(first_s: float, growth_s: float, steps: int) -> None:
    segment = Segment(7.0, first_s, growth_s)
    assert segment.steps_until(segment.instant(steps), most=10**7) == steps


def test_steps_that_take_no_time_end_at_once() -> None:
    batch: Batch[str] = Batch(EngineCosts(decode_s=0.0, decode_request_s=0.0))
    batch.settle(5.0)
    batch.join("a", tokens=1000, prompt_tokens=1, prefill_tokens=1)
    assert batch.next_end == 5.0
    batch.settle(6.0)
    assert [place.item for place in batch.pop_ended()] == ["a"]
