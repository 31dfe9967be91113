"""Decides a small random run and its faults, from one seed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from flexmarl.analysis.costs import EngineCosts
from flexmarl.cluster.interface import ResidentKind
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import InstanceId, PolicyName
from flexmarl.testing.faults.fault_plan import FaultKind, FaultPlan, Targets, draw_fault, draw_placed, draw_plan

PER_POLICY = "per_policy"
"""Mode `async`, in which each policy is updated when its own batch is full."""
MODES = (*(mode.value for mode in Mode), PER_POLICY)
SYNCHRONOUS = frozenset(mode.value for mode in Mode if mode.synchronous)
TEAMS: tuple[Mapping[str, str], ...] = (
    {"solver": "solver"},
    {"solver": "solver", "verifier": "verifier"},
    {"solver": "shared", "verifier": "shared"},
    {"solver": "solver", "judge": "frozen"},
    {"solver": "shared", "verifier": "shared", "critic": "critic"},
    {"planner": "planner", "solver": "solver", "verifier": "verifier"},
    {"solver": "solver", "verifier": "verifier", "judge": "frozen"},
)
"""Teams: the agents, and the policy of each. The policy `frozen` is not trained."""
ENGINE_COSTS = EngineCosts(
    decode_s=0.1, decode_request_s=0.0, load_s=0.05, move_s=0.05, start_s=1.0, sleep_s=0.0, wake_s=0.0
)
"""The costs of every engine of a run."""
HOME, OTHERS = "home", ("left", "right")
"""Nodes of the runs that have several. Trainers are on the first one; another one may be lost."""
PLAYED_ELSEWHERE = 0.3
"""Share of runs on several nodes, whose episodes are played by rollout workers."""
PLAYED_BY_PROGRAMS = 0.2
"""Share of the runs on one node whose seats are played by programs at doors."""
LOSSES_WHILE_STREAMING = 0.05
"""Share of runs that stream credit to trainers that are swapped, and lose a trainer and a write of the store.

By chance alone, about one run in 3 000 would be drawn so, and its faults would all strike in about one of 20 000.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One random run: its sizes, speeds, settings and faults."""

    seed: int
    mode: str
    """The mode, from MODES."""
    agents: Mapping[str, str]
    rounds: int
    """Number of times that every agent speaks in an episode."""
    programs: bool = False
    """True if programs play the seats, which misbehave."""
    parallel: bool
    """True if all agents but the first speak at the same time."""
    steps: int
    groups: int
    instances: Mapping[str, int]
    """Number of instances of each policy."""
    workers: int = 0
    """Number of rollout workers; 0: the controller plays, and there is one node."""
    sample_s: float
    """Seconds that a trainer needs for a sample."""
    store_s: float
    """The most seconds that a call of the store takes."""
    raising: float
    """Share of episodes whose workflow raises."""
    forgetful: float
    """Share of replies that get no reward."""
    long_winded: float
    """Share of calls with a long reply."""
    sections: Mapping[str, Any]
    """Sections of the config, by name."""
    plan: FaultPlan

    @property
    def trained(self) -> tuple[str, ...]:
        """Policies that are updated."""
        return tuple(sorted({policy for policy in self.agents.values() if policy != "frozen"}))

    @property
    def initial(self) -> tuple[InstanceId, ...]:
        """The instances with which a life begins."""
        return _instances(self.instances)


def draw(seed: int, *, mode: str | None = None) -> Schedule:
    """Draws the run of a seed. `mode` replaces the mode that would be drawn."""
    if mode in (None, Mode.MICROBATCH) and loses_while_streaming(seed):
        return _losing_while_streaming(seed)
    return _placed(_drawn(seed, mode))


def _placed(run: Schedule) -> Schedule:
    """Gives a share of the runs several nodes, rollout workers and losses of these, and programs to some of the others.

    All else is as it was drawn.
    """
    random = Random(f"places {run.seed}")
    if random.random() >= PLAYED_ELSEWHERE:
        return replace(run, programs=Random(f"programs {run.seed}").random() < PLAYED_BY_PROGRAMS)
    workers = random.randint(1, 3)
    targets = _targets(run.instances, groups=run.groups, steps=run.steps, agents=len(run.agents))
    names = [f"{ResidentKind.ROLLOUT}/{number}" for number in range(workers)]
    lost = draw_placed(random, targets, workers=names, nodes=OTHERS)
    return replace(run, workers=workers, plan=FaultPlan(faults=(*run.plan.faults, *lost)))


def loses_while_streaming(seed: int) -> bool:
    """Returns True if the seed is in the share LOSSES_WHILE_STREAMING. Only for modes None and `microbatch`."""
    return Random(f"losses {seed}").random() < LOSSES_WHILE_STREAMING


def _losing_while_streaming(seed: int) -> Schedule:
    """Draws a run in which credit groups are open while trainers are swapped and lost, and which is then resumed.

    All groups of one step are filtered, so the gradient cache drops rows that were already accumulated.
    """
    random, run = Random(f"losses of {seed}"), _drawn(seed, Mode.MICROBATCH)
    targets = _targets(run.instances, groups=run.groups, steps=run.steps, agents=len(run.agents))
    lost = replace(draw_fault(FaultKind.LOST_TRAINER, random, targets), after=random.randint(1, 3))
    early = replace(targets, steps=run.steps - 1)  # A step that trains must follow.
    filtered = draw_fault(FaultKind.ALL_FILTERED, random, early)
    planned = [lost, draw_fault(FaultKind.STORE_FAILURE, random, targets), filtered]
    kept = [fault for fault in run.plan.faults if fault.kind not in {fault.kind for fault in planned}]
    small = {"micro_batch": random.choice([1, 2])}  # Small, so that rows are trained before their group is complete.
    sections = {
        **run.sections,
        "deterministic": False,
        "process_groups": run.sections["process_groups"] | {"at_once": 1},
        "credit": {"estimator": run.sections["credit"]["estimator"], "streaming": "linear"},
        "policies": {name: policy | {"training": small} for name, policy in run.sections["policies"].items()},
    }
    return replace(run, sections=sections, plan=FaultPlan(faults=(*planned, *kept)))


def _targets(instances: Mapping[str, int], *, groups: int, steps: int, agents: int) -> Targets:
    return Targets(
        instances=_instances(instances),
        trained=tuple(PolicyName(policy) for policy in instances if policy != "frozen"),
        groups=groups,
        steps=steps,
        step_s=1.0 + 0.7 * groups,
        step_calls=12 * groups * agents,
    )


def _instances(numbers: Mapping[str, int]) -> tuple[InstanceId, ...]:
    return tuple(InstanceId(policy, n) for policy, count in numbers.items() for n in range(count))


def _drawn(seed: int, mode: str | None) -> Schedule:
    random = Random(f"run {seed}")
    drawn = random.choice(MODES)
    agents = random.choice(TEAMS)
    instances = {policy: random.randint(1, 3) for policy in dict.fromkeys(agents.values())}
    steps, groups = random.randint(2, 3), random.randint(1, 4)
    targets = _targets(instances, groups=groups, steps=steps, agents=len(agents))
    plan = draw_plan(Random(f"faults {seed}"), targets)
    return Schedule(
        seed=seed,
        mode=mode or drawn,
        agents=agents,
        rounds=random.choice([1, 1, 2]),
        parallel=random.random() < 0.5,
        steps=steps,
        groups=groups,
        instances=instances,
        sample_s=random.choice([0.0, 0.05, 0.4]),
        store_s=random.choice([0.0, 0.0, 0.02, 0.3]),
        raising=random.choice([0.0, 0.0, 0.15]),
        forgetful=random.choice([0.0, 0.0, 0.1]),
        long_winded=random.choice([0.0, 0.05]),
        sections=_published_late(
            Random(f"publications {seed}"),
            mode or drawn,
            _streamed(
                random,
                mode or drawn,
                _sections(random, mode or drawn, steps, groups, instances)
                | {"credit": _credit(random, mode or drawn, filtered=bool(plan.of(FaultKind.ALL_FILTERED)))},
            ),
        ),
        plan=plan,
    )


def _sections(random: Random, mode: str, steps: int, groups: int, instances: Mapping[str, int]) -> dict[str, Any]:
    micro_batch = random.choice([1, 2, 3, 5])
    policies = {
        name: {"instances": count, "trainable": name != "frozen", "training": {"micro_batch": micro_batch}}
        for name, count in instances.items()
    }
    return {
        "steps": steps,
        "mode": "async" if mode == PER_POLICY else mode,
        "pipeline": {
            "ahead": mode in (Mode.SYNC, Mode.MICROBATCH) and random.random() < 0.4,
            "lag": 1 if mode == "one_step_off" else random.choice([1, 1, 2]),
            "window": random.choice([0.3, 0.5, 1.0]),
            "head_deadline_s": random.choice([4.0, 20.0]),
            "late": random.choice(["expire", "requeue"]),
            "updates": "per_policy" if mode == PER_POLICY else "together",
            "policy_timeout_s": random.choice([3.0, 30.0]),
        },
        "cluster": {"backend": "simulated"},
        "deterministic": random.random() < 0.3 and mode in SYNCHRONOUS,
        "batch": {"groups": groups, "episodes": random.randint(2, 3)},
        "rollout": {
            "inter_query": random.randint(1, 5),
            "intra_query": random.randint(1, 3),
            "episode_timeout_s": 12.0,
            "call_timeout_s": 4.0,
            "group_retries": random.randint(0, 1),
        },
        "pool": _pool(random),
        "balance": {
            "rule": random.choice(["none", "queue_gap", "queue_gap_literal", "drain_time"]),
            "poll_s": 0.5,
            "gap": 1,
            "move_s": 0.2,
            "start": random.choice(["as_configured", "by_share"]),
        },
        "process_groups": {
            "at_once": random.choice([None, 1, 2]),
            "suspend": random.choice(["eager", "on_demand"]),
            "prefetch": random.random() < 0.5,
        },
        "evaluate": {"tasks": random.choice([0, 0, 1])},
        "checkpoint": {"every": random.choice([1, 1, 2])},
        "policies": policies,
    }


def _pool(random: Random) -> dict[str, Any]:
    return {
        "routing": random.choice(["least_tokens", "least_requests", "round_robin"]),
        "max_running": random.choice([None, None, 1, 2]),
        "on_move": random.choice(["continue", "drain"]),
        "load_timeout_s": 8.0,
        "start_timeout_s": 30.0,
        "replacements": random.choice([0, 3, 3]),
    }


def _streamed(random: Random, mode: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Turns on streaming credit in half of the runs that can train rows before their group is complete."""
    streams = mode == Mode.MICROBATCH and not sections["deterministic"] and random.random() < 0.5
    return sections | ({"credit": {**sections["credit"], "streaming": "linear"}} if streams else {})


def _published_late(random: Random, mode: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Defers publications in half of the runs that may train on tokens of older versions, one update a step."""
    if mode in SYNCHRONOUS or mode == PER_POLICY or random.random() < 0.5:
        return sections
    publish = {
        "type": random.choice(["lazy", "adaptive"]),
        "every": random.choice([2, 3]),
        "waiting_calls": random.choice([0, 1]),
    }
    rarely = {"every": 2}  # A checkpoint after each step would publish each update.
    return sections | {"pipeline": sections["pipeline"] | {"publish": publish}, "checkpoint": rarely}


def _credit(random: Random, mode: str, *, filtered: bool) -> dict[str, Any]:
    estimator = {"type": random.choice(["default", "drmas"])}
    if not filtered and random.random() >= 0.4:
        return {"estimator": estimator, "filter": None}
    if mode not in SYNCHRONOUS or random.random() < 0.5:
        return {"estimator": estimator}
    on_shortfall = random.choice(["train_short", "train_short", "unfiltered", "error"])
    refill = {"refill": True, "max_gen_batches": random.randint(1, 3), "on_shortfall": on_shortfall}
    return {"estimator": estimator, "filter": refill}
