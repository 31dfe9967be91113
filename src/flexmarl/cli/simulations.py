"""Simulations on the command line: from a config to a report, and the tables that show it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from flexmarl.analysis.bound import bounds_of, mean_bound
from flexmarl.analysis.costs import costs_of
from flexmarl.analysis.decided_again import DecisionCounts, compare_decisions
from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.analysis.figures import Pools, SimulationReport, report_of
from flexmarl.analysis.fit import Fit, fit_costs, fit_tools
from flexmarl.analysis.plots import draw_run
from flexmarl.analysis.queues import queue_counts_of
from flexmarl.analysis.summary import render_pictures
from flexmarl.analysis.tables import comparison_table, report_table, sweep_table
from flexmarl.analysis.troubles import Troubles
from flexmarl.assemble.simulation import Unmodelled, simulate
from flexmarl.cli.show import open_conversations, reading_of
from flexmarl.config import RunSettings, load_run
from flexmarl.config.load import as_override, parse_override, parse_yaml
from flexmarl.errors import ConfigError, EpisodeError, FlexmarlError
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import json_text, plain
from flexmarl.events.untrained import in_words
from flexmarl.experience.store_file import read_store
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import NO_SPREAD
from flexmarl.testing.faults.fault_plan import FaultPlan, read_plan
from flexmarl.testing.faults.planned import PlannedFaults, check_fits
from flexmarl.testing.faults.witness import seen_in
from flexmarl.tools import is_pure
from flexmarl.tools.interface import each_tool

__all__ = ["SimulationReport", "Unmodelled", "comparison_table", "sweep_table"]

MOST_READ = 1000
"""Most episodes, the newest ones, whose tool calls are fitted: more would take time, and tell little."""
MOST_RUNS = 100
"""Most runs of one sweep: a typing error must not play for a day."""


MOST_FLAT = 0.5
"""Share of groups with equal rewards up to which a simulation's figures are those of training."""
MOST_ERROR = 0.25
"""Largest error of a fit, or of the step simulated with it, that is printed without a caution."""
MEANINGLESS = (
    "Replies without meaning (type lengths or asked) earn equal rewards; use simulation.rewards={success: 0.5}, or "
    "credit.filter=null"
)
"""Why a simulation may train hardly anything, and what to try."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """One simulated run."""

    settings: RunSettings
    folder: RunFolder
    facts: Facts
    report: SimulationReport


def load(config: Path, overrides: Sequence[str]) -> RunSettings:
    """Returns the settings of the simulated run. Raises ConfigError naming the key."""
    for override in overrides:
        if override.startswith("cluster.backend=") and parse_override(override)[1] != "simulated":
            raise ConfigError(f"{override}: `simulate` sets cluster.backend=simulated; use `flexmarl train` for others")
    settings = load_run(config, [*overrides, "cluster.backend=simulated"])
    if not settings.steps:
        raise ConfigError("steps is 0, so there is nothing to simulate; use at least 1")
    return settings


def simulated(
    settings: RunSettings, console: Console, *, label: str = "", plan: FaultPlan | None = None
) -> SimulatedRun:
    """Plays the simulated run, with the faults of a plan, and draws its pictures.

    Raises FlexmarlError if it ended no step.
    """

    def show(text: str) -> None:
        console.print(f"{label}: {text}" if label else text)

    disturbance = None if plan is None else PlannedFaults(plan)
    try:
        folder = RunFolder(simulate(settings, show=show, disturbance=disturbance))
    except EpisodeError as error:
        if settings.simulation.rewards is not None:
            raise
        raise EpisodeError(f"{error}. {MEANINGLESS}") from error
    troubles = Troubles()
    facts = read_facts(troubles.noting(read_run(folder.journal)))
    facts.queue_counts = facts.queue_counts or queue_counts_of(facts.calls, _slots(settings))
    report = _report(settings, facts)
    if report is None:
        raise FlexmarlError(f"{folder.path}: the simulation ended no step; see {folder.journal}")
    if caution := caution_of(troubles, len(facts.step_of)):
        show(f"caution: {caution}")
    if plan is None and (failures := troubles.failures):
        show(f"caution: {sum(failures.values())} episodes failed, which cost less time: {in_words(failures, 5)}")
    render_pictures(folder.path)
    draw_run(facts, picture_of(folder), settings.name)
    return SimulatedRun(settings, folder, facts, report)


def caution_of(troubles: Troubles, groups: int) -> str:
    """Says that hardly anything of a simulation was trained, because rewards did not differ; "" if that is not so."""
    flat = {str(reason): count for reason in NO_SPREAD if (count := troubles.filtered[reason])}
    if sum(flat.values()) <= MOST_FLAT * groups:
        return ""
    return (
        f"{sum(flat.values())} of {groups} groups were dropped, because their rewards did not differ "
        f"({in_words(flat)}): hardly anything was trained, and the figures lack that time. {MEANINGLESS}"
    )


def planned(path: Path, settings: RunSettings) -> FaultPlan:
    """Reads the faults that a file plans for a run. Raises ConfigError naming the file and the field."""
    plan = read_plan(path)
    check_fits(plan, settings, str(path))
    return plan


def witness_table(outcome: SimulatedRun, plan: FaultPlan) -> Table:
    """Returns a table of the faults: how many of each kind were planned, struck, and were noticed by the run."""
    costs = outcome.settings.simulation.costs
    events = list(read_run(outcome.folder.journal))
    struck, noticed = seen_in(events, lambda policy: costs_of(costs, policy).engine)
    table = Table("fault", "planned", "struck", "noticed", box=box.SIMPLE_HEAD)
    for kind, times in Counter(fault.kind for fault in plan.faults).items():
        table.add_row(kind, str(times), str(struck[kind]), str(noticed[kind]))
    return table


def decisions(folder: RunFolder, settings: RunSettings) -> Mapping[str, DecisionCounts]:
    """Decides again what a run's balancer decided. Raises ConfigError if its journal has no decision."""
    found = compare_decisions(read_run(folder.journal), settings.balance)
    if not found:
        raise ConfigError(
            f"--loads: the journal of '{folder.path}' has no `balance_decided`, so there is nothing to decide again; "
            "give a run with balance.rule or balance.grow whose requests had to wait"
        )
    return found


def decisions_table(found: Mapping[str, DecisionCounts]) -> Table:
    """Returns a table of a run's decisions, by its rule, and of those that come out the same."""
    table = Table("rule of the run", "decisions", "the same", "moves", "moves again", box=box.SIMPLE_HEAD)
    for rule, one in found.items():
        table.add_row(rule, *map(str, (one.decisions, one.same, one.moves["run"], one.moves["again"])))
    return table


def measured(settings: RunSettings, folder: RunFolder) -> SimulationReport:
    """Returns the report of a real run. Raises ConfigError if it ended no step."""
    report = _report(settings, read_facts(read_run(folder.journal)))
    if report is None:
        raise ConfigError(f"'{folder.path}' ended no step, so there is nothing to compare with; give a longer run")
    return report


def show(outcome: SimulatedRun, console: Console) -> None:
    """Prints the report's table, the origin of the costs, and where the files are."""
    folder = outcome.folder
    console.print(report_table(outcome.settings.name, outcome.report))
    places = {
        "costs": origins(outcome.settings),
        "picture": picture_of(folder),
        "timeline": f"open in ui.perfetto.dev: {folder.timeline}",
        "journal": folder.journal,
    }
    for name, place in places.items():
        console.print(f"  {name:10} {place}", soft_wrap=True)
    console.print(str(folder.path), soft_wrap=True)


def picture_of(folder: RunFolder) -> Path:
    """Returns the path of a simulation's picture."""
    return folder.path / "simulation.png"


def origins(settings: RunSettings) -> str:
    """Returns where the costs are from, a clause for each origin.

    `planner, writer: fitted from runs/a; judge: defaults, not measured`
    """
    policies: dict[str, list[str]] = {}
    for policy in settings.policies:
        policies.setdefault(costs_of(settings.simulation.costs, policy).origin, []).append(policy)
    if len(policies) == 1:
        return next(iter(policies))
    return "; ".join(f"{', '.join(names)}: {origin}" for origin, names in policies.items())


def combinations(sweeps: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Returns the keys of `key=v1,v2,...` texts, and every combination of their values. Raises ConfigError.

    >>> combinations(["steps=1,2", "mode=sync,async"])
    (['steps', 'mode'], [('1', 'sync'), ('1', 'async'), ('2', 'sync'), ('2', 'async')])
    """
    keys: list[str] = []
    values: list[list[str]] = []
    for sweep in sweeps:
        key, _, listed = sweep.partition("=")
        try:
            found = parse_yaml(f"[{listed}]")
        except yaml.YAMLError:
            found = []
        if not key.strip() or not found:
            raise ConfigError(f"--sweep takes KEY=V1,V2,..., got {sweep!r}; use for example batch.groups=4,8")
        keys.append(key.strip())
        values.append([value if isinstance(value, str) else json_text(plain(value)) for value in found])
    if (many := prod(map(len, values))) > MOST_RUNS:
        raise ConfigError(f"--sweep: {many} combinations, and at most {MOST_RUNS} are played; give fewer values")
    return keys, list(product(*values))


def fitted(settings: RunSettings, folder: RunFolder, *, given: RunSettings) -> Fit:
    """Fits costs to the run's journal, and tools to its store. Raises ConfigError if the journal has too little.

    `given`: the config with overrides. Its twins' results go before recorded ones, and so do overridden latencies.
    """
    facts = read_facts(read_run(folder.journal))
    origin = f"fitted to the journal of {folder.path}"
    own, tools = settings.simulation.tools, _recorded_tools(settings, folder)
    for name, twin in given.simulation.tools.items():
        as_before = name in tools and name in own and twin.latency_s == own[name].latency_s
        kept = twin.model_dump(mode="json", exclude_unset=True, exclude={"latency_s"} if as_before else None)
        tools[name] = tools.get(name, {}) | kept
    tool_s = _tool_seconds(folder) if tools else {}
    return replace(fit_costs(facts, _slots(settings), origin=origin, tool_s=tool_s), tools=tools)


def _tool_seconds(folder: RunFolder) -> dict[str, float] | None:
    """Reads the seconds of tools before a call, by sample, from the run's store; None if that is no file."""
    if not folder.store.is_file():
        return None
    with read_store(folder.store) as reader:
        return {row.sample_id: row.values.get("tool_s", 0.0) for name in reader.agents for row in reader.rows(name)}


def _recorded_tools(settings: RunSettings, folder: RunFolder) -> dict[str, dict[str, Any]]:
    """Fits twins to the tool calls in the run's store, if it is a file. Tools that only compute need none."""
    tools = (tool for agent in settings.team.agents.values() for tool in each_tool(agent.tools))
    timed = {tool.name for tool in tools if not is_pure(tool)}
    if not timed or not folder.store.is_file():
        return {}
    reading = reading_of(settings, full=False)
    with open_conversations(folder) as conversations:
        episodes = (conversations.read(line, reading) for line in conversations.lines()[-MOST_READ:])
        fits = fit_tools(turn.tools for episode in episodes for turn in episode.turns)
    return {name: twin for name, twin in fits.items() if name in timed}


def as_settings(fit: Fit, folder: RunFolder) -> dict[str, Any]:
    """Returns the keys under `simulation:`, including the run's recorded replies if its store is a file."""
    recorded = {"recorded": str(folder.path.absolute())} if folder.store.is_file() else {}
    return {
        "costs": {policy: costs.model_dump(mode="json", exclude_unset=True) for policy, costs in fit.costs.items()},
        "shared_host": fit.shared_host.model_dump(mode="json"),
        "tools": fit.tools,
        **({"score_s": 0.0} if recorded or not fit.tools else {}),  # Pauses, and so scores, are in `call_s`.
    } | recorded


def as_overrides(fit: Fit, folder: RunFolder) -> list[str]:
    """Returns the same keys as dotted settings. Recorded replies, and what they earn, replace those of the config."""
    values = as_settings(fit, folder)
    replaced = {"replies": {}, "rewards": None} if "recorded" in values else {}
    return [as_override(f"simulation.{key}", value) for key, value in (values | replaced).items()]


def write_fit(fit: Fit, folder: RunFolder) -> Path:
    """Writes fitted.yaml into the run folder; a config may extend it."""
    path = folder.path / "fitted.yaml"
    path.write_text(yaml.safe_dump({"simulation": as_settings(fit, folder)}, sort_keys=False), encoding="utf-8")
    return path


def fit_table(fit: Fit) -> Table:
    """Returns a table of the fitted costs by policy, and of their errors on the run."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("fitted")
    for policy in fit.costs:
        table.add_column(policy, justify="right")
    dumped = {policy: costs.model_dump(exclude_unset=True) for policy, costs in fit.costs.items()}
    for part in ("engine", "trainer"):
        for key in dict.fromkeys(key for costs in dumped.values() for key in costs[part]):
            table.add_row(f"{part}.{key}", *(_number(costs[part].get(key)) for costs in dumped.values()))
    table.add_section()
    quality = fit.quality.values()
    table.add_row("error of a call", *(f"{one.call_error:.0%} of {one.calls}" for one in quality))
    table.add_row("error of a micro-batch", *(f"{one.micro_batch_error:.0%} of {one.micro_batches}" for one in quality))
    table.add_section()
    for name, twin in fit.tools.items():
        table.add_row(f"tools.{name}.latency_s.mean", _number(twin.get("latency_s", {"mean": 0.0})["mean"]))
    for key, value in fit.shared_host.model_dump().items():
        table.add_row(f"shared_host.{key}", _number(value))
    return table


def poor_fit(errors: Mapping[str, float], settings: RunSettings) -> str:
    """Says which errors of a fit to a run with these settings are large, and what to do; "" if none is."""
    large = [f"{error:.0%} in {name}" for name, error in errors.items() if error > MOST_ERROR]
    if not large:
        return ""
    inline = " with cluster.backend=ray, since inline engines and trainers take turns on one thread"
    return (
        f"the fit is poor (off by {', '.join(large)}): do not trust simulated times; fit a longer run on a machine "
        f"with no other work{inline if settings.cluster.backend == 'inline' else ''}"
    )


def _slots(settings: RunSettings) -> dict[str, int]:
    """Returns how many requests an instance decodes at a time, by policy, in the world of this run."""
    costs, policies = settings.simulation.costs, settings.policies
    return {
        name: costs_of(costs, name).engine.slots
        if settings.is_modelled(name)
        else getattr(policies[name].engine, "slots", 64)
        for name in policies
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _report(settings: RunSettings, facts: Facts) -> SimulationReport | None:
    costs, at_once = settings.simulation.costs, settings.process_groups.at_once
    pools = Pools(costs=costs, trainers_at_once=at_once, shared=settings.mode is Mode.COLOCATED)
    bound = None
    if settings.mode.synchronous and settings.cluster.backend == "simulated":
        bounds = bounds_of(
            facts,
            costs,
            instances=len(facts.instances) + len(facts.grown),
            trainers_at_once=at_once,
            trained=settings.trained,
            ahead=settings.pipeline.ahead,
        )
        bound = mean_bound(bounds)
    return report_of(facts, pools, bound=bound)
