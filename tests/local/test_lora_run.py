"""A team of level L2: one base, and an adapter for each agent, through the command line."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flexmarl import cli
from flexmarl.events.journal import read_journal
from flexmarl.events.training_events import Published
from flexmarl.experience.backends.sqlite import DurableStore

RELAY = Path(__file__).parents[2] / "examples" / "relay" / "cpu.yaml"


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


def test_a_run_that_publishes_adapters_alone_samples_and_learns_the_same_as_one_that_publishes_merged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    checksums: dict[str, dict[tuple[str, int], str]] = {}

    def sampled(publish: str) -> tuple[list[tuple[str, list[int]]], dict[str, torch.Tensor]]:
        """(sample id and sampled tokens of every call, the adapters after three updates)."""
        training = f"{{lora: {{rank: 4}}, publish: {publish}, optimizer: {{learning_rate: 5e-2}}}}"
        words = ["train", str(RELAY), f"policies.speaker.training={training}", f"policies.listener.training={training}"]
        words += ["deterministic=true", "steps=3", "batch.groups=4", "batch.episodes=4", "evaluate.tasks=0"]
        words += ["credit.filter=null", "checkpoint.every=3", f"out={tmp_path / publish}", f"name={publish}"]
        monkeypatch.setattr(sys, "argv", ["flexmarl", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert not stopped.value.code
        folder = Path(capsys.readouterr().out.splitlines()[-1])
        events = list(read_journal(folder / "journal.jsonl"))
        checksums[publish] = {
            (event.policy, event.version): event.checksum for event in events if isinstance(event, Published)
        }
        store = DurableStore.open(folder / "experience.sqlite")

        async def rows() -> list[tuple[str, list[int]]]:
            found = await store.query("SELECT sample_id FROM samples ORDER BY sample_id")
            calls = await store.get([sample_id for (sample_id,) in found.rows])
            await store.close()
            return [(row.sample_id, row.values["response_ids"].tolist()) for row in calls]

        step = folder / "checkpoints" / "step-00003"
        adapters = {
            f"{policy}/{name}": tensor
            for policy in ("speaker", "listener")
            for name, tensor in load_file(step / policy / "weights.safetensors").items()
        }
        return asyncio.run(rows()), adapters

    (merged_rows, merged), (adapter_rows, adapter) = sampled("merged"), sampled("adapter")
    assert len(merged_rows) >= 3 * 4 * 4 * 2
    assert len(checksums["merged"]) == len(checksums["adapter"]) == 2 * 4, "versions 0 to 3 of two policies"
    assert not {*checksums["merged"].values()} & {*checksums["adapter"].values()}, "one of them published the other's"
    assert adapter_rows == merged_rows
    assert all(torch.equal(adapter[name], tensor) for name, tensor in merged.items())
    assert all(tensor.abs().sum() > 0 for name, tensor in merged.items() if "lora_B" in name)
