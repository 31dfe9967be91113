"""The length of a learning rate's decay: given, or that of the run. What a resumption may change."""

from pathlib import Path

import pytest
import yaml

from flexmarl.assemble.commands import check_same_run, new_run_folder
from flexmarl.assemble.kept import write_settings
from flexmarl.config import cautions, load_run
from flexmarl.errors import ConfigError
from flexmarl.events.run_folder import RunFolder

RELAY = Path(__file__).parents[3] / "examples" / "relay" / "cpu.yaml"
KEY = "policies.speaker.training.schedule"


def test_a_decay_without_a_length_ends_with_the_run() -> None:
    settings = load_run(RELAY, ["steps=12", f"{KEY}={{type: linear, warmup_steps: 3}}"])
    assert settings.policies["speaker"].training.schedule.decay_steps == 12
    assert settings.policies["listener"].training.schedule.decay_steps == 80  # Given in the file.


def test_a_run_that_is_made_longer_keeps_its_learning_rates(tmp_path: Path) -> None:
    short = load_run(RELAY, ["steps=12", f"{KEY}={{type: cosine}}"])
    written = tmp_path / "config.yaml"
    written.write_text(yaml.safe_dump(short.model_dump(mode="json")))
    assert load_run(written, ["steps=40"]).policies == short.policies


def test_a_resumption_with_another_length_of_the_decay_is_refused_by_its_key(tmp_path: Path) -> None:
    folder, cosine = RunFolder(tmp_path), f"{KEY}={{type: cosine}}"
    write_settings(load_run(RELAY, ["steps=12", cosine]), folder)
    check_same_run(load_run(folder.config, ["steps=40"]), folder)
    refused = rf"other settings: {KEY}\.decay_steps was 12, is 40; resume with .*config\.yaml"
    with pytest.raises(ConfigError, match=refused):
        check_same_run(load_run(RELAY, ["steps=40", cosine]), folder)


def test_a_run_goes_on_on_another_cluster_and_without_its_section_of_simulation(tmp_path: Path) -> None:
    folder, replies = RunFolder(tmp_path), "simulation={replies: {default: {type: lengths, mean: 4}}, rewards: {}}"
    write_settings(load_run(RELAY, [replies]), folder)
    elsewhere = ["cluster={backend: ray, device: cuda}", "pool.routing=round_robin", "objects={}"]
    check_same_run(load_run(RELAY), folder)
    check_same_run(load_run(RELAY, elsewhere), folder)
    with pytest.raises(ConfigError, match=r"batch\.groups was"):
        check_same_run(load_run(RELAY, ["batch.groups=3"]), folder)


def test_a_folder_in_which_no_run_folder_can_be_made_is_named_once_with_what_would_work() -> None:
    settings = load_run(RELAY, ["out=/proc/nowhere"])
    with pytest.raises(ConfigError) as error:
        new_run_folder(settings)
    assert str(error.value) == (
        "out: no run folder can be made in '/proc/nowhere': No such file or directory; use a folder that you may write "
        "to, e.g. out=runs"
    )


def test_updates_with_a_rate_of_0_are_cautioned_against() -> None:
    def keys(*overrides: str) -> list[str]:
        return [caution.key for caution in cautions(load_run(RELAY, overrides))]

    assert keys(f"{KEY}={{type: cosine}}") == keys(f"{KEY}={{type: linear, decay_steps: 500}}") == []
    assert keys(f"{KEY}={{type: linear, decay_steps: 50, min_ratio: 0.1}}") == []
    assert keys(f"{KEY}={{type: linear, decay_steps: 50}}") == [f"{KEY}.decay_steps"]
    assert keys(f"{KEY}={{type: constant, warmup_steps: 81}}") == [f"{KEY}.warmup_steps"]
    assert keys(f"{KEY}={{type: constant, warmup_steps: 80}}") == []
    assert keys(f"{KEY}={{type: linear, decay_steps: 50}}", "policies.speaker.trainable=false") == []


def test_a_run_shorter_than_its_warm_up_still_loads() -> None:
    settings = load_run(RELAY, ["steps=2", f"{KEY}={{type: cosine, warmup_steps: 5}}"])
    assert settings.policies["speaker"].training.schedule.decay_steps == 6


def test_a_length_for_a_constant_rate_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=rf"{KEY}.*decay_steps is 5 but type is 'constant'"):
        load_run(RELAY, [f"{KEY}={{type: constant, decay_steps: 5}}"])
