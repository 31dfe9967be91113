"""Runs streaming credit: rows are trained before their group is complete (docs/math.md, Streaming credit).

  episode ends ──► score of each row ──► READY ──► two gradient sums per credit group
  group ends   ──► credit ──► advantages into the rows, a line for the sums
              └──► drop   ──► rows FILTERED, sums dropped

consumes    finished episodes of groups that still play; later the same groups, complete
waits for   the store
produces    READY rows with a score; later their samples, and credit lines for the sessions that train them
unblocked by the store
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from flexmarl.credit.rows import group_name
from flexmarl.orchestrator.crediting import NO_WEIGHT, Credited, Crediting
from flexmarl.records import CreditedTurn, CreditLine, Episode, GroupId, GroupRecord, PolicyName, SampleId
from flexmarl.training.session import TrainingSession


@dataclass(slots=True)
class _Open:
    """The rows of one group that were made READY before it was complete."""

    rows: dict[str, dict[PolicyName, list[SampleId]]] = field(default_factory=lambda: defaultdict(dict))
    """Ids of the rows, by name of their credit group and by policy."""
    scores: dict[SampleId, float] = field(default_factory=dict)


class Streaming:
    """Makes rows READY with a score, and closes their credit groups when their group is complete."""

    def __init__(self, crediting: Crediting, sessions: Mapping[PolicyName, TrainingSession]) -> None:
        """`sessions` train the rows, by policy."""
        self._crediting = crediting
        self._sessions = sessions
        self._open: dict[GroupId, _Open] = defaultdict(_Open)

    async def take_episode(self, group: GroupRecord, episode: Episode) -> Collection[PolicyName]:
        """Makes the rows of a finished episode READY. Returns the policies that have such rows."""
        part, opened = replace(group, episodes=(episode,)), self._open[group.group]
        places = self._crediting.open_places(part)
        samples: list[CreditedTurn] = []
        for turn in episode.turns:
            if turn.sample_id in places:
                credit_group, score = places[turn.sample_id]
                name = f"{group.group}: {group_name(credit_group)}"
                samples.append(CreditedTurn(turn=turn, advantage=score, open_group=name))
                opened.rows[name].setdefault(turn.policy, []).append(turn.sample_id)
                opened.scores[turn.sample_id] = score
        await self._crediting.make_ready(samples)
        return dict.fromkeys(sample.turn.policy for sample in samples)

    async def drop(self, group: GroupRecord, because: str) -> None:
        """Ends a complete group and its rows as FILTERED, also the rows that were accumulated already."""
        opened = self._open.pop(group.group, _Open())
        for name in opened.rows:
            await self._close(name, opened, None, because)
        await self._crediting.drop(group, because, but=opened.scores)

    async def credit(self, group: GroupRecord) -> Credited:
        """Credits a complete group: writes the credit into its rows, and sends the credit lines to the sessions."""
        opened = self._open.pop(group.group, _Open())
        (credited,) = await self._crediting.credit([group], opened=opened.scores)
        samples = {sample.turn.sample_id: sample for of in credited.samples.values() for sample in of}
        lines = {f"{group.group}: {group_name(g)}": line for g, line in self._crediting.lines(group).items()}
        await self._crediting.put_credit(list(samples.values()))
        for name in opened.rows:
            line = lines[name]
            await self._close(name, opened, line if line.weight else None, NO_WEIGHT)
        return credited

    async def _close(self, name: str, opened: _Open, line: CreditLine | None, because: str) -> None:
        for policy, ids in opened.rows[name].items():
            await self._sessions[policy].close_group(name, ids, line, because)
