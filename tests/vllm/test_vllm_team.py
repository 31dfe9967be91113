"""A team that trains on vLLM through Ray: its engines have an interpreter of their own, and their processes may die."""

import itertools
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import flexmarl
from flexmarl.api import Run
from flexmarl.errors import ConfigError
from flexmarl.events.event import Event
from flexmarl.events.run_events import ProcessStarted
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Called, InstanceLost, InstanceReplaced
from flexmarl.events.training_events import DevicesFreed, Published
from flexmarl.experience.store_file import read_store
from tests.small_run import write_team
from tests.vllm.conftest import logprobs_of

STEPS = 5


def write_vllm_team(folder: Path, *, python: str = sys.executable) -> Path:
    """The small run with a tied model that vLLM takes on a CPU, served by vLLM."""
    config = yaml.safe_load(write_team(folder).read_text())
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            head_dim=32,
            intermediate_size=96,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            **shape,
            **ends,
        )
    ).save_pretrained(folder / "model")
    config["policies"]["one"]["engine"] = {
        "type": "vllm",
        "max_len": 64,
        "slots": 16,
        "kv_gib": 0.1,
        "python": python,
        "options": {"block_size": 32},
    }
    config |= {"steps": STEPS, "cluster": {"backend": "ray"}, "evaluate": {"tasks": 0}}
    config["checkpoint"] = {"every": 1, "keep": STEPS}
    config["out"] = str(folder / "runs")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vllm_team(tmp_path_factory.mktemp("team"))


def turns(run: Run, agent: str = "solver") -> list[tuple[str, str, int, list[int], list[int], list[float]]]:
    """Id, state, version, prompt, response and raw log-probabilities of every turn of an agent in the store.

    A call that had no answer when the run ended is a row without version, and with an empty response.
    """
    columns = "sample_id, state, policy_version, payload(prompt_ids), payload(response_ids), payload(raw_logprobs)"
    with read_store(RunFolder(run.folder).store) as store:
        rows = store.query(f"SELECT {columns} FROM {agent}").rows
    return [
        (name, state, version, *(json.loads(text or "[]") for text in payloads))
        for name, state, version, *payloads in rows
    ]


def core_of(engine_pid: int) -> psutil.Process:
    """The process of vLLM's core, of an engine's process."""
    children = psutil.Process(engine_pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


def shared_memory() -> set[str]:
    """What vLLM's message queues have under a name in shared memory."""
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


@pytest.mark.core
def test_a_team_trains_on_vllm_and_every_token_has_the_trainers_log_probability(config: Path) -> None:
    run = flexmarl.train(flexmarl.load(config), show=False)
    check_training(run, config, STEPS)


def test_in_mode_colocated_vllm_gives_its_device_up_at_every_step(config: Path) -> None:
    run = flexmarl.train(flexmarl.load(config, {"mode": "colocated", "steps": 2}), show=False)
    check_training(run, config, 2)
    freed = [one.by for one in run.events() if isinstance(one, DevicesFreed)]
    assert freed == ["engines", "trainers"] * (len(freed) // 2), "they take turns"
    assert len(freed) >= 2 * 2


def check_training(run: Run, config: Path, steps: int) -> None:
    """Every token was trained, and has the log-probability that its version gives it."""
    model = AutoModelForCausalLM.from_pretrained(config.parent / "model").eval()
    weights = {0: {name: tensor.clone() for name, tensor in model.state_dict().items()}}
    for step in range(1, steps + 1):
        weights[step] = load_file(run.folder / "checkpoints" / f"step-{step:05}" / "one" / "weights.safetensors")
    gaps: dict[int, list[float]] = {version: [] for version in range(steps)}
    for _, state, version, prompt, response, logprobs in turns(run):
        assert state == "trained"
        model.load_state_dict(weights[version], strict=False)
        theirs = logprobs_of(model, [*prompt, *response])[len(prompt) - 1 :]
        gaps[version] += np.abs(theirs - np.asarray(logprobs)).tolist()
    assert [len(found) > 0 for found in gaps.values()] == [True] * steps
    assert max(float(np.mean(found)) for found in gaps.values()) < 1e-3
    changed = [
        float((weights[step]["model.norm.weight"] - weights[step - 1]["model.norm.weight"]).abs().max())
        for step in range(1, steps)
    ]
    assert min(changed) > 0, "the versions must differ"
    assert [one.version for one in run.events() if isinstance(one, Published)] == list(range(steps + 1))


def test_an_engine_core_that_is_killed_is_replaced_and_no_row_is_lost_or_doubled(config: Path) -> None:
    before = shared_memory()
    calls, of_vllm, killed = itertools.count(), list[psutil.Process](), list[int]()
    engine_pid = 0

    def kill_the_core(event: Event) -> None:
        nonlocal engine_pid
        if isinstance(event, ProcessStarted) and event.process.startswith("engine/") and not killed:
            engine_pid = event.pid
        if isinstance(event, Called) and next(calls) == 20:
            of_vllm.extend(psutil.Process(engine_pid).children(recursive=True))
            killed.append(core_of(engine_pid).pid)
            os.kill(killed[0], signal.SIGKILL)

    run = flexmarl.train(flexmarl.load(config, {"steps": 3}), on={Event: kill_the_core}, show=False)
    events = list(run.events())
    assert killed, "a core must have been killed"
    assert [one.because for one in events if isinstance(one, InstanceLost)], "its end must have been noticed"
    assert len([one for one in events if isinstance(one, InstanceReplaced)]) == 1
    found = turns(run)
    assert Counter(state for _, state, *_ in found) == {"trained": 3 * 16}
    assert len({name for name, *_ in found}) == 3 * 16
    psutil.wait_procs(of_vllm)  # A process that stays makes the test hang, and fail.
    assert shared_memory() <= before


def test_two_policies_train_adapters_on_one_instance_that_dies_once(config: Path) -> None:
    """Level L2: one process serves both. Its core is killed, and one process comes in its place."""
    calls, started, killed = itertools.count(), list[int](), list[psutil.Process]()

    def kill_the_core(event: Event) -> None:
        if isinstance(event, ProcessStarted) and event.process.startswith("engine/"):
            started.append(event.pid)
        if isinstance(event, Called) and next(calls) == 40:
            killed.append(core_of(started[0]))
            killed[0].kill()

    engine = yaml.safe_load(config.read_text())["policies"]["one"]["engine"] | {"adapters": {"slots": 2, "max_rank": 4}}
    policy = {
        "model": "model",
        "training": {"micro_batch": 16, "lora": {"rank": 4}, "optimizer": {"learning_rate": 0.1}},
    }
    overrides = {
        "steps": 3,
        "mode": "async",
        "policies": {"one": policy | {"engine": engine}, "two": policy | {"serves_together": "one"}},
        "team.agents.checker": {"policy": "two", "system": "check", "sampling": {"max_tokens": 8}},
    }
    run = flexmarl.train(flexmarl.load(config, overrides), on={Event: kill_the_core}, show=False)
    events = list(run.events())
    assert killed, "a core must have been killed"
    assert len(started) == 2, "one engine must serve both policies, and one come in its place"
    lost = [str(one.instance) for one in events if isinstance(one, InstanceLost)]
    assert sorted(lost) == ["one/0", "two/0"]
    assert len([one for one in events if isinstance(one, InstanceReplaced)]) == 2
    model = AutoModelForCausalLM.from_pretrained(config.parent / "model").eval()
    merged = {(policy, 0): model for policy in ("one", "two")}
    for step in (1, 2):
        for path in flexmarl.export(run, config.parent / f"step-{step}", which=step, form="merged"):
            merged[path.name, step] = AutoModelForCausalLM.from_pretrained(path).eval()
    for agent, policy in (("solver", "one"), ("checker", "two")):
        found = turns(run, agent)
        assert len({name for name, *_ in found}) == len(found)
        assert sum(state == "trained" for _, state, *_ in found) == 3 * 16
        served = [
            (version, prompt, ids, logprobs)
            for _, state, version, prompt, ids, logprobs in found
            if (ids or state == "trained") and version < 3
        ]
        assert {version for version, *_ in served} == {0, 1, 2}
        for version, prompt, ids, logprobs in served:
            theirs = logprobs_of(merged[policy, version], [*prompt, *ids])[len(prompt) - 1 :]
            assert np.abs(theirs - np.asarray(logprobs)).mean() < 1e-3


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"deterministic": True}, "deterministic is true, but policies.one.engine.type is 'vllm'"),
        ({"cluster.backend": "inline"}, "policies.one.engine.python is set, but with cluster.backend=inline"),
        (
            {"policies.one.engine.tensor_parallel": 2},
            "policies.one.engine.tensor_parallel is 2, but cluster.backend=ray on 'cpu' has one device",
        ),
        ({"policies.one.engine.options": {"dtype": "float32"}}, "options.dtype is set by flexmarl; use engine.dtype"),
        ({"policies.one.engine.python": "/nowhere/python"}, "policies.one.engine.python: there is no /nowhere/python"),
    ],
)
def test_settings_that_vllm_cannot_serve_are_named(config: Path, overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        flexmarl.train(flexmarl.load(config, overrides), show=False)
    assert named in str(refused.value)
