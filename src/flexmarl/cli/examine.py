"""Examines what a run needs, as far as that is possible without its weights and devices.

code ──► tasks, workflow ──► models, tokenizers ──► a task played, team ──► libraries, devices, memory, ports

Each look yields findings, some with a to-do for this machine, or raises a problem of the config. If a look fails, only
the looks that need its subject are skipped.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from flexmarl.agents import ChatRenderer, Generate, TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.context import Interrupted, forget
from flexmarl.assemble.blueprint import open_tasks, seat_team
from flexmarl.assemble.simulation import check_models
from flexmarl.cli.needs import Finding, examine_machine, examine_models
from flexmarl.config import RunSettings, cautions
from flexmarl.credit import CreditSettings
from flexmarl.credit.interface import CreditRow
from flexmarl.credit.rows import credit_rows, tags_for
from flexmarl.errors import ConfigError, CreditError, EngineError, MissingExtra
from flexmarl.events.machine import this_machine
from flexmarl.orchestrator.evaluation import rewards_of
from flexmarl.records import (
    Episode,
    FinishReason,
    Generation,
    GenerationRequest,
    GroupId,
    GroupRecord,
    PolicyName,
    Version,
    VersionRun,
)
from flexmarl.rollout.player import Player
from flexmarl.tasks.interface import MOST_COMPARED
from flexmarl.tasks.table import TableSource

PLAY_S = 20.0
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
    if all(parts) and not simulated:
        succeeded(lambda: _play(settings, longest, own_tokenizers=readable))
    problems += of_models
    findings += [found.finding for found in models.values()]
    if not problems and readable:
        succeeded(lambda: _team(settings))
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


def _play(settings: RunSettings, longest: dict[str, int], *, own_tokenizers: bool) -> Iterator[Finding]:
    """Plays the first task with scripted replies, which call no tool, and reads what the plays report and carry.

    Notes in `longest` how many tokens each policy's requests may take, prompt and reply.
    With `own_tokenizers`, prompts are as long as they will be, and must fit into `engine.max_len`. Without, a token is
    a character.
    """
    task = settings.tasks.open(seed=settings.seed, base=settings.base).train(0)
    timeout_s = min(settings.rollout.episode_timeout_s, PLAY_S)
    renderers = {PolicyName(name): character_renderer() for name in settings.policies}
    trained = [PolicyName(name) for name in settings.trained]
    team = seat_team(settings) if own_tokenizers else TeamSpec.build(settings.team, renderers, trained)
    renderer_of = {agent.policy: agent.renderer for agent in team.agents.values()}
    max_lens = {
        name: getattr(policy.engine, "max_len", None) if own_tokenizers else None
        for name, policy in settings.policies.items()
    }
    group, episodes = GroupRecord(group=GroupId(0), task=task, step=0), dict[str, Episode]()
    for index, reply in enumerate(reply for reply in (task.reference, "I do not know.") if reply):
        generate = _scripted(renderer_of, max_lens, reply, longest)
        player = Player(team=team, generate=generate, run_seed=settings.seed, timeout_s=timeout_s)
        episodes[reply] = asyncio.run(player.play(group, index))
    failed = {reply: _reason(episode) for reply, episode in episodes.items() if not episode.finished}
    if len(failed) == len(episodes):
        raise ConfigError(
            f"team.workflow: task '{task.input_id}', played with scripted replies ({', '.join(map(repr, episodes))}), "
            f"fails with each of them: {next(iter(failed.values()))}"
        )
    fails = "".join(f"; with the reply {reply!r} it fails: {reason}" for reply, reason in failed.items())
    yield Finding("a task", f"'{task.input_id}' was played with scripted replies{fails}")
    played = replace(group, episodes=tuple(episodes.values()))
    _check_tags(settings, played)
    _check_credit(settings.credit, credit_rows(played, trained))
    yield from _figures(settings, played)
    if settings.credit.filter is not None:
        bottom, top = settings.credit.filter.reward_range
        best = max((reward for of_agent in rewards_of(played.finished).values() for reward in of_agent), default=top)
        if best > top:
            todo = f"a play gave {best:g}: set it to the worst and the best reward of your workflow"
            yield Finding("credit.filter.reward_range", f"[{bottom:g}, {top:g}]", todo)


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


def _check_credit(credit: CreditSettings, rows: Sequence[CreditRow]) -> None:
    """Raises ConfigError if a term or an estimator of the user's own raises an error on these rows.

    What flexmarl itself refuses says nothing here: a run has more episodes, and rows with values or a baseline.
    """
    try:
        shaped = credit.shape(rows)
        if not credit.uses:
            credit.credit(shaped)
    except CreditError as error:
        if error.__cause__ is not None:
            raise ConfigError(str(error)) from error


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
) -> Generate:
    """A model that gives the same reply to every prompt. As an engine, it refuses a prompt that is too long for it."""

    async def generate(request: GenerationRequest, /, *, interrupted: Interrupted = forget) -> Generation:
        renderer, max_len, length = renderers[request.policy], max_lens[request.policy], len(request.prompt_ids)
        if max_len is not None and length > max_len:
            raise EngineError(
                f"the prompt of {request.agent} has {length} tokens, and policies.{request.policy}.engine.max_len is "
                f"{max_len}"
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
                f"{agent.sampling.max_tokens}, but prompt and message must fit into engine.max_len, {max_len}",
                f"lower it, or raise policies.{agent.policy}.engine.max_len",
            )
