"""Facts about each policy's model, without loading its weights: from its folder, the hub's cache, or the hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flexmarl.agents import ChatRenderer
from flexmarl.assemble import check_model, load_tokenizer, model_source
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError
from flexmarl.inference.backends.embedded.kv_slots import attention_shape
from flexmarl.inference.settings import EmbeddedSettings


class Finding(NamedTuple):
    """One line of `flexmarl check`: a subject, and what was found about it."""

    subject: str
    found: str
    todo: str = ""
    """The user's to-do; empty if there is none."""


HUB_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about one policy's model."""

    finding: Finding
    readable: bool = False
    """True if its config and tokenizer are on this machine."""
    parameters: int = 0
    """Number of parameters; 0 if not known here."""
    cached_numbers: int = 0
    """Numbers in the keys and values of one token; 0 if not known here, or if the engine has its own cache."""


def look_at_models(settings: RunSettings, problems: list[str]) -> Mapping[str, ModelFacts]:
    """Returns the facts about every model that can be examined. Adds a line to `problems` for each that cannot."""
    found: dict[str, ModelFacts] = {}
    for policy in settings.policies:
        try:
            source = model_source(settings, policy)
            config = _config(source)
            found[policy] = _on_the_hub(policy, source) if config is None else _here(settings, policy, source, config)
        except ConfigError as problem:
            problems.append(str(problem))
    return found


def _config(source: str) -> PretrainedConfig | None:
    """Returns the model's config from its folder or the hub's cache; None if it is only on the hub."""
    try:
        return AutoConfig.from_pretrained(source, local_files_only=True)
    except Exception as error:  # A broken file may raise anything.
        if not Path(source).is_dir():
            return None
        raise ConfigError(f"'{source}' is no model that transformers can read: {_first_line(error)}") from error


def _here(settings: RunSettings, policy: str, source: str, config: PretrainedConfig) -> ModelFacts:
    key, engine = f"policies.{policy}.model", settings.policies[policy].engine
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ConfigError(f"{key}: '{source}' is no causal language model: {_first_line(error)}") from error
    if Path(source).is_dir() and not any([*Path(source).glob("*.safetensors"), *Path(source).glob("*.bin")]):
        raise ConfigError(f"{key}: '{source}' holds no weights; save the model there with `save_pretrained`")
    check_model(settings, policy)
    tokenizer = load_tokenizer(settings, policy)
    cached, todo = 0, ""
    if isinstance(engine, EmbeddedSettings):
        layers, heads, size = attention_shape(model)
        cached = 2 * layers * heads * size
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and engine.max_len > positions:
            todo = f"engine.max_len is {engine.max_len}, but the model knows only {positions} positions: lower it"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    chat = ChatRenderer(tokenizer).extension.summary
    found = f"{type(model).__name__}, {parameters / 1e6:,.2f}M parameters; chat: {chat}"
    return ModelFacts(finding=Finding(key, found, todo), readable=True, parameters=parameters, cached_numbers=cached)


def _on_the_hub(policy: str, name: str) -> ModelFacts:
    key = f"policies.{policy}.model"
    try:
        info = HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        todo = "accept its licence on the hub, then `hf auth login`"
        return ModelFacts(finding=Finding(key, f"{name} is gated", todo))
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{key}: '{name}' is not on the Hugging Face hub, or private; check the name, or `hf auth login`"
        ) from None
    except Exception as error:  # No network, a proxy, an error of the hub: no change of the config would help.
        return ModelFacts(
            finding=Finding(
                key,
                f"{name}: not on this machine, and the hub does not answer ({_first_line(error)})",
                "run where there is network, or give a local folder",
            )
        )
    weights = info.safetensors.total if info.safetensors else 0
    size = f", {weights / 1e6:,.0f}M parameters" if weights else ""
    return ModelFacts(finding=Finding(key, f"{name}, on the hub{size}: the first run loads it"), parameters=weights)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
