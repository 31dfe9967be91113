"""Decides whether the sections of a config fit one another.

`overlap_misfits`   when tasks are played and rows are trained: `mode`, `pipeline.ahead`, `pipeline.updates`,
                    `credit.ready`, `credit.streaming` and `deterministic`; the table of what each of them decides is in
                    docs/architecture.md, section Modes
`credit_misfits`    the agents that credit names, the branches that it compares, its terms
`adapter_misfits`   what engines have room for: adapters alone, those of several policies on the same instances
`together_misfits`  whether adapters that are to be trained together can be computed in one pass
`evaluation_misfits`    whether there are evaluations that `checkpoint.best` and `stop` can compare
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from flexmarl.agents.settings import TeamSettings
from flexmarl.credit.interface import GroupKey
from flexmarl.credit.settings import CreditSettings, divides_by_mean
from flexmarl.orchestrator.settings import CheckpointSettings, EvaluateSettings, Mode, PipelineSettings, StopSettings
from flexmarl.records import AgentName
from flexmarl.training.settings import TrainingSettings

if TYPE_CHECKING:
    from flexmarl.config.run_settings import PolicySettings


def evaluation_misfits(
    evaluate: EvaluateSettings,
    checkpoint: CheckpointSettings,
    stop: StopSettings | None,
    training: Mapping[str, TrainingSettings],
) -> Iterator[str]:
    """Yields a sentence for each setting that leaves `checkpoint.best`, `stop` or `kl.reset` without evaluations to
    compare. `training`: trained policies."""
    resets = {f"policies.{name}.training.kl.reset": of.kl.reset for name, of in training.items() if of.kl is not None}
    by_patience = [key for key, reset in resets.items() if reset is not None and reset.patience is not None]
    asking = [key for key, set_ in (("checkpoint.best", checkpoint.best), ("stop", stop)) if set_]
    compares = " and ".join([*asking, *by_patience])
    if not compares:
        return
    if not evaluate.tasks or not evaluate.every:
        key, value = ("every", 10) if evaluate.tasks else ("tasks", 256)
        yield f"{compares}: evaluations are compared, but evaluate.{key} is 0; use evaluate.{key}={value}"
    elif evaluate.every_tasks < evaluate.tasks:
        yield (
            f"{compares}: evaluations are compared, but those in between play {evaluate.every_tasks} tasks "
            f"(evaluate.every_tasks) and the others {evaluate.tasks}; use evaluate.every_tasks={evaluate.tasks}"
        )
    if checkpoint.best is not None and not checkpoint.every:
        yield "checkpoint.best is set, but checkpoint.every is 0, which saves none; use checkpoint.every=10"


def adapter_misfits(policies: "Mapping[str, PolicySettings]", *, versions: int) -> Iterator[str]:
    """Yields a sentence for each policy whose weights its engine has no room for.

    `versions` of each adapter are side by side: the lag of the mode and 1.
    """
    for name, policy in policies.items():
        if policy.serves_together is not None:
            yield from _shares(name, policy, policies)
        room, lora, at = getattr(policy.engine, "adapters", None), policy.training.lora, f"policies.{name}"
        if room is None or not policy.trainable:
            continue
        if lora is None or policy.training.publish == "merged":
            is_, other = (
                ("lora is null", "lora={rank: 16}") if lora is None else ("publish is 'merged'", "publish=adapter")
            )
            yield (
                f"{at}.engine.adapters is set, but {at}.training.{is_}, so that whole weights are published; use "
                f"{at}.engine.adapters=null, or {at}.training.{other}"
            )
        elif lora.rank > room.max_rank:
            yield (
                f"{at}.training.lora.rank is {lora.rank}, but {at}.engine.adapters.max_rank is {room.max_rank}; use "
                f"max_rank={lora.rank}, or a smaller rank"
            )
    for host, policy in policies.items():
        served = [name for name, other in policies.items() if (other.serves_together or name) == host]
        trained = [name for name in served if policies[name].trainable]
        room = getattr(policy.engine, "adapters", None)
        if room is not None and len(trained) > room.slots:
            yield (
                f"{' and '.join(trained)} are served together: {len(trained)} adapters of {versions} versions each are "
                f"{len(trained) * versions}, but policies.{host}.engine.adapters.slots is {room.slots}, which is room "
                f"for {room.slots} x {versions} = {room.slots * versions}; use slots={len(trained)}"
            )


def _shares(name: str, policy: "PolicySettings", policies: "Mapping[str, PolicySettings]") -> Iterator[str]:
    """Yields a sentence for each fact that keeps a policy from being served by the instances of the one it names."""
    at, host = (
        f"policies.{name}.serves_together is '{policy.serves_together}'",
        policies.get(str(policy.serves_together)),
    )
    if host is None or host is policy:
        others = ", ".join(sorted(set(policies) - {name})) or "none"
        yield f"{at}, which is no other policy; there are: {others}"
    elif host.serves_together is not None:
        yield f"{at}, which itself is served by the instances of '{host.serves_together}'; use {host.serves_together}"
    elif policy.model != host.model:
        yield f"{at}, but their models are '{policy.model}' and '{host.model}'; use one model for both, or null"
    elif getattr(host.engine, "adapters", None) is None:
        yield (
            f"{at}, but policies.{policy.serves_together}.engine has no room for adapters beside each other; use "
            f"engine: {{type: vllm, adapters: {{slots: 2}}}} there, or serves_together=null"
        )
    for key in ("engine", "instances"):
        if host is not None and getattr(policy, key) != getattr(host, key):
            yield f"{at}, whose {key} it has; leave policies.{name}.{key} out"


ONE_PER_PASS = ("dtype", "max_tokens_per_forward", "tree", "activation_checkpointing")
"""Settings of training of which a pass has one, whoever's rows are in it."""


def trained_together(policies: "Mapping[str, PolicySettings]") -> list[tuple[str, ...]]:
    """Trained policies with `training.together`, those of each model in one tuple, in the order of the config."""
    found: list[list[str]] = []
    for name, policy in policies.items():
        if policy.trainable and policy.training.together:
            same = next((names for names in found if policies[names[0]].model == policy.model), None)
            if same is None:
                found.append(same := [])
            same.append(name)
    return [tuple(names) for names in found]


def together_misfits(
    policies: "Mapping[str, PolicySettings]", credit: CreditSettings, *, places: int, in_turns: bool
) -> Iterator[str]:
    """Yields a sentence for each fact that keeps adapters from being computed in one pass.

    `places` is the number of places that policies share, if they do. `in_turns`: these have the engines' devices.
    """
    groups = trained_together(policies)
    for names in groups:
        first, at = policies[names[0]], f"policies.{names[0]}.training"
        if len(names) == 1:
            others = [f"{name} has '{policies[name].model}'" for group in groups for name in group if name != names[0]]
            yield (
                f"{at}.together is true, but no other policy with together: true is trained on its model, "
                f"'{first.model}' ({', '.join(others) or 'there is none with it'}); use one model for all of them, or "
                f"together=false"
            )
        for name in names:
            training, its = policies[name].training, f"policies.{name}.training"
            if training.lora is None:
                yield (
                    f"{its}.together is true, but {its}.lora is null, so that the weights of the model itself are "
                    f"trained, which no other policy can share; use lora={{rank: 16}}, or together=false"
                )
            if training.ranks > 1:
                yield (
                    f"{its}.together is true, but {its}.ranks is {training.ranks}, and policies that are trained "
                    f"together share one process; use ranks=1, or together=false"
                )
            for key in ONE_PER_PASS:
                mine, other = (getattr(of, key) for of in (training, first.training))
                if mine != other:
                    yield (
                        f"{names[0]} and {name} are trained together, but policies.{name}.training.{key} is {mine!r} "
                        f"and {at}.{key} is {other!r}, and a pass has one {key}; use the same, or together=false"
                    )
    if groups and credit.streaming != "off":
        yield (
            f"policies.{groups[0][0]}.training.together is true, but credit.streaming is '{credit.streaming}', whose "
            f"passes hold the rows of one group each; use credit.streaming=off, or together=false"
        )
    if groups and places:
        by = "mode=colocated" if in_turns else "process_groups"
        instead = "mode=sync" if in_turns else "process_groups.at_once=null and keep_updated=null"
        yield (
            f"policies.{groups[0][0]}.training.together is true, but policies are trained on {places} "
            f"{'place' if places == 1 else 'places'} that hold one policy at a time ({by}); use {instead}, or "
            f"together=false"
        )


def overlap_misfits(
    mode: Mode,
    pipeline: PipelineSettings,
    credit: CreditSettings,
    training: Mapping[str, TrainingSettings],
    *,
    deterministic: bool,
) -> Iterator[str]:
    """Yields sentences about settings that exclude each other; at least one if any do. `training`: trained policies."""
    yield from _memory_has_an_order(mode, credit)
    yield from _rows_can_be_ready(mode, credit)
    yield from _rows_can_stream(mode, credit, training, deterministic=deterministic)
    yield from _steps_can_overlap(mode, pipeline)
    yield from _policies_can_update_apart(mode, pipeline, credit)
    yield from _publications_can_wait(mode, pipeline)
    yield from _groups_can_be_replaced(mode, credit)
    yield from _policies_can_rest(mode, training)
    if deterministic:
        yield from _bits_can_repeat(mode, credit)


def _memory_has_an_order(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if credit.needs == "state" and mode in (Mode.ASYNC, Mode.GREEDY):
        yield (
            f"credit.estimator keeps a state from episode to episode, in a fixed order, but mode '{mode.value}' "
            f"takes groups as they finish; use mode=microbatch or mode=fifo, or an estimator without a state"
        )


def _rows_can_be_ready(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if credit.ready == "group":
        return
    if not mode.synchronous:
        yield f"credit.ready is 'trajectory', but mode '{mode.value}' takes whole groups; use credit.ready=group"
    if credit.needs != "row":
        yield (
            f"credit.ready is 'trajectory', but {', '.join(f'credit.{key}' for key in credit.compares)} "
            f"compares the rows of a {credit.needs}; use credit.estimator.type=reinforce without terms that "
            f"compare episodes, whitening or balance, or credit.ready=group"
        )
    elif credit.filter is not None:
        yield (
            "credit.ready is 'trajectory', but credit.filter judges whole groups; use credit.filter=null, or "
            "credit.ready=group"
        )


def _rows_can_stream(
    mode: Mode, credit: CreditSettings, training: Mapping[str, TrainingSettings], *, deterministic: bool
) -> Iterator[str]:
    if credit.streaming == "off":
        return
    if mode is not Mode.MICROBATCH:
        yield (
            f"credit.streaming is 'linear', but in mode '{mode.value}' rows wait for more than their "
            f"group, or are not on-policy; use mode=microbatch, or credit.streaming=off"
        )
    if deterministic or credit.ready == "trajectory":
        yield (
            "credit.streaming is 'linear', which needs deterministic=false, since the order in which episodes end "
            "depends on time, and credit.ready=group; set both, or use credit.streaming=off"
        )
    for name, settings in training.items():
        if because := settings.streaming_obstacle:
            yield f"credit.streaming is 'linear', but policies.{name}.training.{because}; or credit.streaming=off"


def _groups_can_be_replaced(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if credit.filter and credit.filter.refill and not mode.synchronous:
        yield (
            f"credit.filter.refill is true, but mode '{mode.value}' admits another task for every dropped "
            f"one anyway; use refill=false there"
        )


def _policies_can_rest(mode: Mode, training: Mapping[str, TrainingSettings]) -> Iterator[str]:
    for name, settings in training.items():
        if settings.phases and not mode.synchronous:
            yield (
                f"policies.{name}.training.phases counts steps in which all policies play at one version, but in mode "
                f"'{mode.value}' rollout goes on over their ends; use mode=microbatch, or leave phases out"
            )


def _steps_can_overlap(mode: Mode, pipeline: PipelineSettings) -> Iterator[str]:
    if pipeline.ahead and mode not in (Mode.SYNC, Mode.MICROBATCH):
        yield (
            f"pipeline.ahead is true, but in mode '{mode.value}' rollout does not wait for updates, or engines sleep "
            f"during training; use mode=microbatch, or pipeline.ahead=false"
        )


def _policies_can_update_apart(mode: Mode, pipeline: PipelineSettings, credit: CreditSettings) -> Iterator[str]:
    if pipeline.updates == "together":
        return
    if mode.synchronous:
        yield (
            f"pipeline.updates is 'per_policy', but in mode '{mode.value}' all policies end a step together; "
            f"use mode=async, or pipeline.updates=together"
        )
    if credit.needs not in ("row", "group"):
        yield (
            f"pipeline.updates is 'per_policy', but credit compares a whole {credit.needs}; "
            f"use pipeline.updates=together"
        )


def _publications_can_wait(mode: Mode, pipeline: PipelineSettings) -> Iterator[str]:
    rule = pipeline.publish.type
    if rule == "eager":
        return
    if mode.synchronous:
        yield (
            f"pipeline.publish.type is '{rule}', but in mode '{mode.value}' every token of a step is sampled at the "
            f"step's version; use mode=async, or pipeline.publish.type=eager"
        )
    elif pipeline.updates == "per_policy":
        yield (
            f"pipeline.publish.type is '{rule}', but with pipeline.updates=per_policy a batch may end early, and then "
            f"the versions between two publications have no bound; use pipeline.updates=together, or "
            f"pipeline.publish.type=eager"
        )


def _bits_can_repeat(mode: Mode, credit: CreditSettings) -> Iterator[str]:
    if not mode.synchronous:
        yield (
            f"deterministic is true, but mode is '{mode.value}', in which the rows of a batch depend on time; "
            f"use mode=microbatch, or deterministic=false"
        )
    if credit.ready == "trajectory":
        yield (
            "deterministic is true, but credit.ready is 'trajectory', and which trajectory ends first depends on "
            "time; use credit.ready=group, or deterministic=false"
        )


def credit_misfits(
    credit: CreditSettings, team: TeamSettings, trained: Collection[str], *, pays_divergence: Collection[str]
) -> Iterator[str]:
    """Yields a sentence for each setting that does not fit.

    `trained` are the policies that are updated. `pays_divergence` are those whose rewards pay for a divergence.
    """
    agents = [AgentName(agent) for agent, seat in team.agents.items() if seat.policy in trained]
    yield from _names_are_of_the_team(credit, team)
    yield from _every_agent_has_a_key(credit, team, trained)
    yield from _branches_are_where_they_are_compared(credit, team)
    for where, term in credit.terms.items():
        yield from term.misfits(where, credit, agents)
    yield from _negative_rewards_are_not_divided_by(credit, team, pays_divergence)


def has_key(agent: str, key: GroupKey) -> bool:
    """Returns True if `key` says what the agent's rows are grouped by."""
    return not isinstance(key, Mapping) or bool({agent, "*"} & {*key})


def _names_are_of_the_team(credit: CreditSettings, team: TeamSettings) -> Iterator[str]:
    named = {f"per_agent.{agent}": {str(agent)} for agent in credit.per_agent}
    for where, term in credit.terms.items():
        named[where] = {*term.agents, *getattr(term, "solvers", ())}
    for where, estimator in credit.estimators.items():
        named[f"{where}.episode_roles"] = roles = {*getattr(estimator, "episode_roles", ())}
        named[f"{where}.key"] = {*estimator.key} - {"*"} - roles if isinstance(estimator.key, Mapping) else set()
    for where, agents in named.items():
        for agent in sorted(agents - set(team.agents)):
            yield f"credit.{where} is for agent '{agent}'; the team has: {', '.join(team.agents)}"


def _every_agent_has_a_key(credit: CreditSettings, team: TeamSettings, trained: Collection[str]) -> Iterator[str]:
    for agent, seat in team.agents.items():
        key = credit.estimator_of(agent).key
        if seat.policy in trained and not has_key(agent, key):
            yield (
                f"credit has a key for {', '.join(key)}, but none for agent '{agent}'; add it to the estimator's key, "
                f"or '*' for all others"
            )


def _branches_are_where_they_are_compared(credit: CreditSettings, team: TeamSettings) -> Iterator[str]:
    """Checks that episodes branch only if credit allows it, and do so if credit compares branches.

    A custom workflow may fork its team itself, so it needs no `candidates`.
    """
    candidates = getattr(team.workflow, "candidates", 1)
    for where in credit.follows_calls if candidates > 1 else ():
        yield (
            f"credit.{where} follows calls one by one, but team.workflow.candidates is {candidates}, so that an "
            f"episode branches at every turn; use team.workflow.candidates=1, or compare the candidates of a turn "
            f"(credit.estimator.type=atgrpo or c3, shaping type tree)"
        )
    for where in credit.needs_branches if candidates == 1 and team.workflow.type != "custom" else ():
        yield (
            f"credit.{where} compares the candidates of a turn, but team.workflow of type '{team.workflow.type}' plays "
            f"each turn once; use team.workflow.type=turns with candidates=4, or leave credit.{where} out"
        )


def _negative_rewards_are_not_divided_by(
    credit: CreditSettings, team: TeamSettings, pays_divergence: Collection[str]
) -> Iterator[str]:
    """Checks rewards that a policy's divergence may make negative. Terms are checked in CreditSettings."""
    for agent, seat in team.agents.items():
        if seat.policy in pays_divergence and divides_by_mean(credit.estimator_of(agent)):
            yield (
                f"policies.{seat.policy}.training.kl.where is 'reward', which may make rewards of agent '{agent}' "
                f"negative, but its estimator, {credit.estimator_of(agent).type}, divides by their mean; use "
                f"kl.where=loss, or another estimator"
            )
