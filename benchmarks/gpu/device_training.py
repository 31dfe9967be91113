"""Training steps on the device: tokens per second, their share of what products can do, and the peak of memory."""

import asyncio
import time
from typing import Any

import device_models
import numpy as np
import torch
from tree_training import timed, wait_for
from tree_workloads import as_samples

from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import MicroBatch
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

STEPS = 3


def measure(device: str, *, short: bool) -> dict[str, Any]:
    """By size of the model: a step of rows that share nothing, all weights trained, in bfloat16 on CUDA."""
    on_cuda = device.startswith("cuda")
    kinds = {"seed model": device_models.seed_model} if short else SHAPES
    rows, prompt, response = (2, 16, 16) if short else (16, 512, 1536)
    figures: dict[str, Any] = {}
    if on_cuda:
        size = 8192
        left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        figures["product_tflops"] = round(2 * size**3 / timed(lambda: left @ right, device) / 1e12, 1)
        del left, right
    for name, make in kinds.items():
        model = make()
        parameters, vocabulary = model.num_parameters(), int(model.config.get_text_config().vocab_size)
        settings = TrainingSettings(dtype="bfloat16" if on_cuda else "float32", tree="off")
        trainer = SingleProcessTrainer(device_models.SOLVER, model, settings, InlineObjectStore(), device=device)
        random = np.random.default_rng(0)
        ids = random.integers(0, vocabulary, (rows, prompt + response)).astype(np.int32)
        samples = tuple(as_samples([(row[:prompt], row[prompt:]) for row in ids]))
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for step in range(STEPS + 1):
            batch = MicroBatch(micro_batch_id=f"{step}", policy=device_models.SOLVER, samples=samples)
            wait_for(device)
            began = time.perf_counter()
            asyncio.run(trainer.accumulate_batch(batch))
            asyncio.run(trainer.step(divisors_of(samples)))
            wait_for(device)
            seconds.append(time.perf_counter() - began)
        tokens = rows * (prompt + response)
        figures[name] = {"parameters": parameters, "step_s": round(min(seconds[1:]), 3)}
        figures[name]["tokens_per_s"] = round(tokens / min(seconds[1:]))
        if on_cuda:
            done = 6 * parameters * tokens / min(seconds[1:])  # Attention and what is computed twice do not count.
            figures[name]["mfu"] = round(done / 1e12 / figures["product_tflops"], 3)
            figures[name]["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        del trainer, model
    return figures


SHAPES = {"0.5B": device_models.half_billion, "1.5B": device_models.one_and_a_half_billion}
