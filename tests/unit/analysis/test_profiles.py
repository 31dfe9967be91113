import pytest
from pydantic import ValidationError

from flexmarl.analysis.costs import PROFILES, costs_of
from flexmarl.simulator.settings import SimulationSettings


def test_costs_may_be_a_profile_by_its_name() -> None:
    settings = SimulationSettings.model_validate({"costs": {"default": "paper_14b"}})
    assert costs_of(settings.costs, "solver") == PROFILES["paper_14b"]


def test_costs_may_stand_on_a_profile_and_their_origin_says_what_was_changed() -> None:
    changed = {"profile": "paper_32b", "engine": {"slots": 8}, "trainer": {"devices": 2, "update_s": 9}}
    costs = SimulationSettings.model_validate({"costs": {"solver": changed}}).costs["solver"]
    paper = PROFILES["paper_32b"]
    assert costs.engine == paper.engine.model_copy(update={"slots": 8})
    assert costs.trainer == paper.trainer.model_copy(update={"devices": 2, "update_s": 9.0})
    assert costs.origin == f"{paper.origin}; here changed: engine.slots, trainer.devices, trainer.update_s"


def test_settings_that_are_written_out_come_back_the_same() -> None:
    settings = SimulationSettings.model_validate(
        {"costs": {"default": {"profile": "tiny_cpu", "engine": {"slots": 8}}}}
    )
    assert SimulationSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_a_profile_that_there_is_not_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValidationError, match="there is no cost profile 'paper_14'; there are: paper_14b"):
        SimulationSettings.model_validate({"costs": {"default": "paper_14"}})


def test_every_profile_says_where_its_numbers_are_from() -> None:
    for name, costs in PROFILES.items():
        assert "measured" in costs.origin, name
