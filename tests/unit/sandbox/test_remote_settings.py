"""Configs of sandboxes that are services: what they may say, what is refused, and how the refusal reads."""

import sys

import pytest
from pydantic import ValidationError

from flexmarl.assemble.boxes import check_sandbox_of, sandbox_of
from flexmarl.config import load_run
from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.backends.sandbox_fusion import SandboxFusion
from flexmarl.sandbox.probe import GUARANTEES
from flexmarl.sandbox.settings import E2bSettings, SandboxFusionSettings, SandboxSettings

TOOL = "team.agents.solver.tools=[{type: python}]"
FUSION = "sandbox={type: sandbox_fusion, url: http://127.0.0.1:9}"
E2B = "sandbox={type: e2b}"


def test_a_section_without_a_type_is_of_this_machine(small_run):
    assert load_run(small_run, ["sandbox={pids: 32}"]).sandbox == SandboxSettings(pids=32)
    assert load_run(small_run, []).sandbox == SandboxSettings()


def test_each_type_has_its_sandbox(small_run):
    assert isinstance(sandbox_of(load_run(small_run, [TOOL])), Bubblewrap)
    assert isinstance(sandbox_of(load_run(small_run, [TOOL, FUSION])), SandboxFusion)
    assert sandbox_of(load_run(small_run, [FUSION])) is None, "nothing needs a box"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{type: docker}", "sandbox.type must be one of 'bubblewrap', 'sandbox_fusion', 'e2b', got 'docker'"),
        ("{type: sandbox_fusion}", "sandbox.url is missing"),
        ("{type: sandbox_fusion, url: 'http://me:pw@host'}", "sandbox.url must match"),
        ("{type: e2b, memory_mib: 64}", "sandbox.memory_mib is not a setting (its value: 64); known here: accept"),
        ("{type: e2b, accept: [rlimits]}", "sandbox.accept.0 must be 'network', 'syscalls', 'pids' or 'output'"),
        ("{memory_mib: 3}", "sandbox.memory_mib must be greater than or equal to 32, got 3"),
    ],
)
def test_a_refusal_names_the_setting_and_the_value(section, said, small_run):
    with pytest.raises(ConfigError) as refused:
        load_run(small_run, [f"sandbox={section}"])
    assert said in str(refused.value)


def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(small_run):
    key = "e2b_" + 40 * "a"
    with pytest.raises(ConfigError, match=r"sandbox\.key_env: a config may hold no key") as refused:
        load_run(small_run, [f"sandbox={{type: e2b, key_env: {key}}}"])
    assert key not in str(refused.value)


def test_a_service_promises_no_more_than_the_guarantees_and_each_that_it_lacks_can_be_accepted():
    fusion = SandboxFusionSettings(url="http://box", accept=tuple(SandboxFusionSettings.unpromised))
    inside, outside = E2bSettings(), E2bSettings(internet=True)
    assert fusion.unpromised.keys() < GUARANTEES.keys()
    assert inside.unpromised.keys() == {"syscalls", "pids", "output"}
    assert outside.unpromised.keys() == {"syscalls", "pids", "output", "network"}
    assert E2bSettings(internet=True, accept=tuple(outside.unpromised)).accept
    with pytest.raises(ValidationError):
        E2bSettings(accept=("filesystem",))


@pytest.mark.parametrize("section", [FUSION, E2B])
def test_what_reaches_this_machine_from_its_box_is_refused_at_a_service(section, small_run):
    command = "team.workflow={type: command, argv: [agent]}"
    with pytest.raises(ConfigError, match=r"reach nothing of this machine, and team\.workflow of type command must"):
        check_sandbox_of(load_run(small_run, [command, section]))


def test_a_run_without_boxes_asks_no_service(small_run):
    assert check_sandbox_of(load_run(small_run, [E2B])) == []


@pytest.mark.parametrize(
    ("section", "module", "package", "extra"),
    [
        (E2B, "e2b_boxes", "e2b", "e2b-code-interpreter"),
        (FUSION, "sandbox_fusion", "httpx2", "httpx2"),
    ],
)
def test_a_missing_package_is_named(section, module, package, extra, small_run, monkeypatch):
    monkeypatch.delitem(sys.modules, f"flexmarl.sandbox.backends.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=extra):
        check_sandbox_of(load_run(small_run, [TOOL, section]))
