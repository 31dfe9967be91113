"""Decides outcomes in a tree of turns: how a candidate compares with what it came from and with its siblings."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, given
from flexmarl.records import SampleId

Node = tuple[str, str]
"""Episode, and path from its root, e.g. `0.3.1`."""


class Tree(OutcomeTerm):
    """r_v + g (r_v - base), base = (1 - l) r_parent + l (mean of the siblings), as in MARS2.

    Where there is only a parent, or only siblings, they are the base; where there is neither, r_v stays.
    """

    type: Literal["tree"] = "tree"
    gain: float = Field(default=0.3, ge=0)
    """g."""
    siblings: float = Field(default=0.5, ge=0, le=1)
    """l."""

    sees: ClassVar[Sees] = "episode"
    needs_branches: ClassVar[bool] = True

    @property
    def may_be_negative(self) -> bool:
        """Where a candidate is worse than what it is compared with."""
        return self.gain > 0

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """By the tag `path`, which tree sampling gives; a candidate's outcome is the mean over its calls."""
        calls: dict[Node, list[float]] = {}
        for row in rows:
            calls.setdefault(_node(row), []).append(given(row))
        nodes = {node: sum(outcomes) / len(outcomes) for node, outcomes in calls.items()}
        families: dict[Node, list[Node]] = {}
        for node in nodes:
            families.setdefault(_parent(node), []).append(node)
        bases = {node: self._base(node, nodes, families[_parent(node)]) for node in nodes}
        shaped: dict[SampleId, float] = {}
        for row in rows:
            base = bases[_node(row)]
            shaped[row.sample_id] = given(row) if base is None else given(row) + self.gain * (given(row) - base)
        return shaped

    def _base(self, node: Node, nodes: Mapping[Node, float], family: Sequence[Node]) -> float | None:
        parent = nodes.get(_parent(node))
        others = [nodes[other] for other in family if other != node]
        beside = sum(others) / len(others) if others else None
        if parent is None or beside is None:
            return parent if beside is None else beside
        return (1 - self.siblings) * parent + self.siblings * beside


def _node(row: CreditRow) -> Node:
    return row.episode, str(row.tag("path"))


def _parent(node: Node) -> Node:
    """`0.3.1` -> `0.3`; a first candidate's is the root, which nobody played."""
    episode, path = node
    return episode, path.rpartition(".")[0]
