"""Terms of the reward; the settings class of a term is the term.

In: rewards as the workflow gave them. Out: the same rows with final rewards, and each term's share as a named part.
"""

from typing import Annotated

from pydantic import AfterValidator

from flexmarl.credit.shaping.base import AddedTerm, OutcomeTerm, RowOutcome, Sees
from flexmarl.credit.shaping.shape import check_terms, shape
from flexmarl.plugins import SettingsTable

BUILT_IN = {
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
    "otc": "flexmarl.credit.shaping.bonuses:Otc",
    "potential": "flexmarl.credit.shaping.outcomes:Potential",
    "process": "flexmarl.credit.shaping.bonuses:Process",
    "completion_time": "flexmarl.credit.shaping.bonuses:CompletionTime",
    "reward_to_go": "flexmarl.credit.shaping.outcomes:RewardToGo",
}
SHAPING: SettingsTable[OutcomeTerm | AddedTerm] = SettingsTable(
    "term", setting="credit.shaping.type", group="terms", interface=[OutcomeTerm, AddedTerm], built_in=BUILT_IN
)
"""Terms by `type`."""
term = SHAPING.register
"""Decorator that makes a settings class the term of its `type`: `@term`."""

AnyTerm = Annotated[OutcomeTerm | AddedTerm, SHAPING]
"""Settings field of one term, chosen by its `type`."""
Terms = Annotated[tuple[AnyTerm, ...], AfterValidator(check_terms)]
"""Settings field of several terms that go together."""

__all__ = ["SHAPING", "AddedTerm", "AnyTerm", "OutcomeTerm", "RowOutcome", "Sees", "Terms", "check_terms", "shape"]
__all__ += ["term"]
