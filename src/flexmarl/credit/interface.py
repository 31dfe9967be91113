"""Interface of estimators: the rows that they take, and the credit that they give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

from flexmarl.errors import CreditError
from flexmarl.records import AgentName, EpisodeId, PolicyName, SampleId, Scalar

Needs = Literal["row", "group", "batch", "state"]
"""Rows that an estimator must see at once. `row` and `group` can stream, `batch` waits for the whole step, `state` also
needs a fixed order from step to step."""

Extra = Literal["greedy", "values"]
"""Data that rows must carry besides rewards: one play at temperature 0 per group, or a critic's values."""

Tokens = tuple[float, ...]
"""One number per sampled token of a row."""

GroupKey = tuple[str, ...] | Mapping[str, tuple[str, ...]]
"""Names of columns and tags (see `CreditRow.tag`). Or such names per agent, where `*` is every other:
{"proposer": ("episode", "agent"), "*": ("task", "agent")}."""


COLUMNS = (
    *("task", "group", "episode", "agent", "policy", "policy_version", "hop", "call", "act", "turn", "branch", "path"),
    *("context_hash", "valid", "greedy"),
)
"""Columns of a CreditRow that a key may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCall:
    """A call in the graph of its episode: the calls that it waited for, and its cost."""

    hop: int
    after: tuple[int, ...] = ()
    """Hops of the calls that it directly depends on; all are smaller than `hop`."""
    new_prompt_tokens: int = 0
    """Prompt tokens beyond those of the turn that it extends."""
    num_tokens: int = 0
    """Sampled tokens."""
    tool_s: float = 0.0
    """Seconds taken by the tool whose result is new in its prompt."""


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
    """The final reward. None means that none was given, which is an error once the row is credited."""
    num_tokens: int
    """Sampled tokens. A row without any has weight 0 and is in no statistic."""
    outcome: float | None = None
    """The reward before penalties, time and process terms; None if there are none, since it then equals `reward`."""
    act_reward: float = 0.0
    """Reward that `reply.reward` gave the act. All calls of the act carry it, and sums over calls count it once."""
    act_outcome: float | None = None
    """The part of `act_reward` that is task outcome, before terms; None if no part is."""
    call_reward: float = 0.0
    """Reward that terms, penalties and a divergence gave this call alone. What remains of `reward` without it and
    without `act_reward` was given to its agent or to the team."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts that add up to the reward, if it has several: `outcome`, the workflow's other parts, and terms."""
    objectives: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward that the workflow asked for: the outcome, as reshaped by a term, and its other parts."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Parts of the reward that settings added or took; their size matters. The reward is `objectives` and `prices`."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Findings in the call, each in [0, 1]: `tool_error`, `format_error` ..."""
    token_rewards: Tokens | None = None
    """Reward of each token, if it is not all on the last one. They add up to `reward`."""
    values: Tokens | None = None
    """The critic's value at each token, if there is a critic."""
    valid: bool = True
    """True if the reply could be parsed and its tool call run."""
    trains: bool = True
    """False if the call ended in a way that is not trained on. Its weight is then 0."""
    greedy: bool = False
    """True for a row of a play at temperature 0, which serves as a baseline and is never trained."""
    calls: tuple[GraphCall, ...] = ()
    """All calls of its episode in hop order, including those of frozen policies."""
    group: int = 0
    """Its `GroupId`."""
    call: int = 0
    """Number of the call among its agent's calls in the episode."""
    act_hop: int | None = None
    """The hop of the first call of its act; None: it is an act by itself."""
    turn: int = 0
    """Number of its act in the episode, unless the workflow gave another; in a tree of turns, its depth."""
    branch: str = ""
    """The conversation that it belongs to; in a tree of turns, the path that it was sampled from."""
    path: tuple[int, ...] = ()
    """Index of the candidate at each turn, from the root of a tree of turns to its own; empty outside trees."""
    context_hash: str = ""
    """Equal for calls of one policy with equal prompts."""
    policy_version: int = 0
    """Version that sampled its first token."""
    tags: Mapping[str, Scalar] = field(default_factory=dict)
    """The workflow's own tags."""

    @property
    def act(self) -> Scalar:
        """Name of its act in its episode: the hop of the act's first call, or its own sample id."""
        return self.sample_id if self.act_hop is None else self.act_hop

    @property
    def node(self) -> tuple[int, ...]:
        """Its path in a tree of turns. Raises CreditError if it was not sampled in one."""
        if not self.path:
            raise CreditError(
                f"sample {self.sample_id} of agent {self.agent} has no path, because no tree of turns was sampled; use "
                f"team.workflow.type=turns with candidates above 1"
            )
        return self.path

    @property
    def shared_reward(self) -> float:
        """The part of the reward that was given to its agent or to the team."""
        return (self.reward or 0.0) - self.act_reward - self.call_reward

    def pays(self, name: str, price: float) -> "CreditRow":
        """The row with `price` taken from its reward and logged as part `name`. Its outcome stays as it was before."""
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
        """Value of a column or of a tag of the workflow, by which rows may be grouped.

        A name in COLUMNS is a column; `tags.turn` is the workflow's own tag `turn`. Raises CreditError for an unknown
        name, and for `path` outside trees of turns.
        """
        if name in COLUMNS:
            return ".".join(map(str, self.node)) if name == "path" else getattr(self, name)
        name = name.removeprefix("tags.")
        if name not in self.tags:
            known = ", ".join(sorted({*COLUMNS, *self.tags}))
            raise CreditError(
                f"unknown tag '{name}': sample {self.sample_id} of agent {self.agent} carries {known}; a workflow "
                f"gives its own with `seat.act(text, {name}=...)`"
            )
        return self.tags[name]

    def number(self, name: str) -> int | float:
        """Value of a tag that must be a number. Raises CreditError if it is text."""
        value = self.tag(name)
        if isinstance(value, str):
            raise CreditError(
                f"the tag '{name}' of sample {self.sample_id} of agent {self.agent} must be a number, got {value!r}; a "
                f"workflow gives it with `seat.act(text, {name}=...)`"
            )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """Statistics of an agent's groups. A group of several agents is counted for each of them."""

    groups: int = 0
    effective: int = 0
    """Groups whose rewards differ. Only they teach anything."""
    too_easy: int = 0
    """Groups with all rewards at the top."""
    too_hard: int = 0
    """Groups with all rewards at the bottom."""
    flat: int = 0
    """Groups with all rewards equal, in between."""
    penalty_alone: int = 0
    """Effective groups in which only penalties differ, not outcomes."""
    group_sizes: tuple[int, ...] = ()
    """Number of observations of each group."""
    dropped_singleton: int = 0
    """Rows with weight 0 because there was nothing to compare them with."""
    empty: int = 0
    """Rows with weight 0 because nothing was sampled."""
    untrained: int = 0
    """Rows with weight 0 because of how their calls ended."""
    notes: tuple[str, ...] = ()
    """Messages about steps that could not be done, and why."""

    @property
    def counts(self) -> Mapping[str, int]:
        """All counters, by name."""
        return {name: int(getattr(self, name)) for name in self.__slots__ if name not in ("group_sizes", "notes")}

    @property
    def figures(self) -> Mapping[str, Any]:
        """Its fields, by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    def __add__(self, other: "AgentReport") -> "AgentReport":
        """The sum of both reports."""
        return AgentReport(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Result of an estimator, with an entry for every row that it was given."""

    advantages: Mapping[SampleId, float]
    """Advantage of each row, the same for all its sampled tokens."""
    weights: Mapping[SampleId, float]
    """Row weight w_i of docs/math.md section 1: 1, or 0 for rows that are left out of sums and divisors."""
    report: Mapping[AgentName, AgentReport]
    token_advantages: Mapping[SampleId, Tokens] = field(default_factory=dict)
    """Advantage of each token, for rows whose tokens differ. `advantages` then holds their mean, for display."""
    returns: Mapping[SampleId, Tokens] = field(default_factory=dict)
    """Value that the critic should have expected at each token: its training target."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Memory of a `state` estimator, by agent. Its next call must be given it."""


class Estimator(Protocol):
    """Computes advantages from rewards. Pure: the result depends on rows and memory alone, not on the order of rows.

    Raises CreditError for a missing or non-finite reward, an unknown tag, a sample given twice, or a group that breaks
    a requirement.
    """

    @property
    def key(self) -> GroupKey:
        """Tags that rows are grouped by, as they were set."""
        ...

    @property
    def grouping(self) -> GroupKey:
        """The key, plus further tags that separate groups if there are any. The filter uses it."""
        ...

    @property
    def needs(self) -> Needs:
        """Part of a step that one call must be given."""
        ...

    @property
    def uses(self) -> frozenset[Extra]:
        """Data that the rows must carry besides rewards."""
        ...

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True if it can learn from a task whose rewards are all equal. No filter drops such a task then."""
        ...

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """The rows with the rewards that are compared. The filter uses them."""
        ...

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Credit of the rows, which are whole groups, or the whole step if `needs` says so.

        `memory` is `Credit.memory` of the step before. Only a `state` estimator reads it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterCalls:
    """How an estimator or a term adds the rewards of later calls to those of a call."""

    scope: Literal["descendants", "agent", "team"]
    """The calls whose rewards count: those that depend on the call, the agent's later ones, or all later ones."""
    gamma: float
    """Discount from one call, or step of the environment, to the next."""
    lam: float = 1.0
    """Below 1, a critic's value stands for a part of what follows; 1: nothing but rewards is added up."""


class EstimatorSettings(Estimator, Protocol):
    """An estimator that a config can choose, with the properties that are known before there are rows."""

    follows_calls: ClassVar[bool]
    """True if it follows calls one by one, as if an episode were a single path. It cannot handle trees of turns."""
    has_fixed_baseline: ClassVar[bool]
    """True if the baseline of a return does not depend on what is sampled from the call on. A term that is known before
    the call, such as a potential, then changes no expected gradient."""

    compares_parts: ClassVar[bool]
    """True if it compares the parts of a reward one by one, and not their sum."""

    @property
    def later_calls(self) -> LaterCalls | None:
        """How it adds up the rewards of later calls; None if it does not. A term would count them a second time."""
        ...

    @property
    def type(self) -> str:
        """The estimator's name in configs."""
        ...

    @property
    def needs_branches(self) -> bool:
        """True if it compares the candidates of a turn. It can handle only trees of turns."""
        ...

    @property
    def lone_rows(self) -> str | None:
        """The setting by which a row alone in its group teaches nothing; None if such a row teaches."""
        ...


def in_order(rows: Sequence[CreditRow]) -> list[CreditRow]:
    """The rows sorted by (task, episode, hop): sums in this order are bit-equal in every run.

    Raises CreditError for a sample given twice, a missing reward, or a number that is not finite.
    """
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
