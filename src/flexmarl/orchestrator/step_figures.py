"""Figures of a run: a listener that turns what happens into metrics by step.

  events, notices ──► sums, means, gauges ──► StepSettled: one line of metrics ──► FiguresWritten

No part of a run waits for it, and none calls it.
"""

from collections import Counter, defaultdict, deque

from flexmarl.credit.interface import AgentReport
from flexmarl.events.event import Events
from flexmarl.events.group_events import EpisodeAccount, GroupFiltered, GroupsCredited, Refilled
from flexmarl.events.metrics import Metrics
from flexmarl.events.notices import (
    EpisodesTaken,
    FiguresWritten,
    GroupJudged,
    GroupPlayed,
    PhaseChanged,
    StepSettled,
    TurnsTaken,
)
from flexmarl.events.overlap import Interval, overlap, seconds, union
from flexmarl.events.run_events import Evaluated
from flexmarl.events.training_events import DivergenceCharged, MicroBatchDone, Published, Rested, Updated, UpdateSkipped
from flexmarl.events.untrained import NotTrained, counted, tool_faults
from flexmarl.experience.staleness import PublishLag, length_bias, staleness_of
from flexmarl.orchestrator.evaluation import mean_metrics, rewards_of
from flexmarl.orchestrator.publish import Versions
from flexmarl.records import Episode, Failure, FinishReason, PolicyName, Purpose

COMPARED = 50_000
"""Number of newest episodes whose lengths are compared. They show a bias of 1 %, and are sorted in milliseconds."""
_FAULTS = {"bad_tool_calls": "bad_tool_calls", "tool_error": "tool_errors", "dropped_tool_calls": "dropped_tool_calls"}
"""Signals of turns whose tool calls are at fault, with the metric that counts the turns."""


class Figures:
    """The metrics of a run. docs/howto/metrics.md lists their names."""

    def __init__(self, *, metrics: Metrics, versions: Versions, events: Events, separate: bool = True) -> None:
        """Begins the first step's time, and listens to `events` from now on. `separate`: trainers and engines have
        different devices.

        On a shared device, training beside rollout slows rollout down, so that none of it is hidden.
        """
        self._separate = separate
        self._metrics, self._versions, self._events = metrics, versions, events
        metrics.start()
        self._training: defaultdict[str, list[Interval]] = defaultdict(list)
        self._rollout: list[Interval] = []
        self._playing_since: float | None = None
        self._lag = PublishLag()
        self._stalest: Counter[PolicyName] = Counter()
        self._played_lengths: deque[int] = deque(maxlen=COMPARED)
        self._taken_lengths: deque[int] = deque(maxlen=COMPARED)
        self._rewarded = Counter[str]()
        """Rewarded turns of the step, by agent."""
        self._parts: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Sum of each part of their rewards. A group in which no turn has a part does not name it."""
        self._failures: list[Failure] = []
        self._filtered: Counter[str] = Counter()
        self._skipped: list[PolicyName] = []
        events.listen(PhaseChanged, self._phase_changed)
        events.listen(GroupPlayed, self._group_played)
        events.listen(EpisodeAccount, self._door_shut)
        events.listen(GroupJudged, self._group_judged)
        events.listen(GroupsCredited, self._credited)
        events.listen(GroupFiltered, self._group_filtered)
        events.listen(UpdateSkipped, self._update_skipped)
        events.listen(Rested, self._rested)
        events.listen(DivergenceCharged, self._diverged)
        events.listen(Refilled, self._refilled)
        events.listen(EpisodesTaken, self._episodes_taken)
        events.listen(TurnsTaken, self._turns_taken)
        events.listen(MicroBatchDone, self._accumulated)
        events.listen(Updated, self._updated)
        events.listen(Published, self._published)
        events.listen(Evaluated, self._evaluated)
        events.listen(StepSettled, self._step_settled)

    def _phase_changed(self, changed: PhaseChanged) -> None:
        """Counts the time of the phase. Training during rollout counts as hidden."""
        (self._metrics.begin if changed.began else self._metrics.end)(changed.phase)
        if changed.phase == "rollout":
            if self._playing_since is not None:
                self._rollout.append((self._playing_since, self._events.now()))
            self._playing_since = self._events.now() if changed.began else None

    def _group_played(self, played: GroupPlayed) -> None:
        """Counts the episodes of a group, even if it is not trained on later."""
        group, metrics = played.group, self._metrics
        metrics.add("rollout/groups")
        ended = [episode for episode in group.episodes if not episode.stopped]
        metrics.add("rollout/episodes", len(ended))
        metrics.add("rollout/failed_episodes", len(ended) - len(group.finished))
        if stopped := len(group.episodes) - len(ended):
            metrics.add("rollout/stopped_episodes", stopped)
        for episode in group.episodes:
            tokens = _num_tokens(episode)
            self._played_lengths.append(tokens)
            metrics.add("rollout/tokens", tokens)
            metrics.add("rollout/turns", len(episode.turns))
            if not episode.finished and not episode.stopped:
                self._failures.append(episode.failure or Failure(kind=episode.status))
            for turn in episode.turns:
                metrics.mean(f"cut/{turn.agent}", turn.finish is FinishReason.LENGTH)
                for signal, figure in _FAULTS.items():
                    if share := episode.signals.get(turn.sample_id, {}).get(signal):
                        metrics.add(f"{figure}/{turn.agent}", share > 0)
        for episode in ended:
            metrics.mean("rollout/episode_s", episode.duration_s)
            for name, value in mean_metrics([episode]).items():
                metrics.mean(_path(name), value)
            for agent, rewards in rewards_of([episode]).items():
                metrics.mean(f"reward/{agent}", sum(rewards) / len(rewards), weight=len(rewards))

    def _door_shut(self, account: EpisodeAccount) -> None:
        """Counts what became of the calls and tokens of programs in training; those of evaluations are their own."""
        if account.purpose is not Purpose.TRAINING:
            return
        calls = sum(account.continuity.values())
        for continuity in ("extends", "rendered"):
            if calls:
                share = account.continuity.get(continuity, 0) / calls
                self._metrics.mean(f"gateway/{continuity}", share, weight=calls)
        for why, count in account.why.items():
            self._metrics.add(f"gateway/why/{why.replace(' ', '_')}", count)
        self._metrics.add("gateway/calls", account.calls)
        self._metrics.add("gateway/delivered_tokens", account.delivered)
        self._metrics.add("gateway/undelivered_tokens", sum(account.undelivered.values()))
        self._metrics.add("gateway/failed_tokens", sum(account.failed.values()))
        self._metrics.add("gateway/retokenised", account.retokenised)

    def _group_judged(self, judged: GroupJudged) -> None:
        """Counts the filter's findings on each agent's credit groups, and averages the parts of its rewards."""
        for agent, counts in judged.effects.items():
            for effect, count in counts.items():
                self._metrics.add(f"filter/{agent}/{effect}", count)
        for agent, parts in judged.parts.items():
            self._rewarded[agent] += parts["turns"]
            for part, mean in parts["means"].items():
                self._parts[agent][part] += mean * parts["turns"]

    def _group_filtered(self, group: GroupFiltered) -> None:
        """Counts a group that is not trained on."""
        self._filtered[group.reason] += 1
        self._metrics.add(f"filtered/{group.reason}")

    def _rested(self, rested: Rested) -> None:
        """Counts a step in which a policy was not to be trained."""
        self._metrics.add(f"train/{rested.policy}/rested")

    def _update_skipped(self, skipped: UpdateSkipped) -> None:
        """Counts an update that was left out."""
        self._skipped.append(skipped.policy)
        self._metrics.add(f"train/{skipped.policy}/skipped")

    def _credited(self, credited: GroupsCredited) -> None:
        """Counts each agent's credit groups by kind, their sizes, and the agent's rows without weight."""
        for agent, figures in credited.report.items():
            report = AgentReport(**figures)
            for name, count in report.counts.items():
                self._metrics.add(f"credit/{agent}/{name}", count)
            for size in report.group_sizes:
                self._metrics.mean(f"credit/{agent}/group_size", size)

    def _diverged(self, batch: DivergenceCharged) -> None:
        """Records the divergence of a policy's rows from the reference policy, and its coefficient."""
        self._metrics.mean(f"train/{batch.policy}/kl_to_reference", batch.kl)
        self._metrics.mean(f"train/{batch.policy}/kl_coef", batch.coef)

    def _refilled(self, step: Refilled) -> None:
        """Counts the groups that were played to fill a step, and those that were dropped."""
        self._metrics.add("refill/generated", step.generated)
        self._metrics.add("refill/dropped", step.generated - step.kept)

    def _accumulated(self, done: MicroBatchDone) -> None:
        """Records the busy interval of a micro-batch."""
        self._training[done.process].append((done.began, done.ended))
        self._metrics.add("train/micro_batches")

    def _updated(self, update: Updated) -> None:
        """Records the busy interval of an update, and its figures."""
        policy, report = update.policy, update.report
        self._training[update.process].append((update.began, update.ended))
        self._lag.made(policy, update.version, update.ended)
        for name, value in (("loss", report["loss"]), ("grad_norm", report["grad_norm"]), *report["means"].items()):
            self._metrics.mean(f"train/{policy}/{name}", value)
        self._metrics.gauge(f"train/{policy}/learning_rate", report["learning_rate"])
        self._metrics.add(f"train/{policy}/samples", report["num_samples"])
        self._metrics.add("train/tokens", report["num_tokens"])

    def _published(self, published: Published) -> None:
        """Records the publish lag: every instance of the policy now serves the version that an update made."""
        lag_s = self._lag.served(published.policy, published.version, published.t)
        if lag_s is not None:  # None for the weights that the run began with.
            self._metrics.mean(f"publish_lag_s/{published.policy}", lag_s)

    def _episodes_taken(self, taken: EpisodesTaken) -> None:
        self._taken_lengths.extend(_num_tokens(episode) for episode in taken.episodes)

    def _turns_taken(self, taken: TurnsTaken) -> None:
        policy, turns = taken.policy, taken.turns
        staleness = staleness_of(turns, self._versions.trained[policy])
        if staleness:
            tokens = sum(turn.num_tokens for turn in turns)
            self._metrics.mean(f"staleness/{policy}/mean", staleness.mean, weight=tokens)
            self._stalest[policy] = max(self._stalest[policy], staleness.max)

    def _evaluated(self, evaluated: Evaluated) -> None:
        """Records an evaluation. Its figures belong to the step that ended before it."""
        for name, value in evaluated.evaluation["metrics"].items():
            self._metrics.mean(f"eval/{_path(name)}", value)
        for agent, reward in evaluated.evaluation["rewards"].items():
            self._metrics.mean(f"eval/reward/{agent}", reward)

    def _step_settled(self, settled: StepSettled) -> None:
        """Writes the figures since the last settled step."""
        for policy, version in self._versions.served.items():
            self._metrics.gauge(f"version/{policy}", version)
        self._flush_overlap()
        self._flush_staleness()
        self._flush_parts()
        values = self._metrics.flush(settled.step)
        untrained = NotTrained(
            episodes=int(values.get("rollout/episodes", 0)),
            failed=counted(self._failures),
            groups=int(values.get("rollout/groups", 0)),
            filtered=dict(self._filtered.most_common()),
            skipped=tuple(dict.fromkeys(self._skipped)),
            tool_faults=tool_faults(values),
        )
        self._failures, self._filtered, self._skipped = [], Counter(), []
        self._events.emit(FiguresWritten(step=settled.step, values=values, untrained=untrained))

    def _flush_overlap(self) -> None:
        if self._playing_since is not None:  # Rollout continues: the rest of it belongs to the next step.
            now = self._events.now()
            self._rollout.append((self._playing_since, now))
            self._playing_since = now
        overlapping = overlap(self._training, self._rollout)
        if overlapping.hidden is not None:
            busy = union(interval for intervals in self._training.values() for interval in intervals)
            self._metrics.add("time/train_s", seconds(busy))
            if self._separate:
                self._metrics.add("overlap/training_s", overlapping.training_s)
                self._metrics.mean("overlap/training_hidden", overlapping.hidden)
        self._training.clear()
        self._rollout.clear()

    def _flush_parts(self) -> None:
        for agent, sums in self._parts.items():
            for part, total in sums.items():
                self._metrics.mean(f"reward_part/{agent}/{part}", total / self._rewarded[agent])
        self._parts.clear()
        self._rewarded.clear()

    def _flush_staleness(self) -> None:
        for policy, versions in self._stalest.items():
            self._metrics.gauge(f"staleness/{policy}/max", versions)
        bias = length_bias([*self._taken_lengths], [*self._played_lengths]) if self._stalest else None
        if bias:
            self._metrics.gauge("length_bias/ratio", bias.ratio)
            self._metrics.gauge("length_bias/ks", bias.ks)
        self._stalest.clear()


def _num_tokens(episode: Episode) -> int:
    return sum(turn.num_tokens for turn in episode.turns)


def _path(name: str) -> str:
    """Metric name of a figure that a workflow reported: `agent/...` is kept, other names are put under `team/`."""
    return name if name.startswith("agent/") else f"team/{name}"
