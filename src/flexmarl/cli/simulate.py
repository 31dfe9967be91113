"""`flexmarl simulate`: plays a run on modelled devices, in virtual time, and says how long it would take."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flexmarl.api.handle import load_run_folder
from flexmarl.cli.options import plots, simulations
from flexmarl.cli.terminal import ignoring_hangup, working
from flexmarl.errors import ConfigError, FlexmarlError
from flexmarl.events.progress import SafeConsole

YAML = (".yaml", ".yml")
LOADING = "loading PyTorch"


def simulate(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="The run's YAML file, several with --compare, none with --fit; then dotted settings, e.g. steps=4.",
            show_default=False,
            metavar="[CONFIG]... [KEY=VALUE]...",
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Simulate each CONFIG; show them side by side.")] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Simulate CONFIG with each of the values; given several times: with each combination.",
            show_default=False,
        ),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Fit the costs to this real run, write them to its fitted.yaml, and simulate the run with them.",
            show_default=False,
        ),
    ] = None,
    faults: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN",
            help="A YAML or JSON file of faults to inject; a table shows how many of them the run noticed.",
            show_default=False,
        ),
    ] = None,
    loads: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Play nothing: from the loads that this run recorded, decide again which instances move. Its own "
            "config decides, with the settings given, e.g. balance.rule=queue_gap.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The same as steps=N.", show_default=False)] = None,
) -> None:
    """Simulate the run that CONFIG describes: no model is loaded, no device is used, and no cluster is asked.

    Only the time of engines, trainers and transfers is modelled (`simulation.costs`); the loops and rules are those of
    `flexmarl train`. `cluster.backend=simulated` is set for you.
    """
    configs = [Path(argument) for argument in arguments or () if "=" not in argument and argument.endswith(YAML)]
    overrides = [argument for argument in arguments or () if Path(argument) not in configs]
    if steps is not None:
        overrides.append(f"steps={steps}")
    if (compare, bool(sweep), fit is not None, loads is not None).count(True) > 1:
        raise ConfigError("--compare, --sweep, --fit and --loads exclude each other; give one of them")
    if faults is not None and (compare or sweep or fit is not None or loads is not None):
        raise ConfigError("--faults is for one CONFIG; leave out --compare, --sweep, --fit and --loads")
    console = SafeConsole()
    with ignoring_hangup():
        if fit is not None:
            _fit(console, fit, configs, overrides)
        elif loads is not None:
            _loads(console, loads, configs, overrides)
        elif compare:
            _compare(console, configs, overrides)
        elif len(configs) != 1:
            raise ConfigError(f"simulate takes one CONFIG, a YAML file, got {len(configs)}; for several add --compare")
        elif sweep:
            _sweep(console, configs[0], overrides, sweep)
        else:
            _one(console, configs[0], overrides, faults)


def _one(console: Console, config: Path, overrides: list[str], faults: Path | None) -> None:
    with working(LOADING):
        settings = simulations.load(config, overrides)
    plan = simulations.planned(faults, settings) if faults is not None else None
    outcome = simulations.simulated(settings, console, plan=plan)
    simulations.show(outcome, console)
    if plan is not None:
        console.print(simulations.witness_table(outcome, plan))


def _loads(console: Console, recorded: Path, configs: list[Path], overrides: list[str]) -> None:
    if configs:
        raise ConfigError(f"--loads takes the config of {recorded} itself, got {configs[0]} with it; leave it out")
    _, folder = load_run_folder(recorded)
    with working(LOADING):
        settings = simulations.load(folder.config, overrides)
    found = simulations.decisions(folder, settings)
    console.print(simulations.decisions_table(found))
    for rule, one in found.items():
        if one.first:
            console.print(f"{rule}, the first that differs, {one.first}", soft_wrap=True)


def _compare(console: Console, configs: list[Path], overrides: list[str]) -> None:
    if len(configs) < 2:
        raise ConfigError(f"--compare needs two YAML files or more, got {len(configs)}")
    names = [config.stem for config in configs]
    if len(set(names)) < len(names):
        names = [str(config) for config in configs]
    # All configs are read before the first is played, so that an error in one is reported at once.
    with working(LOADING):
        runs = [simulations.load(config, overrides) for config in configs]
    outcomes = {name: simulations.simulated(run, console, label=name) for name, run in zip(names, runs, strict=True)}
    console.print(simulations.comparison_table({name: outcome.report for name, outcome in outcomes.items()}))
    for name, outcome in outcomes.items():
        console.print(f"{name}: {simulations.origins(outcome.settings)}\n  {outcome.folder.path}", soft_wrap=True)


def _sweep(console: Console, config: Path, overrides: list[str], sweeps: list[str]) -> None:
    keys, combinations = simulations.combinations(sweeps)
    runs = {
        values: simulations.load(config, [*overrides, *map("=".join, zip(keys, values, strict=True))])
        for values in combinations
    }
    outcomes = {values: simulations.simulated(run, console, label=" ".join(values)) for values, run in runs.items()}
    console.print(simulations.sweep_table(keys, {values: outcome.report for values, outcome in outcomes.items()}))
    lines: dict[str, dict[str, simulations.SimulationReport]] = {}
    for (value, *others), outcome in outcomes.items():
        name = ", ".join(map("=".join, zip(keys[1:], others, strict=True)))
        lines.setdefault(name, {})[value] = outcome.report
    last = next(reversed(outcomes.values()))
    picture = last.folder.path / "sweep.png"
    plots.draw_sweep(keys[0], lines, picture)
    console.print(f"costs: {simulations.origins(last.settings)}\npicture: {picture}", soft_wrap=True)


def _fit(console: Console, recorded: Path, configs: list[Path], overrides: list[str]) -> None:
    if configs:
        raise ConfigError(f"--fit simulates {recorded} itself, got {configs[0]} with it; let that extend fitted.yaml")
    settings, folder = load_run_folder(recorded)
    fitted = simulations.fitted(settings, folder, given=simulations.load(folder.config, overrides))
    console.print(simulations.fit_table(fitted))
    written = simulations.write_fit(fitted, folder)
    console.print(
        f"written to {written}; use it in a config: `extends: [run.yaml, {written.absolute()}]`", soft_wrap=True
    )
    measured = simulations.measured(settings, folder)
    as_recorded = [*simulations.as_overrides(fitted, folder), f"steps={measured.steps}"]
    replay = simulations.load(folder.config, [*as_recorded, *overrides])
    try:
        outcome = simulations.simulated(replay, console)
    except simulations.Unmodelled as lacking:
        console.print(f"the run cannot be replayed to compare: {'; '.join(lacking.lines)}", soft_wrap=True)
        _caution(console, simulations.poor_fit(fitted.errors, settings))
        return
    except ConfigError:
        raise
    except FlexmarlError as error:
        raise FlexmarlError(
            f"the simulation with the costs fitted to {recorded} failed: {error}; do not extend {written}; "
            f"{simulations.poor_fit(fitted.errors, settings) or 'fit a longer run'}"
        ) from error
    console.print(simulations.comparison_table({"recorded": measured, "simulated": outcome.report}))
    errors, recorded_s = fitted.errors, measured.step_s.mean
    if recorded_s and not overrides:  # With overrides another run is simulated.
        errors["the mean step"] = abs(outcome.report.step_s.mean / recorded_s - 1.0)
    _caution(console, simulations.poor_fit(errors, settings))
    console.print(f"simulation: {outcome.folder.path}", soft_wrap=True)


def _caution(console: Console, text: str) -> None:
    if text:
        console.print(f"caution: {text}", soft_wrap=True)
