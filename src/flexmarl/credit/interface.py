"""What every estimator takes and gives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from flexmarl.errors import CreditError
from flexmarl.records import AgentName, EpisodeId, PolicyName, SampleId, Scalar

Needs = Literal["row", "group", "batch", "state"]
"""What an estimator must see at once. `row` and `group` can stream, `batch` waits for the whole step, `state` also
needs a fixed order from step to step."""

Extra = Literal["greedy", "values"]
"""What rows must carry beyond rewards: those of a play at temperature 0 per group, or a critic's values."""

Tokens = tuple[float, ...]
"""One number per sampled token of a row."""

GroupKey = tuple[str, ...] | Mapping[str, tuple[str, ...]]
"""Tags; or tags per agent, where `*` is every other: {"proposer": ("episode", "agent"), "*": ("task", "agent")}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call in the graph of its episode: what it waited for, and what it cost."""

    hop: int
    after: tuple[int, ...] = ()
    """Hops of the calls that it directly depends on; all of them smaller."""
    new_prompt_tokens: int = 0
    """Tokens of its prompt beyond those of the turn that it extends."""
    num_tokens: int = 0
    """Sampled tokens."""
    tool_s: float = 0.0
    """Seconds that a tool took for what its prompt tells of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRow:
    """One rewarded turn of a trained policy."""

    sample_id: SampleId
    task: str
    episode: EpisodeId
    agent: AgentName
    policy: PolicyName
    hop: int
    """Number of the call in its episode."""
    reward: float | None
    """The final reward; None is an error as soon as the row is to be trained."""
    num_tokens: int
    """Sampled tokens; a row without any has weight 0 and no part in any statistic."""
    outcome: float | None = None
    """The reward before penalties, time and process terms; None if there are none, so that it equals `reward`."""
    act_reward: float = 0.0
    """What `reply.reward` gave. All calls of an act have it, and what adds up rewards of several calls counts it
    once."""
    act_outcome: float | None = None
    """What of it was given as the outcome, or a part of it, before terms; None: nothing."""
    call_reward: float = 0.0
    """What this very call paid or earned by terms, penalties and a divergence. The rest of the reward, less
    `act_reward`, was given to its agent or to the team."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts that the reward adds up from, where it has several: `outcome`, and each term that was added."""
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Of the reward, by name, what the workflow asked for: the outcome, as a term reshaped it, and other parts."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Of the reward, by name, what settings added or took: their size is meant. With `objectives` they are the
    reward."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """What was found in the call, each in [0, 1]: `tool_error`, `format_error` ..."""
    token_rewards: Tokens | None = None
    """Where the reward is not all on the last token; they add up to it."""
    values: Tokens | None = None
    """What a critic expected at each token, where there is one."""
    valid: bool = True
    """Whether the call could be parsed, and its tool call run."""
    trains: bool = True
    """False: how the call ended makes it no training row; its weight is 0."""
    greedy: bool = False
    """Of a play at temperature 0 that serves as a baseline; never trained."""
    calls: tuple[Call, ...] = ()
    """All calls of its episode, those of frozen policies too, in hop order."""
    tags: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def act(self) -> Scalar:
        """Names its act in its episode: the hop of the act's first call; without that tag the call is an act alone."""
        return self.tags.get("act", self.sample_id)

    @property
    def shared_reward(self) -> float:
        """What of its reward was given to its agent or to the team."""
        return (self.reward or 0.0) - self.act_reward - self.call_reward

    def pays(self, name: str, price: float) -> "CreditRow":
        """The row with a price taken from its reward; what it was before stays as its outcome."""
        assert self.reward is not None, "what has no reward cannot pay"
        parts = dict(self.parts) or {"outcome": self.reward}
        return replace(
            self,
            reward=self.reward - price,
            outcome=self.reward if self.outcome is None else self.outcome,
            call_reward=self.call_reward - price,
            parts={**parts, name: parts.get(name, 0.0) - price},
            objectives=self.objectives or parts,
            prices={**self.prices, name: self.prices.get(name, 0.0) - price},
        )

    def tag(self, name: str) -> Scalar:
        """A field or tag that rows may be grouped by."""
        if name in ("task", "episode", "agent", "policy", "hop"):
            return getattr(self, name)
        if name not in self.tags:
            known = ", ".join(sorted({"task", "episode", "agent", "policy", "hop", *self.tags}))
            raise CreditError(
                f"unknown tag '{name}': sample {self.sample_id} of agent {self.agent} carries {known}; a workflow "
                f"gives its own with `seat.act(text, {name}=...)`, a tree of turns gives `path`"
            )
        return self.tags[name]

    def number(self, name: str) -> int | float:
        """A tag that says how much. Raises CreditError for a text."""
        value = self.tag(name)
        if isinstance(value, str):
            raise CreditError(
                f"the tag '{name}' of sample {self.sample_id} of agent {self.agent} must be a number, got {value!r}; a "
                f"workflow gives it with `seat.act(text, {name}=...)`"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """What an agent's groups looked like; a group of several agents is counted for each of them."""

    groups: int = 0
    effective: int = 0
    """Groups whose rewards differ. Only they teach anything."""
    too_easy: int = 0
    """All rewards at the top."""
    too_hard: int = 0
    """All rewards at the bottom."""
    flat: int = 0
    """All rewards equal, in between."""
    penalty_alone: int = 0
    """Groups among the effective ones in which only penalties differ, not outcomes."""
    group_sizes: tuple[int, ...] = ()
    """Observations of each group."""
    dropped_singleton: int = 0
    """Rows with weight 0 because nothing was there to compare them with."""
    empty: int = 0
    """Rows with weight 0 because nothing was sampled."""
    untrained: int = 0
    """Rows with weight 0 because of how their calls ended."""
    notes: tuple[str, ...] = ()
    """What could not be done, and why."""

    @property
    def counts(self) -> Mapping[str, int]:
        """All that is counted, by name."""
        return {name: int(getattr(self, name)) for name in self.__slots__ if name not in ("group_sizes", "notes")}

    def __add__(self, other: "AgentReport") -> "AgentReport":
        """The report of both."""
        return AgentReport(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The answer of an estimator: something for every row it was given."""

    advantages: Mapping[SampleId, float]
    """The same for every sampled token of the row."""
    weights: Mapping[SampleId, float]
    """Row weight w_i of docs/math.md section 1: 1, or 0 for rows that stay out of sums and divisors."""
    report: Mapping[AgentName, AgentReport]
    token_advantages: Mapping[SampleId, Tokens] = field(default_factory=dict)
    """Of rows whose tokens differ; `advantages` then has their mean, for people."""
    returns: Mapping[SampleId, Tokens] = field(default_factory=dict)
    """What a critic should have expected at each token."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """What a `state` estimator must be given the next time, by agent."""


class Estimator(Protocol):
    """Advantages from rewards. Pure: the answer depends on rows and memory alone, not on the order rows come in.

    Raises CreditError for a missing or non-finite reward, an unknown tag, a sample given twice, or a group that breaks
    a requirement.
    """

    @property
    def key(self) -> GroupKey:
        """What rows are compared by, as it was set."""
        ...

    @property
    def grouping(self) -> GroupKey:
        """The key with the tags that tell groups apart beyond it, if there are such; the filter looks at it."""
        ...

    @property
    def needs(self) -> Needs:
        """How much of a step one call must be given."""
        ...

    @property
    def uses(self) -> frozenset[Extra]:
        """What the rows must carry beyond rewards."""
        ...

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether episodes of a task whose rewards are all equal teach it anything; if so, no filter drops the task."""
        ...

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows with the rewards that are compared; the filter looks at them."""
        ...

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages of the rows, which are whole groups, or the whole step if `needs` says so.

        `memory` is what the step before gave back (`Credit.memory`); only a `state` estimator looks at it.
        """
        ...


class EstimatorSettings(Estimator, Protocol):
    """An estimator that a config can choose: what it says of itself before there are rows."""

    follows_calls: ClassVar[bool]
    """Whether it goes from call to call, as if there were one way through the episode: not for trees of turns."""
    adds_up_calls: ClassVar[bool]
    """Whether it adds up what the calls after a call earned: what else does so would count it twice."""
    has_fixed_baseline: ClassVar[bool]
    """Whether what a return is compared with is the same, whatever was sampled from the call on. Then a term that is
    known before the call, such as a potential, changes no expected gradient."""

    @property
    def needs_branches(self) -> bool:
        """Whether it compares the candidates of a turn: for trees of turns alone."""
        ...


def in_order(rows: Sequence[CreditRow]) -> list[CreditRow]:
    """The rows by (task, episode, hop), checked: sums taken in this order are bit-equal in every run."""
    seen = set[SampleId]()
    for row in rows:
        if row.sample_id in seen:
            raise CreditError(f"sample {row.sample_id} of agent {row.agent} was given twice; credit counts a turn once")
        seen.add(row.sample_id)
        if row.num_tokens and row.reward is None:
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has no reward; the workflow must call "
                f"`seat.reward(x)` for the agent or `reply.reward(x)` for the turn before it returns"
            )
        for name, value in (("reward", row.reward), ("outcome", row.outcome)):
            if row.num_tokens and value is not None and not math.isfinite(value):
                raise CreditError(f"sample {row.sample_id} of agent {row.agent} has {name} {value}; it must be finite")
    return sorted(rows, key=lambda row: (row.task, row.episode, row.hop, row.sample_id))
