"""Decides whether engines can do what the run asks of them, from the capabilities that they report."""

from collections.abc import Iterator, Mapping, Sequence

from flexmarl.config.run_settings import RunSettings
from flexmarl.errors import ConfigError
from flexmarl.inference.interface import EngineCapabilities
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import PolicyName


def check_engines(settings: RunSettings, engines: Mapping[PolicyName, Sequence[EngineCapabilities]]) -> None:
    """Raises ConfigError with every setting that asks for more than an engine of its policy can do."""
    problems = [
        problem
        for policy, capabilities in engines.items()
        for can in dict.fromkeys(capabilities)
        for problem in _misfits(settings, policy, can)
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _misfits(settings: RunSettings, policy: PolicyName, can: EngineCapabilities) -> Iterator[str]:
    engine = f"the engine of policies.{policy} ('{settings.policies[policy].engine.type}')"
    trained = policy in settings.trained
    if trained and not can.loads_weights:
        yield (
            f"policies.{policy}.trainable is true, but {engine} does not load weights; use an engine that does "
            f"(type: embedded), or policies.{policy}.trainable=false"
        )
    if trained and settings.mode is Mode.COLOCATED and not can.sleeps:
        yield (
            f"mode is 'colocated', in which engines of trained policies give their devices up, but {engine} does not "
            f"sleep; use an engine that does (type: embedded), or mode=sync"
        )
    if trained and settings.policies[policy].training.publish == "adapter" and not can.adapters:
        yield (
            f"policies.{policy}.training.publish is 'adapter', but {engine} takes whole weights only; use an engine "
            f"that takes adapters (type: embedded), or publish=merged"
        )
    if settings.deterministic and not can.deterministic:
        yield (
            f"deterministic is true, but {engine} does not compute a request with the same bits in any company; use "
            f"an engine that does (type: embedded), or deterministic=false"
        )
    if trained and not can.drawn_logprobs and settings.policies[policy].training.correction.weighs:
        for agent, seat in settings.team.agents.items():
            if seat.policy == policy and not seat.sampling.plain:
                yield (
                    f"team.agents.{agent}.sampling changes the model's distribution, and policies.{policy}.training."
                    f"correction weighs tokens by the changed one, but {engine} reports only the model's own "
                    f"log-probabilities; use temperature: 1 without filters there, or correction: {{type: none}}"
                )
    if trained and not can.raw_logprobs:
        for agent, seat in settings.team.agents.items():
            sampling = seat.sampling
            if seat.policy == policy and not sampling.plain:
                yield (
                    f"team.agents.{agent}.sampling changes the model's distribution, but {engine} reports only the "
                    f"log-probabilities of the changed one, and training compares with the model's own; use "
                    f"temperature: 1 without filters there"
                )
