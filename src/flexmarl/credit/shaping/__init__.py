"""One file per term of the reward; the settings class is the term.

In: rewards as the workflow gave them. Out: the same rows with final rewards, and each term's share as a named part.
"""

import pkgutil
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from flexmarl.credit.shaping.base import AddedTerm, OutcomeTerm, Sees
from flexmarl.credit.shaping.shape import check_terms, shape

SHAPING: Mapping[str, str] = {
    "none": "flexmarl.credit.shaping.none:Unshaped",
    "hop_weighted": "flexmarl.credit.shaping.hop_weighted:HopWeighted",
    "hop_discount": "flexmarl.credit.shaping.hop_discount:HopDiscount",
    "turn_weighted": "flexmarl.credit.shaping.turn_weighted:TurnWeighted",
    "turn_discount": "flexmarl.credit.shaping.turn_discount:TurnDiscount",
    "binary": "flexmarl.credit.shaping.binary:Binary",
    "normalized": "flexmarl.credit.shaping.normalized:Normalized",
    "shaped": "flexmarl.credit.shaping.shaped:Shaped",
    "margin": "flexmarl.credit.shaping.margin:Margin",
    "quality": "flexmarl.credit.shaping.quality:Quality",
    "margin_with_outcome": "flexmarl.credit.shaping.margin_with_outcome:MarginWithOutcome",
    "quality_with_outcome": "flexmarl.credit.shaping.quality_with_outcome:QualityWithOutcome",
    "tree": "flexmarl.credit.shaping.tree:Tree",
    "learnability": "flexmarl.credit.shaping.learnability:Learnability",
    "overlong": "flexmarl.credit.shaping.overlong:Overlong",
    "potential": "flexmarl.credit.shaping.potential:Potential",
    "process": "flexmarl.credit.shaping.process:Process",
    "completion_time": "flexmarl.credit.shaping.completion_time:CompletionTime",
    "reward_to_go": "flexmarl.credit.shaping.reward_to_go:RewardToGo",
}
"""Where the class of each term `type` is; a new one is one file and its line here."""

if TYPE_CHECKING:
    AnyTerm = OutcomeTerm | AddedTerm
    Terms = tuple[AnyTerm, ...]
else:
    AnyTerm = Annotated[
        reduce(or_, (pkgutil.resolve_name(path) for path in SHAPING.values())), Field(discriminator="type")
    ]
    Terms = Annotated[tuple[AnyTerm, ...], AfterValidator(check_terms)]
"""Settings field of a term, chosen by its `type`; and of several that go together."""

__all__ = ["SHAPING", "AddedTerm", "AnyTerm", "OutcomeTerm", "Sees", "Terms", "check_terms", "shape"]
