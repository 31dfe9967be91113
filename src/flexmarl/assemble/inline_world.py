"""World in this process: for debugging, and where there is only one device."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from flexmarl.assemble.blueprint import Blueprint, model_source
from flexmarl.assemble.trainer import make_trainer
from flexmarl.assemble.world import World
from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.errors import EngineError, boundary
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.engines import EngineParts, make_engine
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.records import PolicyName
from flexmarl.training.backends.causal_lm import load_model


@asynccontextmanager
async def inline_world(blueprint: Blueprint, store: ExperienceStore, path: Path | None) -> AsyncIterator[World]:
    """Makes engines and trainers in this process; leaving the block ends them."""
    settings, cluster = blueprint.settings, blueprint.settings.cluster
    if cluster.threads is not None:
        torch.set_num_threads(cluster.threads)
    torch.manual_seed(settings.seed)
    transformers_logging.disable_progress_bar()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        thread = DeviceThread()
        stack.callback(thread.close)
        objects = InlineObjectStore()
        decoders = {agent.policy: agent.renderer.decode for agent in blueprint.team.agents.values()}
        engines: dict[PolicyName, list[Any]] = {}
        for name, policy in settings.policies.items():
            parts = EngineParts(
                policy=PolicyName(name),
                make_model=partial(load_model, model_source(settings, name)),
                decode=decoders[PolicyName(name)],
                store=objects,
                thread=thread,
                device=cluster.device,
                deterministic=settings.deterministic,
            )
            for _ in range(policy.instances):
                with boundary(EngineError, f"policies.{name}.engine: making an engine on {cluster.device}"):
                    engine = make_engine(policy.engine, parts)
                stack.push_async_callback(engine.close)
                engines.setdefault(PolicyName(name), []).append(engine)
        trainers = {
            policy: make_trainer(settings, policy, objects, thread=thread, device=cluster.device)
            for policy in sorted(map(PolicyName, settings.trained))
        }
        pool = await stack.enter_async_context(InferencePool(engines, settings.pool))
        yield World(objects=objects, store=store, pool=pool, trainers=trainers)
