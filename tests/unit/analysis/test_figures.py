"""What a run took, from journals whose figures can be counted by eye, and from simulated runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from flexmarl.analysis.costs import CostSettings, EngineCosts, TrainerCosts
from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.analysis.figures import Pools, SimulationReport, report_of
from flexmarl.analysis.tables import comparison_table, report_table, sweep_table
from flexmarl.events.catalogue import CATALOGUE
from flexmarl.events.event import Event, from_json
from flexmarl.events.training_events import Updated
from flexmarl.records import Purpose, RowState, Version
from flexmarl.testing.scripted_run import ScriptedRun
from tests.calls import a_call
from tests.unit.analysis.simulated_runs import AGENTS, simulated_run, take_turns
from tests.unit.analysis.tables_as_text import as_text

ALONE = Pools(costs={})


def event(name: str, t: float, **fields: Any) -> Event:
    """The event of a line, with `fields` that matter, and others as they may be."""
    others = {"process": "controller", "lag_ms": 0.0, "micro_batch": "m", "duration_s": 1.0, "report": {}}
    return from_json(CATALOGUE[name], others | {"checksum": "c", "event": name, "t": t, "policy": "solver", **fields})


def call(t: float, *, began: float, group: int, instance: str = "solver/0", version: int = 0, sampled: int = 10):
    called = a_call(instance, began=began, ended=t, version=Version(version), sampled_tokens=sampled)
    return replace(called, request=f"task-{group}_0_g{group}e0a0")


def worked(name: str, t: float, *, began: float, **fields: Any) -> Event:
    return event(name, t, began=began, **fields)


ONE_STEP = [
    event("queues", 0.0, running={"solver": 1}, queued={"solver": 4}),
    call(6.0, began=0.0, group=0),
    event("queues", 5.0, running={"solver": 1}, queued={"solver": 0}),
    worked("micro_batch", 8.0, began=4.0, rows=2, tokens=20.0),
    call(7.0, began=6.0, group=1),
    event("rollout_ended", 7.0, began=0.0, step=0),
    worked("updated", 9.0, began=8.0, version=1),
    worked("published", 10.0, began=9.0, version=1),
    event("step_ended", 10.0, began=0.0, step=0, trained=[0, 1], versions={"solver": 1}),
]
"""One instance and one trainer: 7 s of rollout, 2 s of visible and 3 s of hidden training, 1 s of publication."""


def report(events: Sequence[Event], pools: Pools = ALONE) -> SimulationReport:
    found = report_of(read_facts(events), pools)
    assert found is not None
    return found


def test_a_step_is_split_into_rollout_visible_training_and_the_rest() -> None:
    one = report(ONE_STEP)
    assert (one.rollout_s, one.training_s, one.hidden_s, one.other_s) == (7.0, 2.0, 3.0, 1.0)
    assert (one.step_s.mean, one.makespan_s, one.steps) == (10.0, 10.0, 1)


def test_utilisation_is_busy_device_seconds_by_those_there_are() -> None:
    costs = {
        "solver": CostSettings(engine=EngineCosts(devices=4, busy_share=0.5), trainer=TrainerCosts(devices=16)),
    }
    one = report(ONE_STEP, Pools(costs=costs))
    assert one.rollout_utilisation == pytest.approx(0.7 * 0.5)
    assert one.training_utilisation == pytest.approx(0.5)
    assert one.utilisation == pytest.approx((7 * 4 * 0.5 + 5 * 16) / (10 * 20))


def test_shared_devices_are_counted_once() -> None:
    assert report(ONE_STEP, Pools(costs={}, shared=True)).utilisation == pytest.approx((7 + 5) / 10)


def test_queues_are_averaged_over_time() -> None:
    queue = report(ONE_STEP).queues["solver"]
    assert (queue.mean, queue.most) == (2.0, 4)


def test_tokens_staleness_and_lag_are_those_of_the_step() -> None:
    one = report(ONE_STEP)
    assert (one.tokens, one.tokens_per_s, one.turns) == (20, 2.0, 2)
    assert (one.staleness_mean, one.staleness_most, one.publish_lag_s) == (0.0, 0, 1.0)


def test_a_group_that_an_update_has_overtaken_is_stale() -> None:
    later = [
        call(12.0, began=9.0, group=2, version=0, sampled=30),
        call(12.0, began=9.0, group=3, version=1, sampled=10),
        event("step_ended", 14.0, began=8.0, step=1, trained=[2, 3], versions={"solver": 2}),
    ]
    one = report([*ONE_STEP, *later])
    assert one.staleness_mean == pytest.approx(30 / 60)  # 20 tokens of the first step were fresh.
    assert one.staleness_most == 1


def test_where_policies_update_on_their_own_staleness_is_that_of_the_version_trained() -> None:
    run = ScriptedRun(
        take_turns,
        agents=AGENTS,
        steps=6,
        mode="async",
        pipeline={"updates": "per_policy", "lag": 3, "policy_timeout_s": 0.5},
    ).play()
    total, tokens, most = 0, 0, 0
    for row in run.rows():
        if row.state is RowState.TRAINED:
            assert row.settled_version is not None
            assert row.version is not None
            lag, sampled = row.settled_version - 1 - row.version, len(row.values["response_ids"])
            total, tokens, most = total + lag * sampled, tokens + sampled, max(most, lag)
    assert len(run.events.of(Updated)) > 12  # Two policies: more than one update each of a step.
    one = report(run.events.all)
    assert (one.staleness_mean, one.staleness_most) == (pytest.approx(total / tokens), most)


def test_steps_that_overlap_take_what_they_add() -> None:
    later = event("step_ended", 14.0, began=8.0, step=1, trained=[], versions={"solver": 2})
    assert report([*ONE_STEP, later]).step_s.least == 4.0


def test_groups_that_were_left_out_make_a_bias() -> None:
    left_out = call(9.0, began=7.0, group=2, sampled=40)
    bias = report([left_out, *ONE_STEP]).length_bias
    assert bias is not None
    assert bias.ratio == pytest.approx(10 / 20)


def test_evaluations_count_nowhere() -> None:
    held_out = replace(call(40.0, began=20.0, group=7), purpose=Purpose.EVALUATION)
    between = call(40.0, began=20.0, group=7)
    assert read_facts([held_out]).calls == []
    assert report([*ONE_STEP, between]).rollout_utilisation == pytest.approx(0.7)


def test_an_instance_that_became_another_is_one_instance() -> None:
    moved = event("moved", 5.0, began=4.0, instance="solver/0", to="verifier", became="verifier/7")
    facts = read_facts([*ONE_STEP, moved, call(9.0, began=6.0, group=1, instance="verifier/7")])
    assert facts.instances == ["solver/0"]


def test_a_further_instance_counts_while_it_is_there() -> None:
    """Its device is there from 5 to 9 of ten seconds, under another name from 7 on, and works for two of them."""
    grown = event("instance_grown", 5.0, began=4.0, process="engine/solver/1", instance="solver/1", version=0)
    moved = event("moved", 7.0, began=6.0, instance="solver/1", to="verifier", became="verifier/7")
    retired = event("instance_retired", 9.0, began=8.0, process="engine/verifier/7", instance="verifier/7")
    its_call = call(9.0, began=7.0, group=1, instance="verifier/7")
    before, after = report(ONE_STEP), report([*ONE_STEP[:-1], grown, moved, its_call, retired, ONE_STEP[-1]])
    assert after.rollout_utilisation == pytest.approx((10 * before.rollout_utilisation + 2) / (10 + 4))


def test_a_run_without_a_step_has_no_report() -> None:
    assert report_of(Facts(), ALONE) is None


def test_the_figures_of_a_simulated_run_add_up() -> None:
    facts = simulated_run({"default": CostSettings(engine=EngineCosts(slots=4), trainer=TrainerCosts(sample_s=0.1))})
    one = report_of(facts, ALONE)
    assert one is not None
    assert one.steps == 3
    assert one.rollout_s + one.training_s + one.other_s == pytest.approx(one.step_s.mean)
    assert one.other_s >= 0.99  # A publication takes a second.
    assert 0 < one.rollout_utilisation <= 1
    assert 0 < one.training_utilisation <= 1
    assert one.length_bias is not None
    assert one.length_bias.ratio == 1.0


def test_the_journal_of_any_run_will_do() -> None:
    run = ScriptedRun(take_turns, agents=AGENTS, steps=2).play()
    assert report(run.events.all).steps == 2


def test_tables_name_every_figure_and_compare_with_the_first() -> None:
    one = report(ONE_STEP)
    slow = report([*ONE_STEP[:-1], replace(ONE_STEP[-1], t=20.0, ended=20.0)])
    assert "queue of solver" in as_text(report_table("run", one))
    assert "20.0 s  2.00x" in as_text(comparison_table({"fast": one, "slow": slow}))


def test_the_headings_of_a_sweep_are_whole_in_eighty_columns_and_never_cut() -> None:
    keys = ["policies.shared.training.micro_batch", "mode"]
    table = sweep_table(keys, {("32", "microbatch"): report(ONE_STEP)})
    shown = as_text(table, width=80).split()
    words = ["micro_batch", "mode", "step", "rollout", "visible", "training", "tokens", "second", "busy", "bound"]
    assert [word for word in words if word not in shown] == []
    assert "…" not in as_text(table, width=40)


def test_what_a_kill_discarded_counts_once_and_the_gap_is_no_step() -> None:
    def second(began: float) -> list[Event]:
        return [
            call(began + 4.0, began=began, group=2, version=1),
            worked("micro_batch", began + 5.0, began=began + 4.0, rows=2, tokens=20.0),
            worked("updated", began + 6.0, began=began + 5.0, version=2),
            worked("published", began + 7.0, began=began + 6.0, version=2),
            event("rollout_ended", began + 4.0, began=began, step=1),
            event("group_admitted", began, group=2, step=1, task="task-2"),
            event("batch_filled", began + 5.0, version=1, groups=[2]),
            event("loaded", began + 7.0, began=began + 6.0, version=2, process="engine/solver/0"),
            event("swapped", began + 4.0, began=began + 3.0, direction="resume", place=0),
            event("moved", began + 3.0, began=began + 2.0, instance="solver/0", to="verifier", became="verifier/7"),
            event("queues", began + 1.0, running={"solver": 1}, queued={"solver": 4}),
            event("step_ended", began + 7.0, began=began, step=1, trained=[2], versions={"solver": 2}),
        ]

    resumed = event("resumed", 100.0, step=1, versions={"solver": 1}, next_group=2, active=[])
    again = worked("published", 101.0, began=100.0, version=1)
    killed, undisturbed = [*ONE_STEP, *second(10.0), resumed, again, *second(102.0)], [*ONE_STEP, *second(10.0)]
    assert read_facts([*ONE_STEP, *second(10.0), resumed]) == read_facts(ONE_STEP)
    one, other = report(killed), report(undisturbed)
    same = ("steps", "rollout_s", "training_s", "staleness_mean", "staleness_most", "publish_lag_s", "makespan_s")
    assert [getattr(one, figure) for figure in same] == [getattr(other, figure) for figure in same]
