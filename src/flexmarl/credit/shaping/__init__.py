"""Terms of the reward; the settings class of a term is the term.

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
    "none": "flexmarl.credit.shaping.outcomes:Unshaped",
    "hop_weighted": "flexmarl.credit.shaping.outcomes:HopWeighted",
    "hop_discount": "flexmarl.credit.shaping.outcomes:HopDiscount",
    "turn_weighted": "flexmarl.credit.shaping.outcomes:TurnWeighted",
    "turn_discount": "flexmarl.credit.shaping.outcomes:TurnDiscount",
    "binary": "flexmarl.credit.shaping.outcomes:Binary",
    "normalized": "flexmarl.credit.shaping.outcomes:Normalized",
    "shaped": "flexmarl.credit.shaping.outcomes:Shaped",
    "margin": "flexmarl.credit.shaping.chains:Margin",
    "quality": "flexmarl.credit.shaping.chains:Quality",
    "margin_with_outcome": "flexmarl.credit.shaping.chains:MarginWithOutcome",
    "quality_with_outcome": "flexmarl.credit.shaping.chains:QualityWithOutcome",
    "tree": "flexmarl.credit.shaping.chains:Tree",
    "learnability": "flexmarl.credit.shaping.bonuses:Learnability",
    "overlong": "flexmarl.credit.shaping.bonuses:Overlong",
    "potential": "flexmarl.credit.shaping.outcomes:Potential",
    "process": "flexmarl.credit.shaping.bonuses:Process",
    "completion_time": "flexmarl.credit.shaping.bonuses:CompletionTime",
    "reward_to_go": "flexmarl.credit.shaping.outcomes:RewardToGo",
}
"""Path of the class of each term `type`. A new term is one class, and its line here."""

if TYPE_CHECKING:
    AnyTerm = OutcomeTerm | AddedTerm
    Terms = tuple[AnyTerm, ...]
else:
    AnyTerm = Annotated[
        reduce(or_, (pkgutil.resolve_name(path) for path in SHAPING.values())), Field(discriminator="type")
    ]
    Terms = Annotated[tuple[AnyTerm, ...], AfterValidator(check_terms)]
"""Settings field of one term, chosen by its `type` (AnyTerm), and of several terms that go together (Terms)."""

__all__ = ["SHAPING", "AddedTerm", "AnyTerm", "OutcomeTerm", "Sees", "Terms", "check_terms", "shape"]
