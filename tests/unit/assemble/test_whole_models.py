"""A model folder is loaded as it is, or refused: what lacks in it is never made up."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flexmarl.assemble import blueprint
from flexmarl.assemble.blueprint import draw_up, load_tokenizer
from flexmarl.cli.examine import examine
from flexmarl.cluster.torch_device import with_threads
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.training.backends.causal_lm import check_model_files, load_model

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"
WORLDS = ("inline", "ray")


def copied(small_run: Path, folder: Path) -> str:
    """The small run's model in a folder where it may be changed; returns the override that takes it."""
    shutil.copytree(small_run.parent / "model", folder / "model")
    return f"policies.one.model={folder / 'model'}"


def rewritten(model: Path, change: Callable[[Tensors], object]) -> None:
    """Changes the tensors of a folder."""
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def fewer_layers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor lacks": (lambda model: rewritten(model, lambda t: t.pop(Q)), f"its files lack {Q}"),
    "a tensor has another shape": (
        lambda model: rewritten(model, lambda t: t.update({Q: torch.zeros(3, 4)})),
        f"{Q} has the shape [3, 4] in its files, and [32, 32] by its config.json",
    ),
    "a tensor is nobody's": (
        lambda model: rewritten(model, lambda t: t.update({"model.extra.weight": torch.zeros(2)})),
        "its files hold model.extra.weight, for which the model of its config.json has no place",
    ),
    "a layer is left out by the config": (fewer_layers, "its files hold model.layers.1."),
    "the file is cut short": (lambda model: halved(model / "model.safetensors"), "file not fully covered"),
    "the file is empty": (lambda model: (model / "model.safetensors").write_bytes(b""), "SafetensorError"),
    "there is no file": (lambda model: (model / "model.safetensors").unlink(), "model"),
    "the tokenizer's settings lack": (
        lambda model: (model / "tokenizer_config.json").unlink(),
        "has no tokenizer_config.json; save the model's own tokenizer there",
    ),
    "all of the tokenizer lacks": (
        lambda model: [(model / name).unlink() for name in ("tokenizer_config.json", "tokenizer.json")],
        "has no tokenizer_config.json",
    ),
    "the vocabulary lacks": (lambda model: (model / "tokenizer.json").unlink(), "no tokenizer from"),
    "the vocabulary is cut short": (lambda model: halved(model / "tokenizer.json"), "no tokenizer from"),
    "the vocabulary is of a larger model": (
        lambda model: rewritten_config(model, vocab_size=90),
        "has the shape [102, 32] in its files, and [90, 32] by its config.json",
    ),
}


def rewritten_config(model: Path, **keys: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_not_one_whole_model_is_refused_when_a_run_of_any_world_is_put_together(
    small_run, tmp_path, case
):
    ours = copied(small_run, tmp_path)
    change, words = BROKEN[case]
    change(tmp_path / "model")
    for world in WORLDS:
        with pytest.raises(ConfigError) as error:
            draw_up(load_run(small_run, [ours, f"cluster.backend={world}"]))
        assert str(error.value).startswith("policies.one.model: "), error.value
        assert words in str(error.value)
        (problem,) = examine(load_run(small_run, [ours, f"cluster.backend={world}"]))[1]
        assert problem.startswith("policies.one.model: ")


def test_a_whole_model_is_not_refused(small_run):
    for world in WORLDS:
        assert draw_up(load_run(small_run, [f"cluster.backend={world}"])).team.agents


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(small_run, tmp_path):
    ours = copied(small_run, tmp_path)
    rewritten_config(tmp_path / "model", vocab_size=90)
    rewritten(
        tmp_path / "model",
        lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:90].clone()}),
    )
    with pytest.raises(ConfigError, match="has 102 tokens, the model only 90"):
        draw_up(load_run(small_run, [ours]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name_when_they_are_loaded(small_run, tmp_path, value):
    copied(small_run, tmp_path)
    rewritten(tmp_path / "model", lambda t: t[Q].__setitem__((3, 5), value))
    with pytest.raises(ConfigError, match=rf"weights that are not finite.*: {Q};"):
        load_model(tmp_path / "model")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whichever_tensors_lack_they_are_named_and_a_tied_head_is_not_one_of_them(small_run, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("model")
    copied(small_run, folder)
    held = load_file(folder / "model" / "model.safetensors")
    lacking = data.draw(st.sets(st.sampled_from(sorted(held)), max_size=len(held) - 1))
    rewritten(folder / "model", lambda tensors: [tensors.pop(name) for name in lacking])
    for look in (load_model, check_model_files):
        if not lacking:
            look(folder / "model")
            continue
        with pytest.raises(ConfigError) as error:
            look(folder / "model")
        tied = {"lm_head.weight"} if "model.embed_tokens.weight" in lacking else set()
        assert f"its files lack {', '.join(sorted(lacking | tied)[:5])}" in str(error.value)


def test_an_untied_head_that_lacks_is_missed(small_run, tmp_path):
    copied(small_run, tmp_path)
    rewritten_config(tmp_path / "model", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"its files lack lm_head\.weight"):
        load_model(tmp_path / "model")


def test_what_is_loaded_is_what_the_file_holds(small_run):
    model = small_run.parent / "model"
    held, loaded = load_file(model / "model.safetensors"), load_model(model).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in held.items())
    assert isinstance(load_model(model), type(AutoModelForCausalLM.from_pretrained(model)))


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [([3, 5], 7, (3, 5)), (4, [3, 5], (4,)), (None, [3, 5], (3, 5)), (None, 6, (6,)), (None, None, ())],
)
def test_ids_that_end_a_response_are_those_of_the_generation_config_or_else_of_the_config(
    small_run: Path, tmp_path: Path, generation: object, config: object, ids: tuple[int, ...]
) -> None:
    override = copied(small_run, tmp_path)
    rewritten_config(tmp_path / "model", eos_token_id=config)
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": generation})) if generation else file.unlink(missing_ok=True)
    settings = load_run(small_run, [override])
    assert blueprint.load_end_ids(settings, "one") == ids
    renderer = blueprint.load_renderer(settings, "one")
    assert {*renderer.stop_ids} == {*ids, load_tokenizer(settings, "one").eos_token_id}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ids_that_are_none_are_refused_with_the_file(small_run: Path, tmp_path: Path, name: str) -> None:
    override = copied(small_run, tmp_path)
    if name == "config.json":
        (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    held = json.loads((tmp_path / "model" / "config.json").read_text()) if name == "config.json" else {}
    (tmp_path / "model" / name).write_text(json.dumps(held | {"eos_token_id": [-1]}))
    with pytest.raises(
        ConfigError, match=rf"^policies\.one\.model: eos_token_id in the {name} of '.*' must be ids, got -1"
    ):
        blueprint.load_end_ids(load_run(small_run, [override]), "one")


def test_files_are_checked_by_one_thread(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several, the thread of the controller would keep a team for the life of the process."""
    took, load = [], AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *a, **o: (took.append(torch.get_num_threads()), load(*a, **o))[1],
    )
    with with_threads(2):
        check_model_files(small_run.parent / "model")
        assert (took, torch.get_num_threads()) == ([1], 2)


def test_a_hub_that_does_not_answer_is_asked_once_unless_the_model_is_in_its_cache(
    small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def no_answer(_: HfApi, name: str, *, timeout: float) -> None:
        asked.append((name, timeout))
        raise ConnectionError("Name or service not known")

    def loaded(_: str) -> None:
        raise ConfigError("it is loaded")

    monkeypatch.setattr(HfApi, "model_info", no_answer)
    monkeypatch.setattr(blueprint, "check_model_files", loaded)
    chosen = load_run(small_run, ["policies.one.model=own/model"])
    with pytest.raises(ConfigError) as refused:
        blueprint.check_model(chosen, "one")
    assert str(refused.value) == (
        "policies.one.model: the Hugging Face hub does not answer (ConnectionError: Name or service not known), and "
        "'own/model' is not in its cache; give the folder of a model, as `save_pretrained` writes it"
    )
    assert asked == [("own/model", blueprint.HUB_ANSWER_S)]
    monkeypatch.setattr(blueprint, "try_to_load_from_cache", lambda *_: "config.json")
    with pytest.raises(ConfigError, match="it is loaded"):
        blueprint.check_model(chosen, "one")
    assert len(asked) == 1
