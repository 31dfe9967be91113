"""What of the vLLM engine runs without vLLM: memory that is handed over, settings, the trainer's canary."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import Qwen3Config, Qwen3ForCausalLM

import flexmarl
from flexmarl.cluster.interpreters import require_interpreter
from flexmarl.cluster.torch_device import with_threads
from flexmarl.config.engine_fits import check_engines
from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.inference.backends.vllm.handed_weights import HandedTree, adapter_in, handed_adapter, handed_tree
from flexmarl.inference.backends.vllm.served_versions import Served, ServedVersions
from flexmarl.inference.backends.vllm.vllm_start import sockets_in_a_folder
from flexmarl.inference.interface import EngineCapabilities
from flexmarl.inference.settings import VllmSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, PublishedAdapter, canary_key, checksum
from flexmarl.records import PolicyName, Version
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings

POLICY = PolicyName("one")
READ = """
import json, sys
from flexmarl.inference.backends.vllm.handed_weights import handed_tree
from flexmarl.objects.interface import checksum
print(checksum(handed_tree(json.load(sys.stdin))))
"""


def test_another_process_reads_the_tree_that_is_handed_over() -> None:
    tree = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.randn(4).bfloat16(), "none": torch.zeros(0)}
    with HandedTree(tree) as handed:
        read = subprocess.run(
            [sys.executable, "-c", READ], input=json.dumps(handed.address), capture_output=True, text=True, check=True
        )
    assert read.stdout.strip() == checksum(tree)


def test_a_reader_keeps_what_was_handed_over_and_its_changes_are_its_own() -> None:
    with HandedTree({"a": torch.zeros(3)}) as handed:
        first, second = handed_tree(handed.address), handed_tree(handed.address)
        first["a"] += 1
    assert (first["a"].tolist(), second["a"].tolist()) == ([1.0] * 3, [0.0] * 3)


def test_an_adapter_that_is_handed_over_has_its_digest_and_leaves_nothing() -> None:
    layers = {f"model.layers.{n}.mlp.up_proj": (torch.randn(3, 5), torch.randn(7, 3)) for n in range(2)}
    adapter = PublishedAdapter(layers, 0.1 + 0.2, Checksum("ab:cd"))
    with handed_adapter(adapter) as folder:
        assert checksum(adapter_in(folder).as_tree()) == checksum(adapter.as_tree())
        assert [path.is_symlink() for path in folder.iterdir()] == [True, True]
    assert not folder.exists()


def test_the_last_versions_of_an_adapter_stay_and_policies_keep_apart() -> None:
    other = PolicyName("other")
    versions = ServedVersions([POLICY, other], Version(0), kept=3)  # The base is the first of these.
    gone = [
        [(old.policy, old.version) for old in versions.serve(Served(policy, Version(n), adapter))]
        for policy, n, adapter in [(POLICY, 1, 1), (other, 1, 2), (POLICY, 2, 3), (POLICY, 3, 4), (POLICY, 4, 5)]
    ]
    assert gone == [[], [], [], [(POLICY, 0)], [(POLICY, 1)]]
    assert (versions.newest(POLICY).version, versions.newest(other).version) == (4, 1)
    assert [old.adapter for old in versions.serve(Served(POLICY, Version(4), 6))] == [5], "a version is there once"


def test_whole_weights_replace_each_other() -> None:
    versions = ServedVersions([POLICY], Version(0), kept=1)
    assert [[old.version for old in versions.serve(Served(POLICY, Version(n)))] for n in (1, 2)] == [[0], [1]]


def test_memory_that_nobody_hands_over_any_more_goes_without_an_end_of_its_block() -> None:
    """As when a load is cancelled while the device thread copies."""
    handed = HandedTree({"a": torch.zeros(4)}).__enter__()
    path = Path(handed.address["path"])
    assert path.exists()
    with pytest.warns(ResourceWarning, match="unclosed"):
        del handed
    assert not path.exists()


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"dtype": "bfloat16"}, r"use engine\.dtype"),
        ({"hf_token": "hf_secret"}, "set the environment variable HF_TOKEN"),
        ({"pipeline_parallel_size": 2}, r"use engine\.tensor_parallel"),
    ],
)
def test_options_that_flexmarl_sets_are_refused_by_name(option, instead) -> None:
    (key,) = option
    with pytest.raises(ValidationError, match=rf"options.{key} is set by flexmarl; {instead}"):
        VllmSettings(options=option)


@pytest.mark.parametrize("share", ["0.4", None, 0, 1.5])
def test_a_share_of_the_device_that_is_none_is_named(share) -> None:
    with pytest.raises(ValidationError, match=r"options.gpu_memory_utilization is .*; use a share of the device"):
        VllmSettings(options={"gpu_memory_utilization": share})


def test_an_interpreter_without_the_package_or_that_is_none_is_named(tmp_path: Path) -> None:
    require_interpreter(Path(sys.executable), "key", packages=("torch",))
    with pytest.raises(ConfigError, match=r"^key: .* does not have no_such_package"):
        require_interpreter(Path(sys.executable), "key", packages=("no_such_package",))
    with pytest.raises(ConfigError, match=r"^key: there is no /nowhere/python"):
        require_interpreter(Path("/nowhere/python"), "key")
    bare = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare.parents[1]], check=True)
    with pytest.raises(ConfigError, match=r"ray missing there, .* here; flexmarl missing there"):
        require_interpreter(bare, "key")


def test_vllm_that_is_not_installed_is_named_before_anything_starts(small_run: Path) -> None:
    settings = flexmarl.load(small_run, {"policies.one.engine": {"type": "vllm"}})
    with pytest.raises(MissingExtra, match=r"policies\.one\.engine\.type vllm .*needs the extra 'vllm'"):
        flexmarl.train(settings, show=False)


def test_a_changed_distribution_is_refused_with_a_correction_that_needs_its_log_probabilities(small_run: Path) -> None:
    can = EngineCapabilities(loads_weights=True, raw_logprobs=True, drawn_logprobs=False)
    settings = {"mode": "async", "policies.one.training.correction": {"type": "tis"}}
    sharp = {"team.agents.solver.sampling.temperature": 0.5}
    check_engines(flexmarl.load(small_run, settings), {POLICY: [can]})
    check_engines(flexmarl.load(small_run, sharp), {POLICY: [can]})
    with pytest.raises(ConfigError, match=r"team\.agents\.solver\.sampling changes .* reports only the model's own"):
        check_engines(flexmarl.load(small_run, settings | sharp), {POLICY: [can]})


def test_each_version_is_published_with_its_canary_and_the_last_two_are_kept() -> None:
    async def check() -> None:
        torch.manual_seed(0)
        shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        model = Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=1, intermediate_size=16))
        store = InlineObjectStore()
        trainer = SingleProcessTrainer(POLICY, model, TrainingSettings(), store, canary=True)
        for version in range(3):
            await trainer.publish(Version(version))
            canary = await store.get(canary_key(POLICY, Version(version)))
            ids = canary["ids"]
            with torch.no_grad():
                expected = model(ids[None]).logits[0, -1].log_softmax(-1)[ids]
            assert torch.allclose(canary["logprobs"], expected, atol=1e-5)
            trainer._version = Version(version + 1)
        with pytest.raises(KeyError):
            await store.get(canary_key(POLICY, Version(0)))
        await store.get(canary_key(POLICY, Version(1)))

    asyncio.run(check())


def test_a_canary_takes_one_thread_and_the_trainer_keeps_its_number(monkeypatch) -> None:
    """With two threads and an engine on both cores, the pass took 12 s in place of 0.2."""
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=1, intermediate_size=16))
    seen, passed = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **inputs: (seen.append(torch.get_num_threads()), passed(**inputs))[1])
    trainer = SingleProcessTrainer(POLICY, model, TrainingSettings(), InlineObjectStore(), canary=True)
    seen.clear()  # The first of a kind is tried on prefix trees.
    with with_threads(2):
        trainer._network.canary()
        assert (seen, torch.get_num_threads()) == ([1], 2)


@pytest.mark.parametrize("users", [None, "sockets"])
def test_the_folder_of_vllms_sockets_is_left_to_no_process_that_begins_later(
    users: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "VLLM_RPC_BASE_PATH"
    monkeypatch.delenv(variable, raising=False)
    if users:
        (tmp_path / users).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / users))
    before = os.environ.get(variable)
    with sockets_in_a_folder():
        folder = Path(os.environ[variable])
        assert folder.is_dir()
        assert before is None or folder.parent == tmp_path / str(users)
    assert os.environ.get(variable) == before
    assert not folder.exists()
    with pytest.raises(RuntimeError), sockets_in_a_folder():
        raise RuntimeError
    assert os.environ.get(variable) == before
