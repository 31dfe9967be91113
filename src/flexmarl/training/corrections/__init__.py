"""Off-policy corrections. In: who sampled a token, and how likely it is now. Out: what it is compared with and weighs.

A settings class is the correction. To add one, write its file and add its class to `CorrectionSettings`.
"""

from typing import Annotated

from pydantic import Field

from flexmarl.training.corrections.base import Correction
from flexmarl.training.corrections.icepop import IcePop
from flexmarl.training.corrections.mis import MultiLevelImportanceSampling
from flexmarl.training.corrections.none import NoCorrection
from flexmarl.training.corrections.tis import TruncatedImportanceSampling

CorrectionSettings = Annotated[
    NoCorrection | TruncatedImportanceSampling | IcePop | MultiLevelImportanceSampling, Field(discriminator="type")
]

__all__ = [
    "Correction",
    "CorrectionSettings",
    "IcePop",
    "MultiLevelImportanceSampling",
    "NoCorrection",
    "TruncatedImportanceSampling",
]
