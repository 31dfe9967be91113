"""What an engine and a trainer of this machine take: the numbers of a cost profile, fitted to runs of their parts.

    python benchmarks/device_costs.py

The model is the seed model of examples/math_team unless `--model` names another. Seconds are CPU time of one thread,
and the quickest of `--repeats` runs, so that a noisy neighbour does not count. What is timed:

    decode    8 steps of the engine's core with 1 to 128 requests that hold 8 to 96 tokens each
    prefill   the step in which 1 to 64 prompts of 16 to 96 tokens join, less the decode step in it
    call      a request for one token through the engine's async interface, less prefill and decode step
    train     micro-batches of 16 to 128 samples of 16 to 96 tokens
    others    one load, update and publication each; resume and suspend: the trainer's state from and to a file
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import parser, report

from flexmarl.analysis.costs import EngineCosts, TrainerCosts
from flexmarl.analysis.fit_engines import nonnegative
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.inference.backends.embedded.engine import EmbeddedEngine
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import weights_key
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    GenerationRequest,
    MicroBatch,
    PolicyName,
    Sample,
    SampleId,
    Sampling,
    Turn,
    Version,
    VersionRun,
)
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

SEED_MODEL = Path(__file__).parents[1] / "examples" / "math_team" / "seed_model"
POLICY = PolicyName("solver")
SETTINGS = EmbeddedSettings(slots=128, max_len=128, prefill_tokens=1 << 16)
STEPS = 8


def requests(number: int, prompt: int, tokens: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{i}",
            policy=POLICY,
            prompt_ids=np.arange(3, 3 + prompt, dtype=np.int32) % 100,
            sampling=Sampling(max_tokens=tokens),
            seed=i,
        )
        for i in range(number)
    ]


def timed(work: Callable[[], object]) -> float:
    """CPU seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began


async def timed_wait(work: Coroutine[Any, Any, object]) -> float:
    began = time.process_time()
    await work
    return time.process_time() - began


def fitted(columns: list[list[float]], seconds: list[float]) -> list[float]:
    """Least squares of relative errors."""
    measured = np.asarray(seconds)
    return nonnegative(np.asarray(columns) / measured[:, None], np.ones(len(measured))).tolist()


class Measured:
    """The parts on this machine."""

    def __init__(self, model: Path, repeats: int) -> None:
        self.model, self.repeats = model, repeats
        self.core = EngineCore(load_model(model), SETTINGS)

    def steps(self, number: int, prompt: int) -> tuple[float, float]:
        """Seconds of the step in which the prompts join, and of one of those after it."""
        for request in requests(number, prompt, STEPS + 2):
            self.core.add(request)
        join = timed(self.core.step)
        decode = timed(lambda: [self.core.step() for _ in range(STEPS)]) / STEPS
        self.core.abort()
        return join, decode

    def engine(self) -> EngineCosts:
        shapes = list(itertools.product((1, 2, 4, 8, 16, 32, 64, 128), (8, 32, 96)))
        runs = [[self.steps(*shape) for _ in range(self.repeats)] for shape in shapes]
        decode = [min(step for _, step in run) for run in runs]
        columns = [[1.0, number, number * (prompt + STEPS / 2)] for number, prompt in shapes]
        decode_s, decode_request_s, decode_kv_s = fitted(columns, decode)
        joins = [
            (number * prompt, max(1e-9, min(join for join, _ in run) - step))
            for (number, prompt), run, step in zip(shapes, runs, decode, strict=True)
            if number <= 64 and prompt >= 16
        ]
        (prefill_token_s,) = fitted([[tokens] for tokens, _ in joins], [seconds for _, seconds in joins])
        alone = min(join for join, _ in runs[0])
        call_s, load_s = asyncio.run(self.calls(shapes[0][1]))
        return EngineCosts(
            slots=SETTINGS.slots,
            decode_s=decode_s,
            decode_request_s=decode_request_s,
            decode_kv_s=decode_kv_s,
            prefill_token_s=prefill_token_s,
            call_s=max(0.0, call_s - alone),
            load_s=load_s,
            move_s=load_s,
        )

    async def calls(self, prompt: int) -> tuple[float, float]:
        """Seconds of a call for one token, and of a load."""
        thread, objects = DeviceThread("costs"), InlineObjectStore()
        engine = EmbeddedEngine(lambda: load_model(self.model), SETTINGS, policy=POLICY, store=objects, thread=thread)
        tree = dict(load_model(self.model).named_parameters())
        await objects.set(weights_key(POLICY, Version(1)), tree)

        async def call() -> None:
            _ = [answer async for answer in engine.generate(requests(1, prompt, 1))]

        took = [await timed_wait(call()) for _ in range(20 * self.repeats)]
        loads = [await timed_wait(engine.load_weights(POLICY, Version(1))) for _ in range(self.repeats)]
        await engine.close()
        thread.close()
        return min(took), min(loads)

    async def trainer(self) -> TrainerCosts:
        objects, settings = InlineObjectStore(), TrainingSettings()
        trainer = SingleProcessTrainer(POLICY, load_model(self.model), settings, objects)
        shapes = list(itertools.product((16, 32, 64, 128), (16, 48, 96)))
        number, best = itertools.count(), dict[tuple[int, int], float]()
        for shape in [*shapes[:1], *(shapes * self.repeats)]:
            took = await timed_wait(trainer.accumulate_batch(batch(next(number), *shape)))
            best[shape] = min(took, best.get(shape, took))
        columns = [[1.0, samples, samples * tokens] for samples, tokens in shapes]
        micro_batch_s, sample_s, token_s = fitted(columns, [best[shape] for shape in shapes])
        updates, publications, saves, loads = [], [], [], []
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(self.repeats):
                work = batch(next(number), 64, 48)
                await trainer.accumulate_batch(work)
                saves.append(await timed_wait(trainer.save(Path(folder, str(repeat)))))
                loads.append(await timed_wait(trainer.load(Path(folder, str(repeat)))))
                updates.append(await timed_wait(trainer.step(divisors_of(work.samples))))
                publications.append(await timed_wait(trainer.publish(trainer.version)))
        return TrainerCosts(
            micro_batch_s=micro_batch_s,
            sample_s=sample_s,
            token_s=token_s,
            update_s=min(updates),
            publish_s=min(publications),
            resume_s=min(loads),
            suspend_s=min(saves),
        )


def batch(number: int, samples: int, tokens: int) -> MicroBatch:
    """Samples of which three quarters are prompt."""
    response = tokens // 4
    rng = np.random.default_rng(number)

    def turn(i: int) -> Turn:
        ids = rng.integers(3, 100, tokens).astype(np.int32)
        logprobs = np.full(response, -2.0, np.float32)
        return Turn(
            sample_id=SampleId(f"t_{i}_g{number}e{i}a0"),
            episode=EpisodeId(f"g{number}e{i}a0"),
            agent=AgentName("solver"),
            policy=POLICY,
            prompt_ids=ids[:-response],
            response_ids=ids[-response:],
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.STOP,
        )

    rows = tuple(Sample(turn=turn(i), advantage=1.0 - 2.0 * (i % 2)) for i in range(samples))
    return MicroBatch(micro_batch_id=f"m{number}", policy=POLICY, samples=rows)


def options() -> argparse.Namespace:
    asked = parser(__doc__)
    asked.set_defaults(threads=1)
    asked.add_argument("--model", type=Path, default=SEED_MODEL, help="a Hugging Face folder")
    return asked.parse_args()


def main() -> None:
    arguments = options()
    torch.set_num_threads(arguments.threads)
    measured = Measured(arguments.model, arguments.repeats)
    parts = {"engine": measured.engine(), "trainer": asyncio.run(measured.trainer())}
    costs = {
        f"{part}.{name}": value
        for part, found in parts.items()
        for name, value in found.model_dump(exclude_unset=True).items()
    }
    rows = [(name, f"{value:.3g}") for name, value in costs.items()]
    figures = {
        "decode_step_us": costs["engine.decode_s"] * 1e6,
        "prefill_token_us": costs["engine.prefill_token_s"] * 1e6,
        "train_token_us": costs["trainer.token_s"] * 1e6,
    }
    report(f"costs of {arguments.model.name}, seconds", ("cost", "value"), rows, figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
