"""Trainer of one policy, in whichever process its world has for it."""

import zlib

from flexmarl.assemble.blueprint import load_tokenizer, model_source
from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.config import RunSettings
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import PolicyName
from flexmarl.training.backends.causal_lm import load_model
from flexmarl.training.backends.single import SingleProcessTrainer


def make_trainer(
    settings: RunSettings, policy: PolicyName, objects: ObjectStore, *, thread: DeviceThread, device: str
) -> SingleProcessTrainer:
    """Loads the policy's model and puts a trainer around it."""
    return SingleProcessTrainer(
        policy,
        load_model(model_source(settings, policy)),
        settings.policies[policy].training,
        objects,
        thread=thread,
        tokenizer=load_tokenizer(settings, policy),
        device=device,
        seed=zlib.crc32(f"{settings.seed}/{policy}".encode()),
        deterministic=settings.deterministic,
    )
