"""Rewards to advantages. In: the rewarded turns of finished episodes. Out: an advantage and a weight per sample."""

from flexmarl.credit.estimators import ESTIMATORS, AnyEstimator, estimator
from flexmarl.credit.filters import FilterDecision, OutcomeFilter
from flexmarl.credit.interface import AgentReport, Credit, CreditRow, Estimator, Needs
from flexmarl.credit.rows import credit_rows
from flexmarl.credit.settings import CreditSettings
from flexmarl.credit.shaping import term

__all__ = ["AgentReport", "AnyEstimator", "Credit", "CreditRow", "CreditSettings", "ESTIMATORS", "Estimator"]
__all__ += ["FilterDecision", "Needs", "OutcomeFilter", "credit_rows", "estimator", "term"]
