"""Micro-batches of several adapters on one base: in passes that they share, against passes one after another.

    python benchmarks/joint_passes.py --json

k policies with an adapter of rank 8 on one base in this process, each with one micro-batch of rows: 16 trained tokens
after a prompt of 48. Trainers, rows and threads are the same either way. `joint_{k}x{rows}_{model}`: trained tokens per
CPU second in shared passes, by those in passes apart; above 1, shared passes are faster. The models have 0.8M
parameters, and the shape of SmolLM2-135M.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from common import config_of_135m, interleaved_rates, median_ratio, parser, report, tiny_model
from transformers import LlamaForCausalLM, PreTrainedModel

from flexmarl.assemble.residents import settle_memory
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import AgentName, EpisodeId, FinishReason, PolicyName, Sample, SampleId, Turn, Version, VersionRun
from flexmarl.training.backends.base_host import BaseHost
from flexmarl.training.backends.joint import JointPasses
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.backends.state import Base, Skeleton
from flexmarl.training.interface import HeldRows
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.together import RowsOf

PROMPT, REPLY, VOCABULARY = 48, 16, 100
"""Tokens of each prompt and each reply; ids are below the last."""
CASES = {
    "joint_2x4_1m": ("1m", 2, 4),
    "joint_2x16_1m": ("1m", 2, 16),
    "joint_4x4_1m": ("1m", 4, 4),
    "joint_4x16_1m": ("1m", 4, 16),
    "joint_2x4_135m": ("135m", 2, 4),
    "joint_4x4_135m": ("135m", 4, 4),
}
"""Model, number of policies, and rows of each, by the name of the figure."""


def model_of_135m() -> PreTrainedModel:
    """A model with the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config_of_135m())


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {"1m": lambda: tiny_model(VOCABULARY), "135m": model_of_135m}


def rows_for(policy: PolicyName, number: int, seed: int) -> list[Sample]:
    """Rows of one micro-batch, which share no prefix."""
    random = np.random.default_rng(seed)
    logprobs = np.full(REPLY, -4.0, dtype=np.float32)
    turns = [
        Turn(
            sample_id=SampleId(f"{policy}_{row}"),
            episode=EpisodeId(f"e{row}"),
            agent=AgentName(policy),
            policy=policy,
            prompt_ids=random.integers(1, VOCABULARY, PROMPT).astype(np.int32),
            response_ids=random.integers(1, VOCABULARY, REPLY).astype(np.int32),
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.STOP,
        )
        for row in range(number)
    ]
    return [Sample(turn=turn, advantage=float(random.normal()), episode_tokens=REPLY) for turn in turns]


class Case:
    """Trainers of some policies on one base, with a micro-batch each."""

    def __init__(self, source: Path, number: int, rows: int) -> None:
        settings = TrainingSettings.model_validate({"lora": {"rank": 8}, "publish": "adapter", "together": True})
        policies, self._held = [PolicyName(f"policy-{n}") for n in range(number)], HeldRows()
        base, objects = Base(source, settings.dtype, "cpu", Skeleton(source)), InlineObjectStore()
        trainers = {
            policy: SingleProcessTrainer(policy, base.model(), settings, objects, rows=self._held, seed=n)
            for n, policy in enumerate(policies)
        }
        passes = JointPasses(base.model(), settings, device="cpu", deterministic=False)
        self._host, self._calls = BaseHost(trainers, passes, self._held), 0
        self._ids: dict[PolicyName, tuple[SampleId, ...]] = {}
        for n, policy in enumerate(policies):
            samples = rows_for(policy, rows, n)
            self._held.hold(samples)
            self._ids[policy] = tuple(sample.turn.sample_id for sample in samples)

    def accumulate(self, *, joint: bool) -> float:
        """Accumulates every micro-batch once; returns trained tokens per CPU second."""
        self._calls += 1
        waiting = [
            RowsOf(policy=policy, micro_batch_id=f"{policy}/{self._calls}", ids=ids)
            for policy, ids in self._ids.items()
        ]
        began = time.process_time()
        asyncio.run(self._accumulate([waiting] if joint else [[one] for one in waiting]))
        return REPLY * sum(map(len, self._ids.values())) / (time.process_time() - began)

    async def _accumulate(self, calls: Sequence[Sequence[RowsOf]]) -> None:
        for call in calls:
            await self._host.accumulate(call)


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], help="models (default: both)")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    lines, figures = list[tuple[str, ...]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.models:
            MODELS[name]().save_pretrained(Path(folder) / name)
        settle_memory()
        for figure, (name, number, rows) in CASES.items():
            if name not in chosen.models:
                continue
            case = Case(Path(folder) / name, number, rows)
            ways = {
                way: lambda case=case, joint=joint: case.accumulate(joint=joint)
                for way, joint in (("apart", False), ("joint", True))
            }
            rates = interleaved_rates(ways, chosen.repeats * (4 if name == "1m" else 1))
            apart, joint = (statistics.median(rates[way]) for way in ("apart", "joint"))
            lines.append((name, str(number), str(rows), f"{apart:.0f}", f"{joint:.0f}"))
            figures[figure] = median_ratio(rates, "joint", "apart")
    columns = ("model", "policies", "rows of each", "tokens per CPU s apart", "in shared passes")
    report("Accumulating one micro-batch of each policy", columns, lines, figures, as_json=chosen.json)


if __name__ == "__main__":
    main()
