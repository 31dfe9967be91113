"""vLLM's arguments from an engine's settings, and what vLLM refuses, as errors that name the key."""

import difflib
from dataclasses import fields
from typing import Any, get_args

from vllm.config import VllmConfig, WeightTransferConfig  # pyright: ignore[reportMissingImports] - the extra
from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]
from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]

from flexmarl.errors import ConfigError, described
from flexmarl.inference.interface import EngineParts
from flexmarl.inference.settings import VLLM_CPU_KV_GIB, AdapterRoom, VllmSettings

GIB = 2**30
_LEAST_SHARE = 0.01
"""vLLM starts only where this share of the device is free. With `kv_gib` it decides nothing else, and its default
of 0.92 would refuse a device that trainers share."""
_WORKER = "flexmarl.inference.backends.vllm.vllm_worker.FlexmarlWorker"


def vllm_config(settings: VllmSettings, parts: EngineParts) -> VllmConfig:
    """The config of one engine. Raises ConfigError that names the key which vLLM refuses."""
    at = f"policies.{parts.policy}.engine"
    known = {field.name for field in fields(AsyncEngineArgs)}
    for key in settings.options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{near[0]}'? It takes" if near else "it takes"
            raise ConfigError(f"{at}.options.{key}: vLLM has no such argument; {hint} those of its AsyncEngineArgs")
    on_cpu = parts.device == "cpu"
    if on_cpu and settings.tensor_parallel > 1:
        raise ConfigError(
            f"{at}.tensor_parallel is {settings.tensor_parallel}, but the engine is on a CPU; use tensor_parallel=1, "
            "or cluster.device=cuda"
        )
    if on_cpu and settings.options.get("enable_chunked_prefill"):
        raise ConfigError(
            f"{at}.options.enable_chunked_prefill is {settings.options['enable_chunked_prefill']}, but on a CPU "
            "vLLM fails at a prompt in chunks if its request has a seed, as all have; leave it out"
        )
    try:
        return AsyncEngineArgs(**_arguments(settings, parts, on_cpu=on_cpu)).create_engine_config()
    except Exception as error:  # pydantic's, or a ValueError of any of vLLM's own checks.
        options = f", with options {settings.options}" if settings.options else ""
        raise ConfigError(f"{at}: vLLM refuses it{options}: {described(error)}") from error


def _arguments(settings: VllmSettings, parts: EngineParts, *, on_cpu: bool) -> dict[str, Any]:
    """Ours after those that `options` may change."""
    kv_gib = settings.kv_gib or (VLLM_CPU_KV_GIB if on_cpu else None)
    free = {
        # Compiling the model takes longer than a small run on a CPU.
        "enforce_eager": on_cpu,
        # None: vLLM's own choice. On a CPU it fails at a prompt in chunks if its request has a seed, as all have.
        "enable_chunked_prefill": False if on_cpu else None,
        # A model's own generation config must not change how its tokens are drawn.
        "generation_config": "vllm",
        "seed": 0,
    }
    if kv_gib is not None and not on_cpu:
        free["gpu_memory_utilization"] = _LEAST_SHARE
    return {
        **free,
        **settings.options,
        "model": parts.source,
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "max_model_len": settings.max_len,
        "max_num_seqs": settings.slots,
        "tensor_parallel_size": settings.tensor_parallel,
        # In an actor vLLM would place its workers on Ray, one accelerator each; ours has all of its own in one place.
        "distributed_executor_backend": "mp" if settings.tensor_parallel > 1 else None,
        "enable_prefix_caching": settings.prefix_caching,
        "kv_cache_memory_bytes": None if kv_gib is None else int(kv_gib * GIB),
        "logprobs_mode": "raw_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend="flexmarl"),
        "worker_extension_cls": _WORKER,
        "disable_log_stats": True,
        "enable_sleep_mode": not on_cpu,
        # The canary of a version does not wait for the requests that wait.
        "scheduling_policy": "priority",
        **(_of_adapters(settings.adapters, versions=parts.versions) if settings.adapters else {}),
    }


def _of_adapters(adapters: AdapterRoom, *, versions: int) -> dict[str, Any]:
    """Room for `versions` of each adapter in a batch, and for one more, whose canary waits for none of these."""
    side_by_side = adapters.slots * versions
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= adapters.max_rank]
    return {
        "enable_lora": True,
        "max_loras": side_by_side + 1,
        "max_cpu_loras": side_by_side + adapters.slots,
        "max_lora_rank": min(ranks),
    }
