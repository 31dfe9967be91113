"""Alarms: each sounds when its condition has held long enough, once, with its figure and a remedy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.events.run_events import AlarmKind, AlarmRaised
from flexmarl.orchestrator.alarms import AlarmRules
from flexmarl.orchestrator.settings import AlarmSettings
from flexmarl.records import PolicyName
from flexmarl.testing.scripted_run import ScriptedRun

SOLVER = PolicyName("solver")
WELL = {
    "train/solver/samples": 8.0, "train/solver/entropy": 1.0, "train/solver/kl_to_sampler": 1e-6,
    "rollout/groups": 4.0, "filtered/flat": 1.0, "cut/solver": 0.1,
    "rollout/episodes": 16.0, "rollout/failed_episodes": 7.0,
}  # fmt: skip
ILL = {
    AlarmKind.UNTRAINED: {"train/solver/samples": 0.0},
    AlarmKind.NO_SPREAD: {"filtered/flat": 1.0, "filtered/too_hard": 3.0},
    AlarmKind.FAILED: {"rollout/failed_episodes": 8.0},
    AlarmKind.CUT: {"cut/solver": 0.5},
    AlarmKind.ENTROPY: {"train/solver/entropy": 0.001},
    AlarmKind.DRIFT: {"train/solver/kl_to_sampler": 0.2},
}


def sounds(rules, steps):
    return [(step, alarm) for step, values in enumerate(steps, start=1) for alarm in rules.after_step(step, values)]


@pytest.mark.parametrize("kind", ILL)
@given(ill=st.lists(st.booleans(), max_size=12), steps=st.integers(1, 4))
def test_an_alarm_sounds_once_in_the_step_in_which_its_condition_has_held_long_enough(kind, ill, steps):
    rules = AlarmRules(AlarmSettings(steps=steps, untrained=steps), [SOLVER])
    found = sounds(rules, [WELL, *(WELL | ILL[kind] if bad else WELL for bad in ill)])
    held = [all(ill[max(0, end - steps) : end]) and end >= steps for end in range(1, len(ill) + 1)]
    first = held.index(True) + 2 if True in held else None  # The first step is the one that went well.
    assert [(step, alarm.alarm) for step, alarm in found] == ([(first, kind)] if first else [])


@pytest.mark.parametrize("kind", ILL)
@given(values=st.lists(st.fixed_dictionaries({name: st.floats(0, 10) for name in WELL}), max_size=8))
def test_null_turns_an_alarm_off(kind, values):
    rules = AlarmRules(AlarmSettings.model_validate({"steps": 1, kind: None}), [SOLVER])
    assert kind not in {alarm.alarm for _, alarm in sounds(rules, values)}


@given(values=st.lists(st.fixed_dictionaries({}, optional={name: st.floats() for name in WELL}), max_size=20))
def test_no_figures_break_the_rules_and_no_alarm_sounds_twice(values):
    found = [(alarm.alarm, alarm.subject) for _, alarm in sounds(AlarmRules(AlarmSettings(steps=1), [SOLVER]), values)]
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("kind", "says", "tries"),
    [
        (AlarmKind.UNTRAINED, "policy 'solver' was not updated", "credit.filter.refill"),
        (AlarmKind.NO_SPREAD, "100% of 4 groups have equal rewards by credit.filter (3 too_hard, 1 flat)", "filter_on"),
        (AlarmKind.FAILED, "8 of 16 episodes failed", "flexmarl show RUN --failed"),
        (AlarmKind.CUT, "50% of the replies of agent 'solver' were cut off", "team.agents.solver.sampling.max_tokens"),
        (AlarmKind.ENTROPY, "entropy of policy 'solver' is 0.001 nats per token, 0.1%", "learning_rate"),
        (AlarmKind.DRIFT, "differ by 0.2 nats per sampled token", "pipeline.lag"),
    ],
)
def test_an_alarm_says_its_figure_and_what_to_try(kind, says, tries):
    rules = AlarmRules(AlarmSettings(steps=1, untrained=1), [SOLVER])
    ((_, alarm),) = sounds(rules, [WELL, WELL | ILL[kind]])
    assert says in alarm.because
    assert tries in alarm.remedy
    assert f"alarms.{kind}=" in alarm.remedy


@pytest.mark.parametrize(
    ("before", "reason", "ruined"),
    [(WELL, "flat", True), (WELL, "too_hard", True), (WELL, "too_easy", False), ({}, "flat", False)],
)
def test_rewards_that_differ_no_more_are_taken_for_a_ruined_policy_unless_the_tasks_are_learned(before, reason, ruined):
    equal = WELL | {"filtered/flat": 0.0} | {f"filtered/{reason}": 4.0}
    ((_, alarm),) = sounds(AlarmRules(AlarmSettings(), [SOLVER]), [before, equal, equal])
    assert alarm.alarm is AlarmKind.NO_SPREAD
    assert ("lower training.optimizer.learning_rate" in alarm.remedy) is ruined


def test_an_alarm_of_several_steps_says_their_sum_and_which_steps_they_are():
    nothing_ended = {"train/solver/samples": 4.0}
    first, second = ({"rollout/groups": groups, "filtered/flat": groups} for groups in (3.0, 2.0))
    rules = AlarmRules(AlarmSettings(untrained=None), [SOLVER])
    ((step, alarm),) = sounds(rules, [first, nothing_ended, second])
    assert (step, alarm.value) == (3, 1.0)
    assert alarm.because == (
        "100% of 5 groups have equal rewards by credit.filter (5 flat), so nothing can be learned from comparing them, "
        "in steps 1, 3"
    )
    failing = [{"rollout/episodes": 4.0, "rollout/failed_episodes": failed} for failed in (4.0, 2.0)]
    ((_, alarm),) = sounds(AlarmRules(AlarmSettings(untrained=None), [SOLVER]), failing)
    assert (alarm.value, alarm.because) == (0.75, "6 of 8 episodes failed, in steps 1 to 2")


def test_a_policy_that_the_workflow_never_asks_is_not_told_to_take_easier_tasks():
    unasked = {"rollout/groups": 4.0, "filtered/no_trained_turn": 4.0}
    ((_, alarm),) = sounds(AlarmRules(AlarmSettings(untrained=1), [SOLVER]), [unasked])
    assert "let the workflow await an act of one" in alarm.remedy
    assert "easy" not in alarm.remedy


def test_a_step_without_an_episode_fails_none():
    assert not sounds(AlarmRules(AlarmSettings(), [SOLVER]), [WELL | {"rollout/episodes": 0.0}] * 3)


def test_equal_rewards_sound_without_a_filter_too_and_groups_of_one_do_not():
    alike = WELL | {"filtered/flat": 0.0, "credit/solver/groups": 8.0, "credit/solver/too_hard": 8.0}
    assert not sounds(AlarmRules(AlarmSettings(), [SOLVER]), [alike | {"credit/solver/group_size": 1.0}] * 3)
    ((step, alarm),) = sounds(AlarmRules(AlarmSettings(), [SOLVER]), [alike | {"credit/solver/group_size": 4.0}] * 3)
    assert (step, alarm.alarm, alarm.value) == (2, AlarmKind.NO_SPREAD, 1.0)
    assert "the rewards of 16 of 16 credit groups did not differ (16 too_hard)" in alarm.because
    assert "give easier tasks" in alarm.remedy


def test_a_team_with_one_agent_at_its_best_and_one_at_its_worst_is_told_which_is_which():
    alike = WELL | {"filtered/flat": 4.0, "filter/solver/too_hard": 4.0, "filter/checker/too_easy": 4.0}
    ((_, alarm),) = sounds(AlarmRules(AlarmSettings(), [SOLVER]), [alike] * 3)
    assert (
        "100% of 8 groups have equal rewards by credit.filter (8 flat; checker: 8 too_easy; solver: 8 too_hard)"
        in alarm.because
    )
    same = alike | {"filter/checker/too_easy": 0.0, "filter/checker/too_hard": 4.0}
    ((_, alarm),) = sounds(AlarmRules(AlarmSettings(), [SOLVER]), [same] * 3)
    assert "by credit.filter (8 flat)" in alarm.because


def test_an_agent_whose_rewards_never_differ_is_named_though_those_of_another_do():
    stuck = WELL | {"filter/checker/effective": 3.0, "filter/checker/flat": 1.0, "filter/solver/too_hard": 4.0}
    rules = AlarmRules(AlarmSettings(), [SOLVER])
    ((step, alarm),) = sounds(rules, [stuck] * 3)
    assert (step, alarm.alarm, alarm.subject, alarm.value) == (2, AlarmKind.NO_SPREAD, "solver", 1.0)
    assert "the rewards of agent 'solver' did not differ, so it learns nothing (8 too_hard)" in alarm.because
    assert "give easier tasks" in alarm.remedy
    best = WELL | {"filter/checker/effective": 4.0, "filter/solver/too_easy": 4.0}
    assert not sounds(AlarmRules(AlarmSettings(), [SOLVER]), [best] * 3)


@pytest.mark.parametrize("differed", [True, False])
def test_an_update_is_suspected_only_if_the_agents_own_rewards_differed_before(differed):
    stuck = WELL | {"filter/checker/effective": 4.0, "filter/solver/too_hard": 4.0}
    before = stuck | ({"filter/solver/too_hard": 2.0, "filter/solver/effective": 2.0} if differed else {})
    ((_, alarm),) = sounds(AlarmRules(AlarmSettings(), [SOLVER]), [before, stuck, stuck])
    assert alarm.subject == "solver"
    assert alarm.remedy.startswith("rewards differed in earlier steps") is differed
    assert alarm.remedy.startswith("they have not differed since this command began; too_hard") is not differed


def test_an_agent_that_learns_from_groups_judged_in_an_earlier_step_is_not_called_stuck():
    stuck = WELL | {"filter/checker/effective": 4.0, "filter/solver/too_hard": 4.0, "credit/solver/groups": 8.0}
    assert not sounds(AlarmRules(AlarmSettings(), [SOLVER]), [stuck | {"credit/solver/effective": 2.0}, stuck] * 3)
    ((step, alarm),) = sounds(AlarmRules(AlarmSettings(), [SOLVER]), [stuck] * 3)
    assert (step, alarm.subject) == (2, "solver")


def test_a_run_without_a_filter_whose_rewards_never_differ_says_so_once():
    run = ScriptedRun(say=lambda prompt, request: "b", steps=4, credit={"filter": None}).play()
    (alarm,) = [alarm for alarm in run.events.of(AlarmRaised) if alarm.alarm is AlarmKind.NO_SPREAD]
    assert (alarm.step, alarm.subject, alarm.value) == (2, "", 1.0)
    differing = ScriptedRun(steps=4, credit={"filter": None}).play()
    assert not [alarm for alarm in differing.events.of(AlarmRaised) if alarm.alarm is AlarmKind.NO_SPREAD]


def test_a_run_whose_rewards_never_differ_says_so_once_and_trains_nothing():
    run = ScriptedRun(say=lambda prompt, request: "b", steps=4, credit={"filter": {}}).play()
    alarms = run.events.of(AlarmRaised)
    assert [(alarm.step, alarm.alarm, alarm.subject) for alarm in alarms] == [
        (2, "no_spread", ""),
        (3, "untrained", "solver"),
    ]
    assert run.metrics[4]["filtered/too_hard"] == 2
    assert run.metrics[4]["train/solver/skipped"] == 1
