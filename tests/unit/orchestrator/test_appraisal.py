"""What trainers say of turns before they are credited: values, and the price of leaving the reference policy."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.credit import CreditRow, credit_rows
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.training_events import DivergenceCharged
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.orchestrator.crediting import Appraisal, paid
from flexmarl.records import GroupRecord, PolicyName, Sample, SampleId, Turn
from flexmarl.testing.training import FakeTrainer
from flexmarl.training.interface import Appraised, HeldRows
from flexmarl.training.settings import TrainingSettings
from tests.unit.orchestrator.groups import JUDGE, SOLVER, Bench, group_of

DRIFT = 0.5


class Opinionated(FakeTrainer):
    """Values are the places of the tokens; every token was less likely under the reference by `DRIFT`."""

    def appraisal(self, turn: Turn) -> Appraised:
        drift = np.full(turn.num_tokens, DRIFT)
        values = np.arange(turn.num_tokens, dtype=np.float32)
        return Appraised(values=values, reference=turn.raw_logprobs, divergence=drift)


class Unequal(FakeTrainer):
    """No two groups are equally far from the reference."""

    def appraisal(self, turn: Turn) -> Appraised:
        far = 0.9 + int(str(turn.episode)[1:].partition("e")[0]) / 70
        divergence = np.full(turn.num_tokens, np.exp(-far) + far - 1)
        return Appraised(values=None, reference=turn.raw_logprobs, divergence=divergence)


PLAYED = HeldRows()
"""The turns of all groups of this file: ids say which."""


def appraisal_of(
    events: RememberedEvents | None = None, *, trainer: type[FakeTrainer] = Opinionated, **training: object
) -> Appraisal:
    return Appraisal(
        trainers={SOLVER: trainer(SOLVER, InlineObjectStore(), rows=PLAYED)},
        training={SOLVER: TrainingSettings.model_validate(training)},
        events=events or RememberedEvents(),
    )


def filled(
    appraisal: Appraisal,
    group: GroupRecord,
    memory: Mapping[str, float] = {},
    trained: Sequence[PolicyName] = (SOLVER,),
) -> Sequence[CreditRow]:
    hold(group)
    return asyncio.run(appraisal.fill(credit_rows(group, trained), memory))


def hold(group: GroupRecord) -> None:
    turns: list[Turn] = [turn for episode in group.episodes for turn in episode.turns]
    PLAYED.hold([Sample(turn=turn, advantage=0.0) for turn in turns])


def test_each_token_pays_for_its_divergence_and_the_reward_is_what_is_left() -> None:
    in_reward = appraisal_of(kl={"type": "k1", "where": "reward", "coef": 0.1})
    for row in filled(in_reward, group_of(0, [1.0, 0.0])):
        raw = row.outcome
        assert raw in (0.0, 1.0), "the filter judges what it was before"
        assert row.token_rewards is not None
        expected = [-0.1 * DRIFT] * row.num_tokens
        expected[-1] += raw
        assert row.token_rewards == pytest.approx(expected, rel=1e-6)
        assert row.reward == pytest.approx(sum(row.token_rewards), rel=1e-12)
        assert row.parts == {"outcome": raw, "kl": pytest.approx(-0.1 * DRIFT * row.num_tokens, rel=1e-6)}


def test_a_critic_says_what_it_expects_at_each_token() -> None:
    for row in filled(appraisal_of(critic={}), group_of(0, [1.0])):
        assert row.values == tuple(range(row.num_tokens))
        assert row.token_rewards is None


def test_settings_that_need_nothing_leave_rows_as_they_are() -> None:
    group = group_of(0, [1.0, 0.0])
    for training in ({}, {"kl": {"coef": 0.1}}):
        assert list(filled(appraisal_of(**training), group)) == list(credit_rows(group, [SOLVER]))


def test_policies_without_a_trainer_and_rows_without_a_reward_are_not_touched() -> None:
    group = group_of(0, [1.0])
    rows = filled(appraisal_of(kl={"type": "k1", "where": "reward"}), group, trained=(SOLVER, JUDGE))
    unpaid = [row for row in rows if row.policy == JUDGE or row.reward is None]
    assert all(row in credit_rows(group, [SOLVER, JUDGE]) for row in unpaid)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6), st.floats(-3, 3))
def test_prices_add_up_whatever_the_reward(price: list[float], reward: float) -> None:
    (row, *_) = credit_rows(group_of(0, [1.0]), [SOLVER])
    paying = paid(replace(row, reward=reward, num_tokens=len(price)), np.array(price))
    assert paying.reward == pytest.approx(reward - sum(price), rel=1e-12, abs=1e-12)


def test_a_call_pays_its_price_itself_and_not_its_agent_or_the_team() -> None:
    (row, *_) = credit_rows(group_of(0, [1.0]), [SOLVER])
    paying = paid(replace(row, reward=1.0, call_reward=0.25, num_tokens=2), np.array([0.5, 0.125]))
    assert (paying.reward, paying.call_reward) == (0.375, -0.375)
    assert paying.shared_reward == 0.75, "what the agent or the team was given"


def test_the_greedy_play_and_calls_without_a_token_are_not_asked_about() -> None:
    group, asked = group_of(0, [1.0, 0.5]), list[str]()

    class Listening(Opinionated):
        async def appraise(self, ids: Sequence[SampleId]) -> list[Appraised]:
            asked.extend(ids)
            return await super().appraise(ids)

    played, *others = credit_rows(group, [SOLVER])
    rows = [played, replace(others[0], greedy=True), replace(played, sample_id=SampleId("empty"), num_tokens=0)]
    hold(group)
    in_reward = appraisal_of(trainer=Listening, kl={"type": "k1", "where": "reward"})
    filled_in = asyncio.run(in_reward.fill(rows, {}))
    assert asked == [played.sample_id]
    assert list(filled_in[1:]) == rows[1:]


def test_the_coefficient_adapts_at_the_end_of_a_batch_and_is_remembered() -> None:
    events = RememberedEvents()
    settings = {"type": "k1", "where": "reward", "coef": 1.0, "target": 0.1, "horizon": 10}
    appraisal = appraisal_of(events, kl=settings)
    rows = [row for number in range(2) for row in filled(appraisal, group_of(number, [1.0, 0.0]))]
    after = appraisal.end_batch({"other": 3.0})
    # The divergence is five times the target: clipped to 0.2, for each row's share of the horizon.
    assert after == {"other": 3.0, "kl_coef/solver": pytest.approx(1 + 0.2 * len(rows) / 10, rel=1e-12)}
    (event,) = events.of(DivergenceCharged)
    assert event.kl == pytest.approx(DRIFT, rel=1e-6)
    assert appraisal.end_batch(after) == after, "nothing was seen since"
    (row, *_) = filled(appraisal, group_of(5, [1.0]), after)
    assert row.parts["kl"] == pytest.approx(-after["kl_coef/solver"] * DRIFT * row.num_tokens, rel=1e-6)


def test_the_order_of_groups_leaves_no_trace_in_the_coefficient() -> None:
    settings = {"type": "k3", "where": "reward", "coef": 1.0, "target": 0.35, "horizon": 10}
    numbers, found = np.random.default_rng(0), set[float]()
    for _ in range(10):
        appraisal = appraisal_of(kl=settings, trainer=Unequal)
        for number in numbers.permutation(8):
            filled(appraisal, group_of(int(number), [1.0, 0.0]))
        found.add(appraisal.end_batch({})["kl_coef/solver"])
    assert len(found) == 1


def test_what_was_appraised_is_credited_and_trained_on() -> None:
    async def check() -> None:
        kl = {"type": "k1", "where": "reward", "coef": 0.1, "target": 0.1, "horizon": 1}
        bench = Bench(groups=1, estimator={"type": "reinforce"}, appraisal=appraisal_of(critic={}, kl=kl))
        group = group_of(0, [1.0])
        hold(group)
        await bench.play(group)
        (credited,) = await bench.crediting.credit([[group]])
        for sample in credited.samples[SOLVER]:
            assert sample.values is not None
            assert sample.values.tolist() == list(range(sample.num_tokens))
            assert sample.advantage == pytest.approx(1 - 0.1 * DRIFT * sample.num_tokens, rel=1e-6)
            assert sample.reward == 1.0
        assert bench.crediting.memory == {}
        await bench.collector.close()
        assert bench.crediting.memory["kl_coef/solver"] > 0.1, "the next batch pays more"

    asyncio.run(check())
