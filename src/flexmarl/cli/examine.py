"""Examines what a run needs, as far as that is possible without its weights and devices.

code ──► tasks, workflow ──► models, tokenizers ──► a task played, team ──► libraries, devices, memory, ports

Each look yields findings, some with a to-do for this machine, or raises a problem of the config. If a look fails, only
the looks that need its subject are skipped.
"""

import asyncio
import gc
import re
import signal
import sys
import warnings
from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from flexmarl.agents import ChatRenderer, Generate, TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.context import Interrupted, OnTokens, forget
from flexmarl.assemble.blueprint import open_tasks, seat_team
from flexmarl.assemble.boxes import check_sandbox_of, sandbox_of
from flexmarl.assemble.opened_gateway import server_or_refuse
from flexmarl.assemble.simulation import check_models
from flexmarl.cli.needs import Finding, examine_machine, examine_models, examine_servers
from flexmarl.config import RunSettings, cautions
from flexmarl.credit import CreditSettings
from flexmarl.credit.interface import CreditRow
from flexmarl.credit.rows import credit_rows, tags_for
from flexmarl.errors import ConfigError, CreditError, EngineError, MissingExtra, users_line
from flexmarl.events.event import Events
from flexmarl.events.machine import this_machine
from flexmarl.orchestrator.evaluation import rewards_of
from flexmarl.records import (
    AgentName,
    Episode,
    EpisodeStatus,
    FinishReason,
    Generation,
    GenerationRequest,
    GroupId,
    GroupRecord,
    PolicyName,
    Version,
    VersionRun,
)
from flexmarl.rollout.blocking_watch import REMEDY, STUCK_S, BlockingWatch
from flexmarl.rollout.player import Player
from flexmarl.tasks.interface import MOST_COMPARED
from flexmarl.tasks.table import TableSource

PLAY_S = 12.0
"""Most seconds of one play with scripted replies. A tool or environment of the user's may wait for something."""

Examination = Callable[[], Iterable[Finding]]


def examine(settings: RunSettings) -> tuple[list[Finding], list[str]]:
    """Returns the findings, and the problems of the config, a line each."""
    findings: list[Finding] = []
    problems: list[str] = []

    def succeeded(examination: Examination) -> bool:
        try:
            findings.extend(examination())
        except MissingExtra as lacking:
            findings.append(Finding("libraries", "something is not installed", str(lacking)))
        except ConfigError as problem:
            problems.append(str(problem))
            return False
        return True

    simulated = settings.cluster.backend == "simulated"
    if settings.code:
        findings.append(Finding("code", f"{', '.join(map(str, settings.code))} can be imported"))
    parts = [succeeded(lambda: _tasks(settings)), succeeded(lambda: _workflow(settings))]
    of_models: list[str] = []
    longest: dict[str, int] = {}
    models = {} if simulated else examine_models(settings, of_models)
    readable = not of_models and all(found.readable for found in models.values())
    if settings.wanted_gateway is not None:
        succeeded(_gateway)
    elif all(parts) and not simulated:
        succeeded(lambda: _awaited(_play(settings, longest, own_tokenizers=readable)))
    problems += of_models
    findings += [found.finding for found in models.values()]
    if not problems and readable:
        succeeded(lambda: _team(settings))
    if not simulated:
        succeeded(lambda: examine_servers(settings))
    succeeded(lambda: _sandbox(settings))
    succeeded(lambda: _run(settings))
    succeeded(lambda: examine_machine(settings, models, this_machine(), longest if readable else {}))
    return findings, problems


def _tasks(settings: RunSettings) -> Iterator[Finding]:
    source = open_tasks(settings)
    wanted = settings.evaluate.tasks
    held_out = len(source.held_out(wanted))
    length = "endless" if source.num_train is None else str(source.num_train)
    if isinstance(source, TableSource):
        length = (
            f"{source.num_rows}, {'repeated without end' if source.num_train is None else f'{length} with repeats'}"
        )
    num_train = min(settings.batch.groups * settings.steps, source.num_train or settings.batch.groups * settings.steps)
    among = "disjoint" if num_train <= MOST_COMPARED else f"disjoint among the first {MOST_COMPARED} to train on"
    todo = f"evaluate.tasks is {wanted}, and only {held_out} are held out: all of them are played"
    yield Finding("tasks", f"to train on: {length}; held out: {held_out}; {among}", todo if held_out < wanted else "")


def _workflow(settings: RunSettings) -> Iterator[Finding]:
    settings.team.workflow.resolve()
    yield Finding("team.workflow", f"{settings.team.workflow.type}: can be resolved")


def _gateway() -> Iterator[Finding]:
    server_or_refuse()
    yield Finding("gateway", "can be opened; no task is played here, because programs play the seats")


def _play(settings: RunSettings, longest: dict[str, int], *, own_tokenizers: bool) -> Iterator[Finding]:
    """Plays the first task with scripted replies, which call no tool, and reads what the plays report and carry.

    Notes in `longest` how many tokens each policy's requests may take, prompt and reply.
    With `own_tokenizers`, prompts are as long as they will be, and must fit into `engine.max_len`. Without, a token is
    a character.
    """
    task = settings.tasks.open(seed=settings.seed, base=settings.base).train(0)
    timeout_s = min(settings.rollout.episode_timeout_s, PLAY_S)
    trained = [PolicyName(name) for name in settings.trained]
    team = seat_team(settings) if own_tokenizers else _team_on_characters(settings, trained)
    renderer_of = {agent.policy: agent.renderer for agent in team.agents.values()}
    max_lens = {
        name: getattr(policy.engine, "max_len", None) if own_tokenizers else None
        for name, policy in settings.policies.items()
    }
    told = {name: agent.system.removeprefix(settings.team.agents[name].system) for name, agent in team.agents.items()}
    group, episodes = GroupRecord(group=GroupId(0), task=task, step=0), dict[str, Episode]()
    for index, reply in enumerate(reply for reply in (task.reference, "I do not know.") if reply):
        generate = _scripted(renderer_of, max_lens, reply, longest, told)
        player = Player(team=team, generate=generate, run_seed=settings.seed, timeout_s=timeout_s)
        episodes[reply] = _played(player, group, index)
        if episodes[reply].status is EpisodeStatus.TIMED_OUT:
            break  # The other reply would most likely take as long.
    failed = {reply: _reason(episode) for reply, episode in episodes.items() if not episode.finished}
    if len(failed) == len(episodes):
        raise ConfigError(
            f"team.workflow: task '{task.input_id}', played with scripted replies ({', '.join(map(repr, episodes))}), "
            f"fails with each of them: {next(iter(failed.values()))}"
        )
    fails = "".join(f"; with the reply {reply!r} it fails: {reason}" for reply, reason in failed.items())
    todo = "mend it, unless no model gives this reply: an episode that fails trains nothing" if fails else ""
    yield Finding("a task", f"'{task.input_id}' was played with scripted replies{fails}", todo)
    for name, max_len in max_lens.items():
        if max_len is not None and longest.get(PolicyName(name), 0) > max_len:
            found = (
                f"{max_len}, but a prompt of the trial play and sampling.max_tokens take {longest[PolicyName(name)]}"
            )
            yield Finding(f"policies.{name}.engine.max_len", found, "raise it, or replies are cut to what is left")
    asked = {turn.agent for episode in episodes.values() for turn in episode.turns}
    for name in settings.team.agents:
        if name not in asked:
            todo = "if the workflow asks it for no other task either, remove it or mend the workflow"
            yield Finding(f"team.agents.{name}", f"the workflow never asked agent '{name}' in the trial play", todo)
    played = replace(group, episodes=tuple(episodes.values()))
    _check_tags(settings, played)
    shaped = _shaped(settings.credit, credit_rows(played, trained))
    yield from _figures(settings, played)
    if settings.credit.filter is not None:
        bottom, top = settings.credit.filter.reward_range
        best = max((settings.credit.filter.compared(row) for row in shaped if row.reward is not None), default=top)
        if best > top:
            todo = (
                f"a play gave {best:g}: set it to the worst and the best reward that credit.filter.filter_on compares"
            )
            yield Finding("credit.filter.reward_range", f"[{bottom:g}, {top:g}]", todo)


def _team_on_characters(settings: RunSettings, trained: Sequence[PolicyName]) -> TeamSpec:
    """The team without its models' tokenizers."""
    renderers = {PolicyName(name): character_renderer() for name in settings.policies}
    return TeamSpec.build(settings.team, renderers, trained, sandbox=sandbox_of(settings))


def _played(player: Player, group: GroupRecord, index: int) -> Episode:
    """Plays one episode. Raises ConfigError if user code keeps the event loop: no time limit can end that."""
    stuck: list[str] = []

    def end(place: str) -> None:
        stuck.append(place)
        interrupt_main()

    async def play() -> Episode:
        with BlockingWatch(Events(), end):
            return await player.play(group, index)

    # The handler of `asyncio.run` only cancels a task at the first Ctrl-C, which the task would never notice.
    handler = signal.signal(signal.SIGINT, lambda *_: signal.default_int_handler(*_))
    try:
        return asyncio.run(play())
    except KeyboardInterrupt:
        if not stuck:
            raise
        raise ConfigError(
            f"team.workflow: task '{group.task.input_id}', played with scripted replies: {stuck[0]} has kept the event "
            f"loop for {STUCK_S:g} s, so that no time limit could end it; {REMEDY}"
        ) from None
    finally:
        signal.signal(signal.SIGINT, handler)


def _awaited(looks: Iterable[Finding]) -> list[Finding]:
    """The findings of the play, and one for each line whose call was made in it and never awaited."""
    depth, caught = sys.get_coroutine_origin_tracking_depth(), list[warnings.WarningMessage]()
    sys.set_coroutine_origin_tracking_depth(1)  # So that Python's warning says where a call was made.
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", "coroutine .* was never awaited", RuntimeWarning)
            try:
                findings = [*looks]
            finally:
                gc.collect(1)  # Python warns when it frees the call, which is young.
    finally:
        sys.set_coroutine_origin_tracking_depth(depth)
        forgotten = dict[str, None]()
        for one in caught:
            if not (made := _MADE.search(str(one.message))):
                warnings.showwarning(one.message, one.category, one.filename, one.lineno)
            elif place := users_line([(made["file"], int(made["line"]))]):
                forgotten[f"{place}: the call `{made['text']}` was made and never awaited, so it did not run"] = None
    return findings + [Finding("team.workflow", found, "write `await` before it") for found in forgotten]


_MADE = re.compile(r'was never awaited\n.*\n  File "(?P<file>.+)", line (?P<line>\d+), in .*\n *(?P<text>.+)')
"""Python's warning of a call that was never awaited, with the line that made it."""


def _reason(episode: Episode) -> str:
    """Why an episode failed, with the file and line of the user's code that raised it."""
    place = episode.failure.place if episode.failure else ""
    return episode.reason if not place or place in episode.reason else f"{episode.reason} ({place})"


def _check_tags(settings: RunSettings, played: GroupRecord) -> None:
    """Raises ConfigError if a call of a finished episode lacks a tag by which its rows are to be grouped."""
    for row in credit_rows(played, [PolicyName(name) for name in settings.trained]):
        where = f"per_agent.{row.agent}" if row.agent in settings.credit.per_agent else "estimator"
        for tag in tags_for(row.agent, settings.credit.estimator_of(row.agent).key):
            try:
                row.tag(tag)
            except CreditError as error:
                raise ConfigError(f"credit.{where}.key: {error}") from None


def _shaped(credit: CreditSettings, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
    """The rows with their final rewards. Raises ConfigError if a term or an estimator of the user's own fails on them.

    What flexmarl itself refuses says nothing here, since a run has more episodes, and rows with values or a baseline:
    then there are none.
    """
    try:
        shaped = credit.shape(rows)
        if not credit.uses:
            credit.credit(shaped)
        return shaped
    except CreditError as error:
        if error.__cause__ is not None:
            raise ConfigError(str(error)) from error
        return ()


def _figures(settings: RunSettings, played: GroupRecord) -> Iterator[Finding]:
    """Finds figures that are to be compared, and that no play has. Other plays may: a workflow may report any time."""
    figures = {name for episode in played.finished for name in episode.metrics}
    figures |= {f"reward/{agent}" for agent in rewards_of(played.finished)}
    for key, chosen in (("checkpoint.best", settings.checkpoint.best), ("stop", settings.stop)):
        if chosen is not None and chosen.metric not in figures:
            yield Finding(
                f"{key}.metric",
                f"'{chosen.metric}' is no figure of the task that was played; it has: {', '.join(sorted(figures))}",
                "use one of these, or report it in every episode: team.report(...)",
            )


def _scripted(
    renderers: Mapping[PolicyName, ChatRenderer],
    max_lens: Mapping[str, int | None],
    reply: str,
    longest: dict[str, int],
    told: Mapping[AgentName, str],
) -> Generate:
    """A model that gives the same reply to every prompt. As an engine, it refuses a prompt that is too long for it.

    `told`: what the role prompt of each agent says of its tools.
    """

    async def generate(
        request: GenerationRequest, /, *, interrupted: Interrupted = forget, on_tokens: OnTokens | None = None
    ) -> Generation:
        renderer, max_len, length = renderers[request.policy], max_lens[request.policy], len(request.prompt_ids)
        if max_len is not None and length > max_len:
            of_tools = len(renderer.encode(told.get(request.agent, ""))) if request.agent else 0
            raise EngineError(
                f"the prompt of {request.agent} has {length} tokens, and policies.{request.policy}.engine.max_len is "
                f"{max_len}{f'; {of_tools} of them tell it of its tools' if of_tools else ''}"
            )
        longest[request.policy] = max(longest.get(request.policy, 0), length + request.sampling.max_tokens)
        whole = [*renderer.encode(reply), renderer.stop_ids[0]]
        ids = np.asarray(whole[: request.sampling.max_tokens], np.int32)
        return Generation(
            request_id=request.request_id,
            response_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            raw_logprobs=np.zeros(len(ids), np.float32),
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.STOP if len(ids) == len(whole) else FinishReason.LENGTH,
        )

    return generate


def _team(settings: RunSettings) -> Iterator[Finding]:
    team = seat_team(settings)
    if settings.cluster.backend == "simulated":
        check_models(settings, team)
    level = team.level
    todo = "there is nothing to train: use `flexmarl eval`, or set trainable: true on a policy"
    yield Finding("team", f"level {level.name}: {level.because}", "" if settings.trained else todo)
    for name, agent in team.agents.items():
        if agent.tools:
            yield Finding(f"team.agents.{name}.tools", f"{', '.join(agent.tools)}; {agent.tools_note}")


def _sandbox(settings: RunSettings) -> Iterator[Finding]:
    """Tries what the boxes of the run's tools guarantee. Raises ConfigError that names what is missing."""
    for guarantee in check_sandbox_of(settings):
        yield Finding(f"sandbox, {guarantee.name}", guarantee.found)


def _run(settings: RunSettings) -> Iterator[Finding]:
    simulated = settings.cluster.backend == "simulated"  # It saves nothing, and its engines are `simulation.costs`.
    for key, price, instead in cautions(settings):
        yield Finding(key, price, instead)
    for package in ("wandb", "mlflow"):
        if getattr(settings.metrics, package) is not None and find_spec(package) is None and not simulated:
            raise MissingExtra(package, f"metrics.{package}")
    if not settings.checkpoint.every and not simulated:
        yield Finding("checkpoint.every", "0: nothing is saved", "--resume and export will have nothing to start from")
    for name, agent in settings.team.agents.items() if not simulated else ():
        max_len = getattr(settings.policies[agent.policy].engine, "max_len", None)
        if max_len is not None and agent.sampling.max_tokens >= max_len:
            yield Finding(
                f"team.agents.{name}.sampling.max_tokens",
                f"{agent.sampling.max_tokens}, but prompt and message must fit into "
                f"policies.{agent.policy}.engine.max_len, {max_len}",
                "lower it, or raise that",
            )
