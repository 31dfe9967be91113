"""Settings of when to play, update and train that exclude each other are refused together, each by its name."""

import pytest

from flexmarl.config import load_run
from flexmarl.inference.settings import VllmSettings
from tests.unit.config.configs import refused


def test_a_frozen_policy_may_be_served_in_any_type(config):
    mixed = ["policies.two.engine.dtype=bfloat16"]
    assert refused(config, *mixed)[0].startswith("policies.two.engine.dtype is 'bfloat16', but training.dtype")
    assert load_run(config, [*mixed, "policies.two.trainable=false"]).trained == {"one"}


def test_policies_share_places_in_processes_of_their_own(config):
    assert refused(config, "process_groups.at_once=1") == [
        "process_groups.at_once is 1 with 2 trained policies, but cluster.backend=inline has one process for all of "
        "them; use cluster.backend=ray, or process_groups.at_once=null"
    ]
    on_ray = ["cluster.backend=ray", "process_groups={at_once: 1, suspend: eager, host_gb: 2}"]
    assert load_run(config, on_ray).shared_places == 1
    assert load_run(config, ["cluster.backend=ray", "process_groups.at_once=2"]).shared_places == 0
    nodes = ["cluster.address=10.0.0.1:6379", "process_groups.host_gb=null"]
    assert load_run(config, [*on_ray, *nodes]).shared_places == 1
    assert refused(config, "cluster.backend=ray", "process_groups.suspend=eager") == [
        "process_groups.suspend is 'eager', but every trained policy has devices of its own; use cluster.backend=ray "
        "with process_groups.at_once below 2, or process_groups.suspend=on_demand"
    ]


def test_colocated_places_have_the_devices_of_engines_on_one_machine(config):
    colocated = ["mode=colocated", "cluster.backend=ray"]
    run = load_run(config, colocated)
    assert (run.shared_places, run.in_turns, run.takes_turns("one"), run.takes_turns("two")) == (2, True, True, True)
    assert load_run(config, [*colocated, "process_groups={at_once: 1, suspend: eager}"]).shared_places == 1
    inline = load_run(config, ["mode=colocated"])
    assert (inline.shared_places, inline.in_turns, inline.takes_turns("one")) == (0, False, False)
    assert not load_run(config, ["mode=sync", "cluster.backend=ray"]).takes_turns("one")
    assert refused(config, *colocated, "cluster.address=10.0.0.1:6379") == [
        "mode is 'colocated', and cluster.address is '10.0.0.1:6379', but engines and training processes take turns on "
        "one machine only so far; use cluster.address=local, or mode=sync"
    ]
    both = [f"policies.{name}.training={{lora: {{rank: 2}}, together: true}}" for name in ("one", "two")]
    assert refused(config, *colocated, *both) == [
        "policies.one.training.together is true, but policies are trained on 2 places that hold one policy at a time "
        "(mode=colocated); use mode=sync, or together=false"
    ]


def test_an_engine_that_does_not_sleep_gives_no_device_to_its_trainer(config, monkeypatch):
    monkeypatch.setattr(VllmSettings, "gives_way", False)
    vllm, colocated = "policies.two.engine={type: vllm}", ["mode=colocated", "cluster.backend=ray"]
    assert refused(config, *colocated, vllm) == [
        "mode is 'colocated', in which engines of trained policies give their devices up, but policies.two.engine.type "
        "is 'vllm', which does not sleep; use engine.type=embedded, or mode=sync"
    ]
    frozen = load_run(config, [*colocated, vllm, "policies.two.trainable=false"])
    assert (frozen.takes_turns("one"), frozen.takes_turns("two")) == (True, False), "it has a device of its own"


def test_ranks_are_processes_of_one_machine(config):
    ranks = "policies.one.training.ranks=2"
    assert refused(config, ranks) == [
        "policies.one.training.ranks is 2, but cluster.backend=inline has one process; use cluster.backend=ray, or "
        "ranks=1"
    ]
    assert refused(config, "process_groups.keep_updated=true") == [
        "process_groups.keep_updated is true, but cluster.backend=inline has one process, with which all is lost; use "
        "cluster.backend=ray, or keep_updated=null"
    ]
    run = load_run(config, [ranks, "cluster.backend=ray", "process_groups.call_timeout_s=60"])
    assert (run.shared_places, run.ranks, run.keeps_updated) == (2, 2, True)


def test_states_are_copied_to_another_node_only_where_there_is_one(config):
    ranks, copies, keep = "policies.one.training.ranks=2", "process_groups.copies=2", "process_groups.keep_updated"
    joined = ["cluster.backend=ray", "cluster.address=10.0.0.1:6379"]
    assert load_run(config, [ranks, copies, *joined]).process_groups.copies == 2
    assert refused(config, ranks, copies, "cluster.backend=ray") == [
        "process_groups.copies is 2, but cluster.backend=ray with cluster.address=local has one node; use copies=1, or "
        "backend=ray with the address of a Ray that has several"
    ]
    assert refused(config, copies) == [
        "process_groups.copies is 2, but cluster.backend=inline with cluster.address=local has one node; use copies=1, "
        "or backend=ray with the address of a Ray that has several"
    ]
    assert "use keep_updated=true" in refused(config, copies, *joined)[0], "each policy has a trainer of one process"
    assert refused(config, ranks, copies, f"{keep}=false", *joined) == [
        "process_groups.copies is 2, but no copy is made after an update, so that the loss of a node ends the run; use "
        "keep_updated=true, or copies=1"
    ]
    assert refused(config, ranks, "process_groups.host_gb=1", *joined) == [
        "process_groups.host_gb is 1, but on a Ray that others started states are objects, which objects.memory_gib "
        "bounds; use that, or host_gb=null"
    ]


def test_instances_grow_only_where_something_looks_at_the_queues(config):
    assert refused(config, "balance.grow=true") == [
        "balance.grow is true, but balance.rule is 'none', so that nothing looks at the queues; use "
        "balance.rule=drain_time, or balance.grow=false"
    ]
    assert refused(config, "balance.grow=true", "balance.rule=drain_time") == [
        "balance.rule is 'drain_time', but inline all engines share one device; use cluster.backend=ray, or "
        "balance.rule=none"
    ]
    assert load_run(config, ["balance={grow: true, rule: drain_time}", "cluster.backend=ray"]).balance.grow


def test_a_frozen_policy_keeps_no_other_from_moving(config):
    server = "{type: openai, url: http://gpu-box:8000/v1, model: judge}"
    frozen = [f"policies.two.engine={server}", "policies.two.trainable=false"]
    assert load_run(config, [*frozen, "balance.rule=drain_time", "cluster.backend=ray"]).trained == {"one"}


def test_instances_move_between_processes(config):
    assert refused(config, "balance.rule=queue_gap") == [
        "balance.rule is 'queue_gap', but inline all engines share one device; use cluster.backend=ray, or "
        "balance.rule=none"
    ]
    assert load_run(config, ["balance.rule=queue_gap", "cluster.backend=ray"]).balance.rule == "queue_gap"


def test_rows_are_ready_alone_only_if_nothing_compares_them(config):
    assert refused(config, "credit.ready=trajectory", "credit.filter=null") == [
        "credit.ready is 'trajectory', but credit.estimator compares the rows of a group; use credit.estimator.type="
        "reinforce without terms that compare episodes, whitening or balance, or credit.ready=group"
    ]
    alone = "estimator: {type: reinforce}, filter: null, ready: trajectory"
    for also, where in {
        "per_agent: {writer: {type: rloo}}": "per_agent.writer",
        "shaping: [{type: binary}, {type: completion_time}]": "shaping[1]",
        "whiten: policy": "whiten",
        "agent_balance: equal, whiten: agent": "whiten, credit.agent_balance",
    }.items():
        (line,) = refused(config, f"credit={{{alone}, {also}}}")
        assert line.startswith(f"credit.ready is 'trajectory', but credit.{where} compares the rows of a ")


def test_a_deterministic_run_is_on_policy(config):
    assert refused(config, "deterministic=true", "mode=async") == [
        "deterministic is true, but mode is 'async', in which the rows of a batch depend on time; "
        "use mode=microbatch, or deterministic=false"
    ]


def test_what_takes_whole_groups_needs_whole_groups(config):
    alone = ["credit={estimator: {type: reinforce}, filter: null, ready: trajectory}"]
    assert refused(config, "mode=greedy", *alone) == [
        "credit.ready is 'trajectory', but mode 'greedy' takes whole groups; use credit.ready=group"
    ]
    assert refused(config, "pipeline.updates=per_policy") == [
        "pipeline.updates is 'per_policy', but in mode 'microbatch' all policies end a step together; use mode=async, "
        "or pipeline.updates=together"
    ]


def test_what_depends_on_time_is_no_part_of_a_deterministic_run(config):
    alone = ["credit={estimator: {type: reinforce}, filter: null, ready: trajectory}"]
    assert refused(config, "deterministic=true", *alone) == [
        "deterministic is true, but credit.ready is 'trajectory', and which trajectory ends first depends on time; "
        "use credit.ready=group, or deterministic=false"
    ]


def test_rollout_is_ahead_only_where_it_would_wait(config):
    assert refused(config, "mode=async", "pipeline.ahead=true") == [
        "pipeline.ahead is true, but in mode 'async' rollout does not wait for updates, or engines sleep "
        "during training; use mode=microbatch, or pipeline.ahead=false"
    ]


def test_publications_are_deferred_only_where_tokens_may_be_older_and_all_policies_update_together(config):
    late = "pipeline.publish={type: adaptive}"
    assert refused(config, late) == [
        "pipeline.publish.type is 'adaptive', but in mode 'microbatch' every token of a step is sampled at the step's "
        "version; use mode=async, or pipeline.publish.type=eager"
    ]
    assert refused(config, late, "mode=async", "pipeline.updates=per_policy") == [
        "pipeline.publish.type is 'adaptive', but with pipeline.updates=per_policy a batch may end early, and then "
        "the versions between two publications have no bound; use pipeline.updates=together, or "
        "pipeline.publish.type=eager"
    ]


def test_costs_are_those_of_a_policy_or_of_the_rest(config):
    assert refused(config, "simulation.costs={onee: {}, default: {}, two: {}}") == [
        "simulation.costs.onee is for none of the policies; there are: one, two, and default for the rest"
    ]


def test_what_whitens_or_balances_makes_credit_look_at_the_whole_step(config):
    whitened = ["mode=async", "pipeline.updates=per_policy", "credit.whiten=policy"]
    assert refused(config, *whitened) == [
        "pipeline.updates is 'per_policy', but credit compares a whole batch; use pipeline.updates=together"
    ]


def test_a_critic_is_there_exactly_where_credit_looks_at_values(config):
    problems = refused(config, "credit.estimator={type: gae}")
    assert problems[0] == (
        "credit compares agent 'solver' with a critic's values, but policies.one.training.critic is null; "
        "use policies.one.training.critic={}, or another estimator"
    )
    assert refused(config, "policies.one.training.critic={}") == [
        "policies.one.training.critic is set, but no estimator of its agents reads values; use critic=null, or "
        "credit.estimator.type=gae"
    ]


@pytest.mark.parametrize("mode", ["sync", "microbatch", "colocated", "one_step_off", "async", "fifo", "greedy"])
def test_what_older_versions_sampled_is_corrected_unless_it_is_said_otherwise(config, mode):
    def chosen(*overrides):
        policies = load_run(config, [f"mode={mode}", *overrides]).policies
        return [policies[name].training.correction.model_dump() for name in ("one", "two")]

    capped = {"type": "tis", "low": 0.0, "cap": 2.0, "veto": None, "batch_normalise": False}
    none, on_policy = {"type": "none"}, mode in ("sync", "microbatch", "colocated")
    assert chosen() == [none if on_policy else capped] * 2
    assert chosen("policies.one.training.correction={type: none}") == [none, none if on_policy else capped]
    assert chosen("policies.one.training.correction={type: icepop}")[0]["type"] == "icepop"
    assert chosen("policies.two.trainable=false")[1] == none


def test_an_estimator_with_a_memory_needs_groups_in_an_order(config):
    assert refused(config, "mode=async", "credit.estimator={type: rae}") == [
        "credit.estimator keeps a state from episode to episode, in a fixed order, but mode 'async' takes groups as "
        "they finish; use mode=microbatch or mode=fifo, or an estimator without a state"
    ]


def test_rows_stream_only_where_their_gradients_are_a_line_of_their_credit(config):
    assert refused(config, "credit.streaming=linear", "mode=sync") == [
        "credit.streaming is 'linear', but in mode 'sync' rows wait for more than their group, or are not on-policy; "
        "use mode=microbatch, or credit.streaming=off"
    ]
    assert refused(config, "credit.streaming=linear", "policies.one.training.entropy_coef=0.1") == [
        "credit.streaming is 'linear', but policies.one.training.entropy_coef adds a term that no advantage "
        "multiplies; leave it out; or credit.streaming=off"
    ]
    assert "which needs deterministic=false" in refused(config, "credit.streaming=linear", "deterministic=true")[0]


def test_groups_are_replaced_where_a_step_waits_for_them(config):
    assert refused(config, "credit.filter.refill=true", "mode=async") == [
        "credit.filter.refill is true, but mode 'async' admits another task for every dropped one anyway; "
        "use refill=false there"
    ]


def test_a_memory_has_no_order_in_a_greedy_run_either(config):
    assert "in a fixed order, but mode 'greedy'" in refused(config, "mode=greedy", "credit.estimator={type: rae}")[0]


def test_a_row_that_is_ready_alone_has_no_filter_and_does_not_stream(config):
    alone = ["credit.ready=trajectory", "credit.estimator={type: reinforce}"]
    assert refused(config, *alone) == [
        "credit.ready is 'trajectory', but credit.filter judges whole groups; use credit.filter=null, or "
        "credit.ready=group"
    ]
    streaming = ["credit.streaming=linear", "credit.ready=trajectory", "credit.filter=null"]
    assert any("and credit.ready=group" in line for line in refused(config, *streaming))


TIMED = "policies={one: {model: model, engine: {type: timed}}, two: {model: model, engine: {type: timed}}}"


def test_a_timed_policy_needs_replies_for_its_agents_and_for_no_others(config):
    (line,) = refused(config, "policies.one.engine={type: timed}")
    assert line.startswith("simulation.replies.solver is missing: a simulated or timed engine has no weights")
    given = "simulation.replies.solver={type: lengths, mean: 9}"
    assert load_run(config, ["policies.one.engine={type: timed}", given]).is_modelled("one")
    misspelt = "simulation.replies={default: {type: lengths, mean: 9}, solvr: {type: lengths, mean: 9}}"
    assert refused(config, "policies.one.engine={type: timed}", misspelt) == [
        "simulation.replies.solvr: there is no such agent; there are: solver, writer"
    ]


def test_timed_instances_move_in_one_process_but_not_to_a_policy_that_computes(config):
    replies = "simulation.replies.default={type: lengths, mean: 9}"
    for backend in ("inline", "ray"):
        rule = ["balance.rule=drain_time", f"cluster.backend={backend}"]
        assert load_run(config, [TIMED, replies, *rule]).balance.rule == "drain_time"
        assert refused(config, "policies.one.engine={type: timed}", replies, *rule)[-1] == (
            "balance.rule is 'drain_time', but policies.one.engine.type is 'timed', which takes no room on a node, so "
            "that an engine which computes has none in its place; use engine.type=embedded, or timed for all trained "
            "policies, or balance.rule=none"
        )


TOGETHER = (
    "policies.one={model: model, engine: {type: vllm, adapters: {slots: 2}}, training: {lora: {rank: 8}}}",
    "policies.two={model: model, serves_together: one, training: {lora: {rank: 8}}}",
)


def test_policies_are_served_together_on_the_engine_and_instances_of_one(config):
    settings = load_run(config, [*TOGETHER, "policies.one.instances=3"])
    two = settings.policies["two"]
    assert (two.engine, two.instances) == (settings.policies["one"].engine, 3)
    assert two.training.publish == "adapter"
    assert settings.together("one") == settings.together("two") == ("one", "two")
    assert load_run(config).together("two") == ("two",)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["policies.two.serves_together=three"],
            "policies.two.serves_together is 'three', which is no other policy; there are: one",
        ),
        (
            ["policies.two.model=other"],
            "policies.two.serves_together is 'one', but their models are 'other' and 'model'; use one model for both, "
            "or null",
        ),
        (
            ["policies.two.training.lora.rank=32"],
            "policies.two.training.lora.rank is 32, but policies.two.engine.adapters.max_rank is 16; use max_rank=32, "
            "or a smaller rank",
        ),
        (
            ["policies.one.engine.adapters.slots=1", "mode=async", "pipeline.lag=2"],
            "one and two are served together: 2 adapters of 3 versions each are 6, but policies.one.engine.adapters."
            "slots is 1, which is room for 1 x 3 = 3; use slots=2",
        ),
        (
            ["policies.two.training.lora=null"],
            "policies.two.engine.adapters is set, but policies.two.training.lora is null, so that whole weights are "
            "published; use policies.two.engine.adapters=null, or policies.two.training.lora={rank: 16}",
        ),
        (
            ["balance.rule=drain_time", "cluster.backend=ray"],
            "balance.rule is 'drain_time', but policies.two.serves_together is set, and an instance of several "
            "policies cannot move to one of them; use balance.rule=none, or serves_together=null",
        ),
    ],
)
def test_policies_that_cannot_be_served_together_are_refused_with_the_numbers(config, overrides, problem):
    assert problem in refused(config, *TOGETHER, *overrides)


def test_an_engine_without_room_for_adapters_serves_one_policy(config):
    embedded = ["policies.one={model: model}", TOGETHER[1]]
    assert refused(config, *embedded) == [
        "policies.two.serves_together is 'one', but policies.one.engine has no room for adapters beside each other; "
        "use engine: {type: vllm, adapters: {slots: 2}} there, or serves_together=null"
    ]


def test_a_frozen_policy_is_served_by_the_base_of_the_others(config):
    frozen = "policies.two={model: model, serves_together: one, trainable: false}"
    one = "policies.one={model: model, engine: {type: vllm, adapters: {}}, training: {lora: {rank: 8}}}"
    assert load_run(config, [one, frozen]).together("two") == ("one", "two")


def test_adapters_are_trained_together_on_one_base_only(config):
    both = [f"policies.{name}.training={{lora: {{rank: 2}}, together: true}}" for name in ("one", "two")]
    assert load_run(config, both).trained_together == [("one", "two")]
    assert load_run(config, [*both, "cluster.backend=ray"]).trained_together == [("one", "two")]
    assert load_run(config, [*both, "policies.two.training.lora.rank=4"]).trained_together == [("one", "two")]
    assert load_run(config, []).trained_together == []
    assert refused(config, both[0]) == [
        "policies.one.training.together is true, but no other policy with together: true is trained on its model, "
        "'model' (there is none with it); use one model for all of them, or together=false"
    ]
    assert refused(config, *both, "policies.two.model=other") == [
        "policies.one.training.together is true, but no other policy with together: true is trained on its model, "
        "'model' (two has 'other'); use one model for all of them, or together=false",
        "policies.two.training.together is true, but no other policy with together: true is trained on its model, "
        "'other' (one has 'model'); use one model for all of them, or together=false",
    ]
    assert refused(config, *both, "policies.two.training.lora=null") == [
        "policies.two.training.together is true, but policies.two.training.lora is null, so that the weights of the "
        "model itself are trained, which no other policy can share; use lora={rank: 16}, or together=false"
    ]


def test_policies_that_are_trained_together_agree_on_how_a_pass_is_made(config):
    both = [f"policies.{name}.training={{lora: {{rank: 2}}, together: true}}" for name in ("one", "two")]
    assert refused(
        config, *both, "policies.two.training.max_tokens_per_forward=512", "policies.two.training.tree=off"
    ) == [
        "one and two are trained together, but policies.two.training.max_tokens_per_forward is 512 and "
        "policies.one.training.max_tokens_per_forward is 16384, and a pass has one max_tokens_per_forward; use the "
        "same, or together=false",
        "one and two are trained together, but policies.two.training.tree is 'off' and policies.one.training.tree is "
        "'auto', and a pass has one tree; use the same, or together=false",
    ]
    ranks = ["cluster.backend=ray", "policies.two.training.ranks=2"]
    assert refused(config, *both, *ranks) == [
        "policies.two.training.together is true, but policies.two.training.ranks is 2, and policies that are trained "
        "together share one process; use ranks=1, or together=false"
    ]
    assert refused(config, *both, "cluster.backend=ray", "process_groups.at_once=1") == [
        "policies.one.training.together is true, but policies are trained on 1 place that hold one policy at a time "
        "(process_groups); use process_groups.at_once=null and keep_updated=null, or together=false"
    ]
    assert refused(config, *both, "credit={streaming: linear}") == [
        "policies.one.training.together is true, but credit.streaming is 'linear', whose passes hold the rows of one "
        "group each; use credit.streaming=off, or together=false"
    ]
    different = ["policies.two.training.kl={coef: 0.1}", "policies.two.training.loss={type: gspo}"]
    assert load_run(config, [*both, *different]).trained_together == [("one", "two")]
