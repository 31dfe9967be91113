"""Settings that are allowed and have a price."""

from pathlib import Path

import pytest
import torch

from flexmarl.agents.settings import TeamSettings
from flexmarl.cluster import torch_device
from flexmarl.config import cautions, load_run
from flexmarl.tools import ToolCall, tool
from flexmarl.tools.arguments import fitted


def keys_of(config, *overrides):
    return [caution.key for caution in cautions(load_run(config, overrides))]


def test_what_is_allowed_and_has_a_price_is_said_and_nothing_else(config):
    assert keys_of(config) == keys_of(config, "mode=async") == []
    warm = "team.agents.solver.sampling.temperature=0.7"
    assert keys_of(config, warm) == ["team.agents.solver.sampling"]
    assert keys_of(config, "team.agents.writer.sampling={top_k: 5, top_p: 0.9}") == ["team.agents.writer.sampling"]
    (caution,) = cautions(load_run(config, [warm]))
    assert str(caution).startswith("team.agents.solver.sampling: temperature 0.7, but the loss takes log-probabilities")
    assert str(caution).endswith("or policies.one.training.correction={type: tis}")
    assert keys_of(config, warm, "policies.one.training.correction={type: tis}") == []
    assert keys_of(config, warm, "policies.one.trainable=false") == []
    uncorrected = [f"policies.{name}.training.correction={{type: none}}" for name in ("one", "two")]
    assert keys_of(config, "mode=greedy", *uncorrected) == [
        *("policies.one.training.correction", "policies.two.training.correction")
    ]
    assert keys_of(config, "pipeline.lag=2") == ["pipeline.lag"]
    assert keys_of(config, "mode=greedy", "pipeline={lag: 2, window: 0.4, late: requeue}") == ["pipeline.window"]
    assert keys_of(config, "mode=async", "pipeline={lag: 2, window: 0.4, late: requeue, head_deadline_s: 9}") == []
    assert keys_of(config, "pipeline={lag: 1, window: 0.3}") == [], "the defaults, as a run folder's config has them"
    (caution,) = cautions(load_run(config, ["mode=one_step_off", "pipeline.lag=2"]))
    assert str(caution) == (
        "pipeline.lag: 2 has no effect in mode 'one_step_off'; leave it out, or use mode=async or fifo or greedy"
    )
    tree = "team.workflow={type: turns, turn: any, candidates: 4}"
    by_depth = "credit.shaping=[{type: turn_discount, max_turns: 3, gamma: 0.5}]"
    assert keys_of(config, by_depth) == []
    (caution,) = cautions(load_run(config, [tree, by_depth]))
    assert caution.key == "credit.shaping[0]"
    assert "the first one counts 0.25 times the last" in caution.price
    for kind in ("turn_weighted", "shaped"):
        assert keys_of(config, tree, f"credit.shaping=[{{type: {kind}}}]") == ["credit.shaping[0]"]


@tool(pure=True)
def times_of_two(a: int, b: int) -> int:
    """Multiplies."""
    return a * b


@tool(pure=True)
def times_of_one(a: int, b: int = 2) -> int:
    """Multiplies."""
    return a * b


def test_a_tool_with_several_arguments_under_a_syntax_of_one_text_is_cautioned_against(config):
    solver = "team.agents.solver"
    two = f"{solver}.tools=[{{type: times_of_two}}]"
    (caution,) = cautions(load_run(config, [two, f"{solver}.syntax={{type: function, names: {{calc: times_of_two}}}}"]))
    assert caution.key == f"{solver}.syntax"
    assert "syntax 'function' holds one text, and the tool 'times_of_two' has several arguments: a, b" in caution.price
    assert """'calc({"a": 1, "b": 1})'""" in caution.instead
    fenced = f"{solver}.syntax={{type: fenced, languages: {{calc: times_of_two}}}}"
    assert keys_of(config, two, fenced) == [f"{solver}.syntax"]
    for syntax in ("auto", "{type: tag}", "{type: xml}", "{type: mistral}", "{type: llama}"):
        assert keys_of(config, two, f"{solver}.syntax={syntax}") == []
    one = f"{solver}.tools=[{{type: times_of_one}}]"
    assert keys_of(config, one, f"{solver}.syntax={{type: function, names: {{calc: times_of_one}}}}") == []


def test_the_call_that_a_caution_shows_is_read_and_a_role_prompt_that_shows_it_ends_the_caution(config):
    syntax = "team.agents.solver.syntax={type: function, names: {calc: times_of_two}}"
    words = ["team.agents.solver.tools=[{type: times_of_two}]", syntax]
    settings = load_run(config, [*words, 'team.agents.solver.system="Write calc({\\"a\\": 6, \\"b\\": 7})."'])
    assert cautions(settings) == []
    team: TeamSettings = settings.team
    agent = team.agents["solver"]
    assert agent.syntax != "auto"
    (call,) = agent.syntax.parse(agent.system)
    assert isinstance(call, ToolCall)
    assert fitted(call.arguments, agent.tools[0].parameters) == {"a": 6, "b": 7}


def test_training_on_the_replies_of_a_timed_engine_is_cautioned_against(config):
    timed = ["policies.one.engine={type: timed}", "simulation.replies.default={type: lengths, mean: 9}"]
    (caution,) = cautions(load_run(config, timed))
    assert caution.key == "policies.one.engine.type"
    assert "no samples of the weights" in caution.price
    assert keys_of(config, *timed, "policies.one.trainable=false") == []
    assert keys_of(config, *timed, "cluster.backend=simulated") == []


def test_what_opencode_lacks_in_its_box_is_said_by_name(config):
    def command(argv):
        return ["team.agents.solver.tools=[]", f"team.workflow={{type: command, argv: {argv}}}"]

    bare = command('["{base}/bin/opencode.exe", run, "{prompt}"]')
    said = {one.key: str(one) for one in cautions(load_run(config, bare))}
    assert [*said] == ["team.workflow.env.OPENCODE_CONFIG_CONTENT", "team.workflow.env", "sandbox.memory_mib"]
    assert "@ai-sdk/openai-compatible" in said["team.workflow.env.OPENCODE_CONFIG_CONTENT"]
    for name in ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS"):
        assert f"OPENCODE_DISABLE_{name}" in said["team.workflow.env"]
    assert "256" in said["sandbox.memory_mib"]
    assert keys_of(config, *command("[other-agent, '{prompt}']")) == []


def test_the_example_of_opencode_sets_all_that_opencode_needs(monkeypatch):
    monkeypatch.setattr(torch_device, "cpu_multiplies_bfloat16", lambda: True)
    example = load_run(Path(__file__).parents[3] / "examples/black_box/opencode.yaml")
    assert cautions(example) == []


@pytest.mark.parametrize(
    ("capabilities", "multiplies"),
    [
        ({"avx2": True}, False),
        ({"avx512_f": True, "avx512_vl": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": True}, True),
        ({"neon": True, "bf16": False}, False),
        ({"neon": True, "bf16": True}, True),
    ],
)
def test_a_cpu_multiplies_bfloat16_if_it_has_instructions_for_it(capabilities, multiplies, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert torch_device.cpu_multiplies_bfloat16() is multiplies


def test_bfloat16_has_a_price_on_a_cpu_without_instructions_for_it(config, monkeypatch):
    types = [f"policies.one.{key}.dtype=bfloat16" for key in ("engine", "training")]
    monkeypatch.setattr(torch_device, "cpu_multiplies_bfloat16", lambda: True)
    assert keys_of(config, *types) == []
    monkeypatch.setattr(torch_device, "cpu_multiplies_bfloat16", lambda: False)
    assert keys_of(config) == keys_of(config, *types, "cluster.device=cuda") == []
    (caution,) = cautions(load_run(config, types))
    assert caution.key == "policies.one.engine.dtype"
    instead = caution.instead.removeprefix("use ").split()
    assert keys_of(config, *types, *instead) == []
