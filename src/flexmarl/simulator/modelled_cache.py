"""Decides what a modelled gradient cache holds: which micro-batches, which open credit groups, and what they add up to.

rows with an advantage ─────────────► their micro-batch's report, once for each id
rows of an open credit group ───────► two sums of the group ──► close: a report `line/{group}`, or nothing
                                                                check, take: the update's sums
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from flexmarl.errors import TrainingError
from flexmarl.records import CreditLine, Divisors, LossReport, MicroBatch, PolicyName, Version


class CachedSums(NamedTuple):
    """The sums that an update is made from."""

    gradient: float
    num_samples: int
    num_tokens: float
    """Sum of weight x tokens."""


class ModelledCache:
    """The gradient cache of one policy, where a row's gradient is its weight x advantage x number of tokens."""

    def __init__(self, policy: PolicyName) -> None:
        self._policy = policy
        self._reports: dict[str, LossReport] = {}
        self._open: dict[str, tuple[float, float, int]] = {}
        """For each open credit group: weighted tokens, weighted tokens x score, and number of samples."""

    def __len__(self) -> int:
        """Counts micro-batches and closed groups."""
        return len(self._reports)

    def report(self, micro_batch_id: str) -> LossReport | None:
        """Returns the report of a micro-batch, or None if the cache does not hold it."""
        return self._reports.get(micro_batch_id)

    def add(self, batch: MicroBatch, *, duration_s: float) -> LossReport:
        """Adds a micro-batch that the cache does not hold yet."""
        report = LossReport(
            micro_batch_id=batch.micro_batch_id,
            **batch.counts(),
            sums={"gradient": sum(s.weight * s.advantage * s.num_tokens for s in batch.samples if not s.open_group)},
            duration_s=duration_s,
        )
        self._reports[batch.micro_batch_id] = report
        for sample in batch.samples:
            if sample.open_group:
                tokens, scored, samples = self._open.get(sample.open_group, (0.0, 0.0, 0))
                more = sample.weight * sample.num_tokens
                self._open[sample.open_group] = (tokens + more, scored + more * sample.advantage, samples + 1)
        return report

    def close(self, lines: Mapping[str, CreditLine | None]) -> float:
        """Applies each line to its open group and adds the result, or drops the group if its line is None.

        Returns the weighted tokens added. If no tokens and no open group are left, all reports are forgotten.
        """
        closed = 0.0
        for name, line in lines.items():
            tokens, scored, samples = self._open.pop(name, (0.0, 0.0, 0))
            if line and samples:
                sums = {"gradient": line.scale * scored + line.offset * tokens}
                report = LossReport(micro_batch_id=f"line/{name}", num_samples=samples, num_tokens=tokens, sums=sums)
                self._reports[report.micro_batch_id] = report
                closed += tokens
        if not self._open and not any(report.num_tokens for report in self._reports.values()):
            self._reports = {}
        return closed

    def check(self, divisors: Divisors, version: Version) -> None:
        """Raises TrainingError if no update can be made: groups are open, or the divisors count other tokens."""
        if self._open:
            raise TrainingError(f"policy '{self._policy}': credit groups are open: {', '.join(self._open)}")
        num_tokens = sum(report.num_tokens for report in self._reports.values())
        if not self._reports or divisors.num_tokens <= 0 or abs(num_tokens - divisors.num_tokens) > 1e-9 * num_tokens:
            raise TrainingError(
                f"policy '{self._policy}' at version {version}: {num_tokens:g} weighted tokens are in the gradient "
                f"cache, nothing to update from with divisors that count {divisors.num_tokens:g}"
            )

    def take(self) -> CachedSums:
        """Returns the sums and empties the cache."""
        reports = self._reports.values()
        sums = CachedSums(
            gradient=sum(report.sums["gradient"] for report in reports),
            num_samples=sum(report.num_samples for report in reports),
            num_tokens=sum(report.num_tokens for report in reports),
        )
        self.clear()
        return sums

    def clear(self) -> None:
        """Empties the cache."""
        self._reports, self._open = {}, {}

    def state(self) -> dict[str, Any]:
        """Returns the content as a checkpoint stores it."""
        return {"reports": [asdict(report) for report in self._reports.values()], "open": self._open}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the content that `state` returned."""
        self._reports = {report["micro_batch_id"]: LossReport(**report) for report in state["reports"]}
        self._open = {name: (tokens, scored, samples) for name, (tokens, scored, samples) in state["open"].items()}
