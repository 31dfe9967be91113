import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.records import (
    AgentName,
    Divisors,
    EpisodeId,
    FinishReason,
    PolicyName,
    Sample,
    Turn,
    Version,
    VersionRun,
    make_sample_id,
)
from flexmarl.training.aggregation import divisors_of


def sample(episode: int, hop: int, length: int, weight: float) -> Sample:
    turn = Turn(
        sample_id=make_sample_id("t", hop, f"g0e{episode}a0"),
        episode=EpisodeId(f"g0e{episode}a0"),
        agent=AgentName("solver"),
        policy=PolicyName("p"),
        prompt_ids=np.array([1], np.int32),
        response_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        raw_logprobs=np.zeros(length, np.float32),
        versions=(VersionRun(0, Version(0)),),
        finish=FinishReason.STOP,
    )
    return Sample(turn=turn, advantage=0.0, weight=weight)


def test_tokens_rows_and_episodes_are_counted_with_their_weights():
    rows = [
        sample(0, 0, 4, 1.0),
        sample(0, 1, 6, 0.5),
        sample(1, 0, 2, 1.0),
        sample(2, 0, 9, 0.0),
        sample(3, 0, 0, 1.0),
    ]
    assert divisors_of(rows) == Divisors(num_tokens=9.0, num_sequences=2.5, num_trajectories=2.0)


def test_nothing_divides_by_nothing():
    assert divisors_of([]) == Divisors()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0, 10)), max_size=12), st.randoms())
def test_the_order_of_samples_does_not_show_in_the_last_bit(rows, random):
    samples = [sample(episode, hop, length, weight) for hop, (episode, length, weight) in enumerate(rows)]
    divisors = divisors_of(samples)
    random.shuffle(samples)
    assert divisors_of(samples) == divisors
