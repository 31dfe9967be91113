"""Conversations of a run, read from its folder: also while the run writes, and after it ended in any way.

journal.jsonl ──► how each episode ended ──┐
                                           ├──► EpisodeLine, cheap: a list of all episodes
experience.sqlite ──► counts in SQL ───────┤
                  └─► rows of one episode ─┴──► ShownEpisode: turns with their texts

Texts are decoded for people. Ids are what training sees: the ids of a turn's pieces, unfolded, are those that the
engine was given, and the ids of its reply those that it sampled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum

import numpy as np

from flexmarl.agents.chat import ChatRenderer, spoken_from
from flexmarl.errors import ConfigError
from flexmarl.events.group_events import EpisodeAccount, EpisodeFailed, EpisodeFinished, GroupAdmitted, GroupTaken
from flexmarl.events.journal import read_journal
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.interface import Row
from flexmarl.experience.schema import quote
from flexmarl.experience.store_file import StoreReader, read_store
from flexmarl.records import (
    AgentName,
    EpisodeId,
    EpisodeStatus,
    GroupId,
    IntArray,
    PolicyName,
    Purpose,
    RowState,
    SampleId,
    Scalar,
    Version,
    VersionRun,
    make_trajectory_id,
    split_sample_id,
    split_trajectory_id,
)
from flexmarl.tools import Syntax, ToolCall
from flexmarl.tools.arguments import as_text

NOT_ENDED, STOPPED = "not ended", "stopped"
"""Statuses of episodes that have no `EpisodeStatus`: the run still plays it or was killed; its group was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLine:
    """One episode in a list."""

    episode: EpisodeId
    task: str
    step: int | None = None
    """Number of its step, from 1, as on the line of the step; None in evaluations."""
    purpose: Purpose = Purpose.TRAINING
    status: str
    """An EpisodeStatus, NOT_ENDED or STOPPED."""
    reason: str = ""
    """Why it is not finished."""
    place: str = ""
    """File and line at which it failed, e.g. `team.py:61`; empty if no code raised an error or was waited for."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures that the workflow reported; `success` is the team's score."""
    rewards: Mapping[AgentName, float] = field(default_factory=dict)
    """Mean reward of each agent over its turns; agents without a reward are absent."""
    rewarded: Mapping[AgentName, int] = field(default_factory=dict)
    """Number of turns that got these rewards."""
    turns: Mapping[AgentName, int] = field(default_factory=dict)
    """Number of rows of each agent: its turns, and its calls without an answer."""
    states: Mapping[RowState, int] = field(default_factory=dict)
    """Number of rows in each state."""
    pruned: int = 0
    """Number of rows whose texts and tokens were dropped to keep the store within its budget."""
    account: EpisodeAccount | None = None
    """The account of its tokens at the gateway; None if it was not played there, or has not ended."""

    @property
    def group(self) -> GroupId:
        """Its group."""
        return GroupId(split_trajectory_id(self.episode)[0])

    @property
    def failed(self) -> bool:
        """True if it ended by an error or by its time limit."""
        return self.status in (EpisodeStatus.FAILED, EpisodeStatus.TIMED_OUT)

    @property
    def score(self) -> float | None:
        """The team's success, or the mean of its agents' rewards if the workflow reports none; None without both."""
        if "success" in self.metrics:
            return self.metrics["success"]
        return fsum(self.rewards.values()) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt, or a reply."""

    ids: IntArray
    text: str
    """The ids decoded, special tokens included; empty if the piece is folded."""
    as_in: int | None = None
    """Folded: hop of the turn whose prompt and reply are exactly these tokens. None: the tokens are shown here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSummary:
    """Log-probabilities of a reply's tokens, in nats."""

    mean: float
    """Under the distribution that was sampled from."""
    least: float
    raw_mean: float
    """Under the model's own distribution: temperature 1, no filters."""
    largest_gap: float
    """Largest absolute difference of the two, over the tokens."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool call that a reply ended with. It may have several."""

    name: str
    """Empty if the call could not be understood."""
    argument: str
    """The arguments as text; the reply, if the call could not be understood."""
    result: str | None
    """Text of the result; None: no call of the agent followed, so no result was read."""
    seconds: float
    """Time of all calls of the reply, which run at once."""
    prompt: bool = False
    """True: `result` is the whole new text of the next prompt, because its parts cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """One LLM call, for people."""

    sample_id: SampleId
    hop: int
    agent: AgentName
    policy: PolicyName
    turn: int
    """Number of its act in the episode."""
    branch: str
    path: tuple[int, ...]
    parent: SampleId | None
    state: RowState
    reason: str
    """Why the row was filtered, failed or expired."""
    prompt: tuple[Piece, ...]
    """Empty if the row was pruned."""
    reply: Piece | None
    """None if nothing was sampled, or if the row was pruned."""
    tools: tuple[CalledTool, ...]
    """The calls of the reply, in its order."""
    finish: str
    versions: tuple[VersionRun, ...]
    logprobs: LogprobSummary | None
    """None without a sampled token."""
    reward: float | None
    parts: Mapping[str, float]
    """Parts that the reward adds up from, by name."""
    shaped: Mapping[str, float]
    """Parts of the reward that credit used; empty if no term changed it."""
    signals: Mapping[str, float]
    advantage: float | None
    weight: float | None
    tags: Mapping[str, Scalar]
    pruned: bool


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """One episode with its turns, in the order of its calls."""

    line: EpisodeLine
    turns: tuple[ShownTurn, ...]

    def prompt_ids(self, hop: int) -> IntArray:
        """The prompt of a turn from the pieces that are shown: each folded piece is taken from the turn it names."""
        turns = {turn.hop: turn for turn in self.turns}
        ids: list[IntArray] = []
        for piece in turns[hop].prompt:
            if piece.as_in is None:
                ids.append(piece.ids)
            else:
                reply = turns[piece.as_in].reply
                ids += [self.prompt_ids(piece.as_in), *([reply.ids] if reply else [])]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the run's texts are read."""

    decode: Callable[[PolicyName, IntArray], str]
    """Text of ids with the policy's tokenizer, special tokens included."""
    syntaxes: Mapping[str, Syntax]
    """How each agent with tools writes a call."""
    renderers: Mapping[str, ChatRenderer] = field(default_factory=dict)
    """The renderer that wrote the results of each agent's calls."""
    full: bool = False
    """True: no prompt is folded."""


class Conversations:
    """Reads the episodes of one run, or of one evaluation."""

    def __init__(self, folder: RunFolder, store: StoreReader) -> None:
        self._store = store
        self._admitted: dict[int, GroupAdmitted] = {}
        self._taken: dict[int, int] = {}
        self._ends: dict[str, EpisodeFinished | EpisodeFailed] = {}
        self._accounts: dict[str, EpisodeAccount] = {}
        for event in read_journal(folder.journal) if folder.journal.exists() else ():
            match event:
                case GroupAdmitted():
                    if event.group in self._admitted:  # Played again after a resume, under the same ids.
                        self._forget(event.group)
                    self._admitted[event.group] = event
                case GroupTaken():
                    self._taken[event.group] = event.step
                case EpisodeFinished() | EpisodeFailed() if event.group in self._admitted:
                    self._ends[event.episode] = event
                case EpisodeAccount() if event.group in self._admitted:
                    self._accounts[event.episode] = event

    @property
    def agents(self) -> tuple[AgentName, ...]:
        """The agents of the run, in the team's order."""
        return self._store.agents

    def lines(self) -> list[EpisodeLine]:
        """All episodes that have a row, or an end in the journal, in the order of their groups."""
        found: dict[tuple[int, int, int], _Counts] = {}
        for agent in self._store.agents:
            for cells in self._store.query(_COUNTED.format(table=quote(agent))).rows:
                found.setdefault(cells[:3], _Counts()).add(agent, *cells[3:])
        for episode in self._ends:
            found.setdefault(split_trajectory_id(episode), _Counts())
        return [self._line(*place, found[place]) for place in sorted(found)]

    def step_of(self, group: int) -> int | None:
        """Number of the step that trains the group, from 1, as on the line of the step; None in evaluations."""
        admitted = self._admitted.get(group)
        step = self._taken.get(group, admitted.step if admitted else -1)
        return step + 1 if step >= 0 else None

    def read(self, line: EpisodeLine, reading: Reading) -> ShownEpisode:
        """Reads one episode with its texts."""
        rows = self._store.episode(*split_trajectory_id(line.episode))
        prompts = {row.sample_id: _ids(row, "prompt_ids") for row in rows}
        turns = [_turn(row, rows, prompts, reading) for row in rows]
        return ShownEpisode(line, tuple(turns))

    def _forget(self, group: int) -> None:
        self._taken.pop(group, None)
        self._ends = {episode: end for episode, end in self._ends.items() if end.group != group}
        self._accounts = {episode: one for episode, one in self._accounts.items() if one.group != group}

    def _line(self, group: int, index: int, attempt: int, counts: "_Counts") -> EpisodeLine:
        episode = EpisodeId(make_trajectory_id(group, index, attempt))
        admitted, end = self._admitted.get(group), self._ends.get(episode)
        (status, reason), place = counts.status(), ""
        if isinstance(end, EpisodeFailed):
            status, reason, place = str(end.status), end.because, end.place
        elif end is not None:
            status, reason = str(EpisodeStatus.FINISHED), ""
        return EpisodeLine(
            episode=episode,
            task=counts.task or (admitted.task if admitted else ""),
            step=self.step_of(group),
            purpose=counts.purpose,
            status=status,
            reason=reason,
            place=place,
            metrics=end.metrics if isinstance(end, EpisodeFinished) else {},
            rewards=counts.rewards,
            rewarded={agent: number for agent, (_, number) in counts.sums.items() if number},
            turns=counts.turns,
            states=counts.states,
            pruned=counts.pruned,
            account=self._accounts.get(episode),
        )


@contextmanager
def open_conversations(folder: RunFolder) -> Iterator[Conversations]:
    """Opens a run's conversations for the length of the block.

    Raises ConfigError if its rows were kept in memory, FlexmarlError if the run is of another format.
    """
    if not folder.store.is_file():
        name = folder.store.name
        raise ConfigError(
            f"'{folder.path}' has no {name}: its rows were kept in memory; `store.type: sqlite` keeps them"
        )
    with read_store(folder.store) as store:
        yield Conversations(folder, store)


_COUNTED = (
    "SELECT group_id, episode_index, attempt, state, min(sample_id), max(reason), max(purpose), count(*), "
    "sum(reward), count(reward), sum(prompt_ids_status) FROM {table} GROUP BY 1, 2, 3, 4"
)


@dataclass(slots=True)
class _Counts:
    """Counts of one episode's rows."""

    task: str = ""
    purpose: Purpose = Purpose.TRAINING
    turns: dict[AgentName, int] = field(default_factory=dict)
    states: dict[RowState, int] = field(default_factory=dict)
    sums: dict[AgentName, tuple[float, int]] = field(default_factory=dict)
    reasons: dict[RowState, str] = field(default_factory=dict)
    pruned: int = 0

    def add(
        self,
        agent: AgentName,
        state: str,
        sample_id: str,
        reason: str,
        purpose: str | None,
        rows: int,
        total: float | None,
        rewarded: int,
        whole: int,
    ) -> None:
        """Adds an agent's rows in one state."""
        self.task = split_sample_id(sample_id)[0]
        self.purpose = Purpose(purpose) if purpose else self.purpose
        self.turns[agent] = self.turns.get(agent, 0) + rows
        self.states[RowState(state)] = self.states.get(RowState(state), 0) + rows
        before, number = self.sums.get(agent, (0.0, 0))
        self.sums[agent] = (before + (total or 0.0), number + rewarded)
        self.reasons[RowState(state)] = reason
        self.pruned += rows - whole

    @property
    def rewards(self) -> dict[AgentName, float]:
        """Mean reward of each agent that got one."""
        return {agent: total / number for agent, (total, number) in self.sums.items() if number}

    def status(self) -> tuple[str, str]:
        """Status and reason, where the journal does not say how the episode ended."""
        if RowState.EXPIRED in self.states:
            return STOPPED, self.reasons[RowState.EXPIRED]
        if not self.states or RowState.OPEN in self.states:
            return NOT_ENDED, ""
        if self.states.keys() == {RowState.FAILED}:
            return str(EpisodeStatus.FAILED), self.reasons[RowState.FAILED]
        return str(EpisodeStatus.FINISHED), ""


def _ids(row: Row, column: str) -> IntArray:
    return row.values.get(column, np.zeros(0, np.int32))


def _turn(row: Row, rows: Sequence[Row], prompts: Mapping[SampleId, IntArray], reading: Reading) -> ShownTurn:
    values, reply_ids = row.values, _ids(row, "response_ids")
    parent = SampleId(values["parent"]) if values.get("parent") else None
    reward, parts = values.get("reward"), values.get("parts")
    return ShownTurn(
        sample_id=row.sample_id,
        hop=split_sample_id(row.sample_id)[1],
        agent=row.agent,
        policy=row.policy,
        turn=values.get("turn", 0),
        branch=values.get("branch", ""),
        path=tuple(values.get("path", ())),
        parent=parent,
        state=row.state,
        reason=row.reason,
        prompt=tuple(_prompt(row, parent, rows, prompts, reading)),
        reply=Piece(reply_ids, reading.decode(row.policy, reply_ids)) if len(reply_ids) else None,
        tools=tuple(_tools(row, rows, prompts, reading)),
        finish=values.get("finish", ""),
        versions=tuple(VersionRun(start, Version(version)) for start, version in values.get("version_runs", ())),
        logprobs=_logprobs(row) if len(reply_ids) else None,
        reward=reward,
        parts=parts_of(reward, parts),
        shaped=values.get("shaped", {}),
        signals=values.get("signals", {}),
        advantage=values.get("advantage"),
        weight=values.get("weight"),
        tags=values.get("tags", {}),
        pruned="prompt_ids" not in values,
    )


def parts_of(reward: float | None, parts: Mapping[str, float] | None) -> Mapping[str, float]:
    """The parts that a row's reward adds up from, by name. A row whose only part is its outcome does not store them."""
    return parts or ({} if reward is None else {"outcome": reward})


def _prompt(
    row: Row, parent: SampleId | None, rows: Sequence[Row], prompts: Mapping[SampleId, IntArray], reading: Reading
) -> Iterator[Piece]:
    """The pieces of a prompt: the turn that it extends, if that is so to the last id, and the new tokens."""
    new = prompts[row.sample_id]
    extended = None if reading.full else next((one for one in rows if one.sample_id == parent), None)
    if extended is not None:
        before = np.concatenate([prompts[extended.sample_id], _ids(extended, "response_ids")])
        if len(before) and np.array_equal(new[: len(before)], before):
            yield Piece(before, "", split_sample_id(extended.sample_id)[1])
            new = new[len(before) :]
    if len(new):
        yield Piece(new, reading.decode(row.policy, new))


def _tools(
    row: Row, rows: Sequence[Row], prompts: Mapping[SampleId, IntArray], reading: Reading
) -> Iterator[CalledTool]:
    """The tool calls that a turn ends with. A message that several calls continue is read whole, at its last call."""
    syntax = reading.syntaxes.get(row.agent)
    act = [one for one in rows if one.agent == row.agent and _act(one) == _act(row)]
    place = act.index(row)
    following = act[place + 1] if place + 1 < len(act) else None
    if syntax is None or "text" not in row.values or (following is not None and _continues(following, row, prompts)):
        return
    text = row.values["text"]
    for later, earlier in pairwise(act[place::-1]):
        if "text" not in earlier.values or not _continues(later, earlier, prompts):
            break
        text = earlier.values["text"] + text
    opened = row.agent in reading.renderers and reading.renderers[row.agent].opens_thought
    calls = syntax.parse(text[spoken_from(text, opened=opened) :])
    if not calls or (following is None and not any(isinstance(call, ToolCall) for call in calls)):
        return
    whole, results = None, tuple[str, ...]()
    names = [call.name if isinstance(call, ToolCall) else "" for call in calls]
    if following is not None:
        parent = SampleId(following.values["parent"]) if following.values.get("parent") else None
        pieces = [*_prompt(following, parent, rows, prompts, replace(reading, full=False))]
        whole = pieces[-1].text if pieces else None
        if whole is not None and row.agent in reading.renderers:
            results = reading.renderers[row.agent].results_in(whole, names)
    seconds = following.values.get("tool_s", 0.0) if following is not None else 0.0
    for index, call in enumerate(calls):
        argument = as_text(call.arguments) if isinstance(call, ToolCall) else text
        result = results[index] if results else whole
        yield CalledTool(names[index], argument, result, seconds, prompt=whole is not None and not results)


def _continues(row: Row, before: Row, prompts: Mapping[SampleId, IntArray]) -> bool:
    """True if a call goes on with the message of the one before: its prompt is that prompt and its reply."""
    said = np.concatenate([prompts[before.sample_id], _ids(before, "response_ids")])
    return np.array_equal(prompts[row.sample_id], said)


def _act(row: Row) -> int:
    act_hop = row.values.get("act_hop")
    return split_sample_id(row.sample_id)[1] if act_hop is None else act_hop


def _logprobs(row: Row) -> LogprobSummary:
    sampled, raw = (row.values[name].astype(np.float64) for name in ("logprobs", "raw_logprobs"))
    return LogprobSummary(
        mean=float(sampled.mean()),
        least=float(sampled.min()),
        raw_mean=float(raw.mean()),
        largest_gap=float(np.abs(sampled - raw).max()),
    )
