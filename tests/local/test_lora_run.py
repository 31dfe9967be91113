"""A team of level L2: one base, and an adapter for each agent, through the command line."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flexmarl import cli


@pytest.fixture
def run(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run of two steps: `one` and `two` have an adapter each, `judge` is frozen."""
    config = yaml.safe_load(small_run.read_text())
    policy = config["policies"]["one"] | {"model": str(small_run.parent / "model")}
    policy["training"] = policy["training"] | {"lora": {"rank": 2}}
    config["policies"] = {"one": policy, "two": policy, "judge": policy | {"trainable": False}}
    seat = config["team"]["agents"]["solver"]
    agents = {"solver": "one", "critic": "two", "judge": "judge"}
    config["team"]["agents"] = {agent: seat | {"policy": policy} for agent, policy in agents.items()}
    config["code"] = [str(small_run.parent / "tasks.py")]
    (tmp_path / "l2.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)

    def flexmarl(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["flexmarl", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code
        return capsys.readouterr().out.splitlines()[-1]

    folder = flexmarl("train", "l2.yaml")
    flexmarl("export", folder, "exported")
    return tmp_path / folder


def test_x2_each_policy_trains_its_own_adapter_and_nothing_else(run: Path, small_run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00002"
    one, two = (load_file(checkpoint / policy / "weights.safetensors") for policy in ("one", "two"))
    assert not (checkpoint / "judge").exists()
    assert all(".lora_" in name for name in one)
    assert one.keys() == two.keys()
    changes = [name for name in one if "lora_B" in name]
    assert all(one[name].abs().sum() > 0 and not torch.equal(one[name], two[name]) for name in changes)

    base = AutoModelForCausalLM.from_pretrained(small_run.parent / "model").state_dict()
    for policy in ("one", "two"):
        merged = AutoModelForCausalLM.from_pretrained(run.parents[1] / "exported" / policy).state_dict()
        changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])}
        assert changed == {name for name in base if name.endswith("_proj.weight")}
