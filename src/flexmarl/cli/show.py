"""`flexmarl show`: the conversations of a run, during the run or later, on the screen or as JSON."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from flexmarl.analysis.conversations import (
    NOT_ENDED,
    STOPPED,
    CalledTool,
    Conversations,
    EpisodeLine,
    Piece,
    Reading,
    ShownEpisode,
    ShownTurn,
    open_conversations,
)
from flexmarl.analysis.selection import EpisodeChoice
from flexmarl.api.handle import load_run_folder
from flexmarl.cli.options import blueprint
from flexmarl.cli.terminal import print_text
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError
from flexmarl.events.group_events import EpisodeAccount
from flexmarl.events.progress import SafeConsole
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import json_text

CONSOLE = SafeConsole()
LISTED, READ = 20, 3
"""Episodes of a list, and conversations, that are shown without --limit."""
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
"""Colours of the agents, in the team's order."""
SHORT = 60
"""Most characters of a reason in a list."""
SHOWN = 200
"""Most characters of a tool's result in its line."""


def show(
    run: Annotated[Path, typer.Argument(help="A run folder, or the folder of an evaluation.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Episodes of this step, from 1.", show_default=False)] = None,
    agent: Annotated[str | None, typer.Option(help="Turns of this agent only.", show_default=False)] = None,
    task: Annotated[str | None, typer.Option(help="Episodes of the task with this id.", show_default=False)] = None,
    episode: Annotated[str | None, typer.Option(help="One episode, e.g. g12e3a0.", show_default=False)] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Failed episodes only.")] = False,
    best: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="So many episodes of highest success, or else reward; of equal ones the newest step first.",
            show_default=False,
        ),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="So many finished episodes of lowest success; of equal ones the newest step first.",
            show_default=False,
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(
            metavar="before|after|N|NAME",
            help="Episodes of an evaluation: before training, the newest, the one after N steps, or by name.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most episodes that are shown.", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every prompt whole.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per episode.")] = False,
) -> None:
    """Show what the agents of RUN wrote, also while it runs. Without a filter: a list of episodes."""
    settings, folder = load_run_folder(run)
    if evaluation is not None:
        settings, folder = load_run_folder(evaluation_folder(folder, evaluation))
    choice = EpisodeChoice(step=step, agent=agent, task=task, episode=episode, failed=failed, best=best, worst=worst)
    with open_conversations(folder) as conversations:
        lines = conversations.lines()
        if not lines:
            raise ConfigError(f"'{folder.path}' has no episode yet; its run has played none, or none is stored")
        chosen = choice.of(lines, conversations.agents)
        if as_json:
            reading = reading_of(settings, full=full)
            for line in chosen[:limit]:
                print_text(json_text(episode_json(_read(conversations, line, reading, agent)), figures=True))
        elif choice.all:
            show_list(folder, chosen, limit or LISTED)
        else:
            reading, colours = reading_of(settings, full=full), colours_of(conversations.agents)
            for line in chosen[: limit or READ]:
                for text in shown(_read(conversations, line, reading, agent), folder, colours):
                    CONSOLE.print(text, soft_wrap=True)
            if (hidden := len(chosen) - (limit or READ)) > 0:
                CONSOLE.print(f"{hidden} more episodes: use --limit {len(chosen)}, or another filter")


def evaluation_folder(folder: RunFolder, which: str) -> Path:
    """Returns the folder of an evaluation of the run. Raises ConfigError with those that are kept."""
    steps = folder.evaluations_of_steps()
    named = {path.name: path for path in sorted(folder.evaluations.glob("*")) if path.is_dir()}
    newest = {path.name.split("-")[1]: path for path in steps}  # One that was played again comes later.
    found = named.get(which) or newest.get({"before": "0"}.get(which, which))
    if which == "after" and steps and steps[-1] != newest.get("0"):
        found = steps[-1]
    if found is None:
        raise ConfigError(
            f"--evaluation: '{folder.path}' keeps no evaluation '{which}'; it keeps: {', '.join(named) or 'none'} "
            f"(evaluate.keep)"
        )
    return found


def reading_of(settings: RunSettings, *, full: bool) -> Reading:
    """Reads texts with the tokenizers of the run, which are loaded when they are first needed."""
    told = {name: blueprint.told_of(settings, name) for name, one in settings.team.agents.items() if one.offered()}
    syntaxes = {name: one.syntax for name, one in told.items() if one.syntax}
    renderers = {name: one.renderer for name, one in told.items()}
    return Reading(decode=blueprint.decoder_of(settings), syntaxes=syntaxes, renderers=renderers, full=full)


def colours_of(agents: Sequence[str]) -> Mapping[str, str]:
    """A colour for each agent."""
    return {agent: COLOURS[index % len(COLOURS)] for index, agent in enumerate(agents)}


def _read(conversations: Conversations, line: EpisodeLine, reading: Reading, agent: str | None) -> ShownEpisode:
    whole = conversations.read(line, reading)
    if agent is None:
        return whole
    return ShownEpisode(line, tuple(turn for turn in whole.turns if turn.agent == agent))


def episode_json(conversation: ShownEpisode) -> dict[str, Any]:
    """One episode as plain values. A folded piece of a prompt has `as_in` and `tokens` in place of ids and text."""
    line = conversation.line
    return {**asdict(line), "score": line.score, "turns": [_turn_json(turn) for turn in conversation.turns]}


def _turn_json(turn: ShownTurn) -> dict[str, Any]:
    plain = {name: getattr(turn, name) for name in ShownTurn.__slots__}
    plain["prompt"] = [_piece_json(piece) for piece in turn.prompt]
    plain["reply"] = _piece_json(turn.reply) if turn.reply else None
    plain["tools"] = [asdict(call) for call in turn.tools]
    plain["logprobs"] = asdict(turn.logprobs) if turn.logprobs else None
    plain["versions"] = [[run.start, run.version] for run in turn.versions]
    return plain


def _piece_json(piece: Piece) -> dict[str, Any]:
    if piece.as_in is not None:
        return {"as_in": piece.as_in, "tokens": len(piece.ids)}
    return {"ids": piece.ids.tolist(), "text": piece.text}


def show_list(folder: RunFolder, lines: Sequence[EpisodeLine], limit: int) -> None:
    """Prints the newest episodes, those that ended if there are enough, counts of all, and how to look closer."""
    lines = sorted(lines, key=lambda line: line.status not in (STOPPED, NOT_ENDED))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("episode", min_width=max(len(line.episode) for line in lines))  # It is to be copied.
    for column in ("step", "task", "score", "turns", "status", "rows", ""):
        table.add_column(column, justify="right" if column in ("step", "score", "turns") else "left")
    for line in lines[-limit:]:
        table.add_row(
            line.episode,
            "" if line.step is None else str(line.step),
            line.task,
            "" if line.score is None else f"{line.score:.3f}",
            str(sum(line.turns.values())),
            Text(line.status, "red" if line.failed else ""),
            ", ".join(f"{n} {state}" for state, n in sorted(line.states.items())),
            Text(
                _short(f"{line.place}: {line.reason}" if line.place else line.reason), no_wrap=True, overflow="ellipsis"
            ),
        )
    CONSOLE.print(table)
    counted = Counter(line.status for line in lines)
    counts = ", ".join(f"{n} {status}" for status, n in counted.most_common())
    CONSOLE.print(f"{len(lines)} episodes: {counts}. Score: success, or else the mean reward of the agents.")
    if counted[NOT_ENDED]:
        CONSOLE.print(f"{counted[NOT_ENDED]} have not ended: the run still plays them, or it was killed.")
    if pruned := sum(line.pruned for line in lines):
        CONSOLE.print(f"{pruned} rows lost texts and tokens to store.budget_gb; their numbers are there.")
    CONSOLE.print("\nLook closer:")
    path = shlex.quote(str(folder.path))
    failures = [f"flexmarl show {path} --failed"] if any(line.failed for line in lines) else []
    for command in (f"flexmarl show {path} --episode {lines[-1].episode}", f"flexmarl show {path} --best 1", *failures):
        CONSOLE.print(f"  {command}", soft_wrap=True)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"


def shown(conversation: ShownEpisode, folder: RunFolder, colours: Mapping[str, str]) -> Iterator[Text]:
    """Yields one episode as texts: its head, then each turn with prompt, reply and figures."""
    line = conversation.line
    of = "" if line.step is None else f" of step {line.step}"
    score = "" if line.score is None else f", score {line.score:.3f}"
    yield Text(f"━━ episode {line.episode}{of}, task {line.task}: {line.status}{score}", "bold")
    if line.reason:
        yield Text(f"{line.reason}{line.place and f' ({line.place})'}", "red" if line.failed else "yellow")
    if line.failed and (traces := folder.path / "failures").is_dir():
        yield Text(f"first traceback of each kind of failure: {traces}", "dim")
    if figures := ", ".join(f"{name} {value:.4g}" for name, value in line.metrics.items()):
        yield Text(figures, "dim")
    if line.account is not None:
        yield Text(_account(line.account), "dim")
    if not conversation.turns:
        yield Text("no call has a row", "dim")
    for turn in conversation.turns:
        yield from _turn(turn, colours[turn.agent])
    yield Text("")


def _account(account: EpisodeAccount) -> str:
    """The account of an episode's tokens in a line, e.g. `gateway: 2 calls, 9 tokens = 7 delivered + 2 undelivered`."""
    lost = [
        f"{sum(of.values())} {what} ({', '.join(of)})"
        for what, of in (("undelivered", account.undelivered), ("failed", account.failed))
        if of
    ]
    prompts = ", ".join(f"{number} {continuity}" for continuity, number in account.continuity.items())
    why = f" ({', '.join(f'{number} {reason}' for reason, number in account.why.items())})" if account.why else ""
    tokens = " + ".join([f"{account.delivered} delivered", *lost])
    return f"gateway: {account.calls} calls, {account.sampled} tokens = {tokens}; prompts: {prompts}{why}"


def _turn(turn: ShownTurn, colour: str) -> Iterator[Text]:
    place = f" in branch {turn.branch}" if turn.path else ""
    yield Text(f"── turn {turn.hop}: {turn.agent}{place}", f"bold {colour}")
    for piece in turn.prompt:
        if piece.as_in is not None:
            yield Text(f"+{len(piece.ids)} tokens as in turn {piece.as_in}", "dim")
        else:
            yield _quoted("> ", piece.text, "")
    if turn.pruned:
        yield Text("texts and tokens were dropped to keep the store within store.budget_gb", "yellow")
    if turn.reply is not None:
        yield _quoted("< ", turn.reply.text, colour)
    elif not turn.pruned:
        yield Text("nothing was sampled", "yellow")
    for call in turn.tools:
        name = call.name or "a tool call that could not be understood"
        yield Text(f"tool {name}({call.argument}): {_result(call)}", "dim")
    if turn.tools and turn.tools[0].result is not None:
        yield Text(f"tools took {turn.tools[0].seconds:.3g} s", "dim")
    yield Text("; ".join(_figures(turn)), "dim")


def _result(call: CalledTool) -> str:
    if call.result is None:
        return "its result was not read"
    if call.prompt:
        return "its result is in the next prompt"
    return call.result if len(call.result) <= SHOWN else f"{call.result[:SHOWN]} ... (whole in the next prompt)"


def _quoted(mark: str, text: str, style: str) -> Text:
    return Text("\n".join(f"{mark}{line}" for line in text.split("\n")), style)


def _figures(turn: ShownTurn) -> Iterator[str]:
    """Reward, advantage, state, log-probabilities and versions of a turn, a phrase each."""
    if turn.reward is not None:
        yield f"reward {turn.reward:.4g}{_sum(turn.parts)}"
    if turn.shaped:
        yield f"credited as {sum(turn.shaped.values()):.4g}{_sum(turn.shaped)}"
    if turn.advantage is not None:
        weight = "" if turn.weight in (None, 1.0) else f", weight {turn.weight:.4g}"
        yield f"advantage {turn.advantage:+.4g}{weight}"
    yield f"{turn.state}{f' ({turn.reason})' if turn.reason else ''}"
    yield from (f"{name} {value:.4g}" for name, value in turn.signals.items())
    if "continuity" in turn.tags:
        of, why = turn.tags, f" ({turn.tags['why']})" if "why" in turn.tags else ""
        yield f"prompt {of['continuity']}{why}, lane {of['lane']}, thread {of['thread']}, {of['dialect']}"
    if turn.reply is not None and turn.logprobs is not None:
        of = turn.logprobs
        gap = f", raw mean {of.raw_mean:.3f}, gap {of.largest_gap:.3g}" if of.largest_gap else ""
        tokens = f"{len(turn.reply.ids)} tokens, finish {turn.finish}"
        yield f"{tokens}, log-probability mean {of.mean:.3f}, least {of.least:.3f}{gap}"
    versions = ", ".join(f"v{run.version}{f' from token {run.start}' if run.start else ''}" for run in turn.versions)
    if versions:
        yield f"{turn.policy} {versions}"


def _sum(parts: Mapping[str, float]) -> str:
    return f" = {' + '.join(f'{name} {value:.4g}' for name, value in parts.items())}" if len(parts) > 1 else ""
