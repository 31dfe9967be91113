"""What flows between the stages, frozen. In: nothing. Out: the nouns that every other folder speaks in."""

from flexmarl.records.batch import CreditedTurn, CreditLine, Divisors, LossReport, MicroBatch, Sample
from flexmarl.records.episode import LARGEST_REWARD, Episode, EpisodeStatus, GroupRecord
from flexmarl.records.generation import EngineUse, Generation, GenerationRequest, Sampling, unserved
from flexmarl.records.ids import (
    AgentName,
    EpisodeId,
    GroupId,
    PolicyName,
    SampleId,
    Scalar,
    Version,
    make_sample_id,
    make_trajectory_id,
    split_sample_id,
    split_trajectory_id,
)
from flexmarl.records.lifecycle import GROUP_MOVES, GROUP_TERMINAL, ROW_MOVES, ROW_TERMINAL, GroupState, RowState
from flexmarl.records.task import Task, exact_match
from flexmarl.records.turn import AnyTurn, FinishReason, FloatArray, IntArray, PlayedTurn, Turn, VersionRun
from flexmarl.records.worker import WorkerLost

__all__ = [
    "AgentName",
    "AnyTurn",
    "CreditLine",
    "CreditedTurn",
    "Divisors",
    "EngineUse",
    "Episode",
    "EpisodeId",
    "EpisodeStatus",
    "FinishReason",
    "FloatArray",
    "GROUP_MOVES",
    "GROUP_TERMINAL",
    "Generation",
    "GenerationRequest",
    "GroupId",
    "GroupRecord",
    "GroupState",
    "IntArray",
    "LARGEST_REWARD",
    "LossReport",
    "MicroBatch",
    "PlayedTurn",
    "PolicyName",
    "ROW_MOVES",
    "ROW_TERMINAL",
    "RowState",
    "Sample",
    "SampleId",
    "Sampling",
    "Scalar",
    "Task",
    "Turn",
    "Version",
    "VersionRun",
    "WorkerLost",
    "exact_match",
    "make_sample_id",
    "make_trajectory_id",
    "split_sample_id",
    "split_trajectory_id",
    "unserved",
]
