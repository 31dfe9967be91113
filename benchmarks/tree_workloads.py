"""Rows of the workloads that prefix trees are measured on, and what the least work for them is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexmarl.records import AgentName, EpisodeId, FinishReason, IntArray, PolicyName, Sample, Turn, Version, VersionRun
from flexmarl.records.ids import make_sample_id
from flexmarl.training.tree.merge import merge

VOCABULARY = 512
Row = tuple[IntArray, IntArray]
"""A call: prompt, response."""


@dataclass(frozen=True)
class Workload:
    """Rows of one micro-batch, and in words what they are."""

    name: str
    means: str
    rows: list[Row]


def workloads(scale: float) -> list[Workload]:
    """All of them; lengths are those of the descriptions times `scale`."""
    made = _Maker(scale)
    steps = [
        Workload(f"steps{n}", f"one agent, {n} turns: prompt 2000, then 200 sampled and 300 observed", made.steps(n))
        for n in (10, 20, 40, 80)
    ]
    return [
        *steps,
        Workload("rollouts", "the same for 8 rollouts of 20 turns", made.rollouts(8, 20)),
        Workload("bushy", "turn-wise sampling: prompt 2000, 5 turns, 4 candidates", made.candidates(5, 4)),
        Workload("forgetful", "80 turns whose 200 sampled tokens are left out of later prompts", made.forgetful(80)),
        Workload("group", "one turn: prompt 4000, 8 responses of 1000", made.group(8, 4000, 1000)),
        Workload("group16", "the same, 16 responses", made.group(16, 4000, 1000)),
        Workload("wide", "one turn: prompt 1000, 64 responses of 200 to 1800", made.ragged(64, 1000, 200, 1800)),
        Workload("short", "one turn: prompt 200, 128 responses of 20 to 400", made.ragged(128, 200, 20, 400)),
        Workload("alone", "32 prompts of 1000 to 3000 that share nothing", made.alone(32)),
    ]


def as_samples(rows: Sequence[Row], seed: int = 0) -> list[Sample]:
    """Rows with random advantages, sampled by an older version: ratios and clips act."""
    random = np.random.default_rng(seed)
    samples = []
    for hop, (prompt, response) in enumerate(rows):
        logprobs = (-6 - 0.3 * random.random(len(response))).astype(np.float32)
        turn = Turn(
            sample_id=make_sample_id("task", hop, "g0e0a0"),
            episode=EpisodeId("g0e0a0"),
            agent=AgentName("solver"),
            policy=PolicyName("solver"),
            prompt_ids=prompt,
            response_ids=response,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.STOP,
        )
        samples.append(Sample(turn=turn, advantage=float(random.normal())))
    return samples


@dataclass(frozen=True)
class Work:
    """Tokens and causal pairs, the last token of a row aside, which predicts nothing."""

    tokens: int
    pairs: int

    def operations(self, *, linear_parameters: int, num_layers: int, attention_width: int) -> float:
        """Of a forward pass without the head, which is the same for all."""
        return 2.0 * linear_parameters * self.tokens + 4.0 * num_layers * attention_width * self.pairs


def work_of_rows(rows: Sequence[Row]) -> Work:
    """Each row by itself, without padding."""
    lengths = [len(prompt) + len(response) - 1 for prompt, response in rows]
    return Work(sum(lengths), sum(n * (n + 1) // 2 for n in lengths))


def work_of_tree(rows: Sequence[Row]) -> Work:
    """Each distinct (prefix, token) once."""
    tree = merge([np.concatenate(row)[:-1] for row in rows], [len(response) for _, response in rows])
    return Work(tree.num_tokens, int(tree.depths.sum()) + tree.num_tokens)


class _Maker:
    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._random = np.random.default_rng(0)

    def steps(self, turns: int) -> list[Row]:
        return self._continued(self._tokens(2000), turns)

    def rollouts(self, count: int, turns: int) -> list[Row]:
        prompt = self._tokens(2000)
        return [row for _ in range(count) for row in self._continued(prompt, turns)]

    def candidates(self, turns: int, width: int) -> list[Row]:
        context, rows = self._tokens(2000), []
        for _ in range(turns):
            rows += [(context, self._tokens(200)) for _ in range(width)]
            context = np.concatenate((*rows[-1], self._tokens(300)))
        return rows

    def forgetful(self, turns: int) -> list[Row]:
        context, rows = self._tokens(2000), []
        for _ in range(turns):
            rows.append((context, self._tokens(200)))
            context = np.concatenate((context, self._tokens(300)))
        return rows

    def group(self, count: int, prompt: int, response: int) -> list[Row]:
        shared = self._tokens(prompt)
        return [(shared, self._tokens(response)) for _ in range(count)]

    def ragged(self, count: int, prompt: int, least: int, most: int) -> list[Row]:
        shared = self._tokens(prompt)
        return [(shared, self._tokens(int(self._random.integers(least, most)))) for _ in range(count)]

    def alone(self, count: int) -> list[Row]:
        lengths = self._random.integers(1000, 3000, count).tolist()
        return [(self._tokens(length), self._tokens(500)) for length in lengths]

    def _continued(self, context: IntArray, turns: int) -> list[Row]:
        rows = []
        for _ in range(turns):
            rows.append((context, self._tokens(200)))
            context = np.concatenate((*rows[-1], self._tokens(300)))
        return rows

    def _tokens(self, length: int) -> IntArray:
        return self._random.integers(0, VOCABULARY, max(1, round(length * self._scale))).astype(np.int32)


def stitched(rows: Sequence[Row]) -> tuple[list[IntArray], list[np.ndarray]]:
    """Calls that continue one another as one row each: token ids, and which of them are trained."""
    whole = [np.concatenate(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: whole[i].astype(">u4").tobytes(), reverse=True)
    ids: list[IntArray] = []
    trained: list[np.ndarray] = []
    for i in order:
        length = len(whole[i])
        if not ids or len(ids[-1]) < length or (ids[-1][:length] != whole[i]).any():
            ids.append(whole[i])
            trained.append(np.zeros(length, dtype=np.bool_))
        trained[-1][len(rows[i][0]) : length] = True
    return ids, trained
