"""The embedded engine's core with memory for few of its requests: nobody is lost, and nobody can tell."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as law
from hypothesis import strategies as st
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.config import load_run
from flexmarl.errors import ConfigError
from flexmarl.inference.backends.embedded import core as engine_core
from flexmarl.inference.backends.embedded.core import GIB, EngineCore
from flexmarl.inference.backends.embedded.kv_cache import FIRST, PAD, SCRATCH
from flexmarl.inference.settings import EmbeddedSettings, KvBytes
from flexmarl.records import FinishReason, Version
from tests.unit.inference import models as tiny
from tests.unit.inference.models import request, run

TOLERANCE = 1e-4
BLOCK = 4
BLOCK_BYTES = tiny.settings(kv_block=BLOCK).kv_bytes(2 * 2 * 2 * 8).block  # layers, keys and values, heads, width


def tight(blocks, **more):
    """Settings with memory for this many blocks."""
    return tiny.settings(kv_block=BLOCK, kv_gib=(FIRST + blocks) * BLOCK_BYTES / GIB, **more)


def mixed(count=16, **sampling):
    """Every fourth request is long; two calls of each conversation begin alike."""
    rng = np.random.default_rng(1)
    return [
        request(
            index,
            [index // 2 % 50, *rng.integers(0, tiny.VOCABULARY, 30 if index % 4 == 0 else 3)],
            seed=index,
            max_tokens=50 if index % 4 == 0 else 6,
            conversation=f"c{index // 2}",
            **sampling,
        )
        for index in range(count)
    ]


def most_used(core, requests):
    """Answers, and the most blocks that were in use after a step."""
    for one in requests:
        assert core.add(one) is None
    answers, used = {}, 0
    while not core.idle:
        answers |= {answer.request_id: answer for answer in core.step()}
        check_blocks(core)
        used = max(used, len(core._ledger.held()))
    return answers, used


def check_blocks(core):
    """Every block is free or held by those whose table has it, nobody shares one to write to, and the budget holds."""
    kept = [one.blocks for one in core._ledger._kept._kept.values()]
    holders = Counter(block for blocks in [*(work.blocks for work in core._running), *kept] for block in blocks)
    assert holders == core._ledger._holders
    assert core._ledger.free + len(holders) == core._ledger.number
    assert not {PAD, SCRATCH} & holders.keys()
    assert not any(work.blocks for work in core._waiting)
    for row, work in enumerate(core._running):
        assert core._rows.table[row, : len(work.blocks)].tolist() == work.blocks
        assert set(core._rows.table[row, len(work.blocks) :].tolist()) <= {PAD}
        last = (int(core._rows.length[row]) - 1) // BLOCK
        assert all(core._ledger._holders[block] == 1 for block in work.blocks[last:])
    assert (core._rows.table[len(core._running) :, 0] == SCRATCH).all()
    assert core.kv_held_bytes <= (FIRST + core._ledger.number) * BLOCK_BYTES


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_long_and_short_requests_with_half_the_memory_get_what_they_get_with_plenty(sampling):
    plenty = EngineCore(tiny.qwen3(), tiny.settings(slots=8, kv_block=BLOCK))
    expected, used = most_used(plenty, mixed(**sampling))
    tight_core = EngineCore(tiny.qwen3(), tight(used // 2, slots=8))
    answers, least = most_used(tight_core, mixed(**sampling))
    assert plenty.use().preempted == 0
    assert tight_core.use().preempted > 0, "the witness: memory ran out"
    assert least <= used // 2
    assert answers.keys() == expected.keys()
    for name, answer in expected.items():
        assert answers[name].response_ids.tolist() == answer.response_ids.tolist()
        assert answers[name].finish is answer.finish
        assert np.allclose(answers[name].raw_logprobs, answer.raw_logprobs, atol=TOLERANCE)
        assert np.allclose(answers[name].logprobs, answer.logprobs, atol=TOLERANCE)


def test_deterministic_runs_get_the_same_bits_with_half_the_memory():
    cores = [EngineCore(tiny.qwen3(), s, deterministic=True) for s in (tiny.settings(slots=8), tight(45, slots=8))]
    plenty, half = (run(core, mixed()) for core in cores)
    assert cores[1].use().preempted == 0, "a request takes what it may need when it begins"
    for name, answer in plenty.items():
        assert half[name].response_ids.tobytes() == answer.response_ids.tobytes()
        assert half[name].raw_logprobs.tobytes() == answer.raw_logprobs.tobytes()


acts = st.tuples(st.sampled_from(["add", "add", "step", "step", "step", "abort", "load", "nap"]), st.integers(0, 99))


@law(max_examples=60, deadline=None)
@given(st.lists(acts, max_size=40), st.integers(12, 24), st.integers(1, 6))
def test_in_any_schedule_every_request_is_answered_once_and_right(plan, blocks, slots):
    """Requests come, grow, fork conversations, are aborted and preempted; weights are swapped, the engine sleeps."""
    weights = {Version(number): tiny.qwen3(number) for number in range(3)}
    core = EngineCore(tiny.qwen3(0), tight(blocks, slots=slots, kept_prefixes=2))
    asked, done, version = {}, [], Version(0)
    for kind, value in plan:
        if kind == "add":
            prompt = [value // 90, *range(1, 2 + value % 20)]
            conversation = ("a", "b", None)[value % 3]
            one = request(len(asked), prompt, seed=value, max_tokens=1 + value % 23, conversation=conversation)
            asked[one.request_id] = one
            assert core.add(one) is None
        elif kind == "step":
            for _ in range(1 + value % 4):
                done += core.step()
                check_blocks(core)
        elif kind == "abort" and asked:
            done += core.abort([str(value % len(asked))])
        elif kind == "load":
            version = Version((version + 1) % 3)
            core.load(version, weights[version].state_dict())
        elif kind == "nap":
            core.sleep()
            core.wake()
        check_blocks(core)
    done += run(core).values()
    check_blocks(core)
    assert sorted(answer.request_id for answer in done) == sorted(asked), "each is answered once"
    for answer in done:
        assert answer.finish in (FinishReason.LENGTH, FinishReason.ABORT)
        if len(answer.versions) == 1 and len(answer.response_ids):
            model, prompt = weights[answer.versions[0].version], asked[answer.request_id].prompt_ids
            expected = tiny.reference_logprobs(model, prompt, answer.response_ids)
            assert np.abs(expected - answer.raw_logprobs).max() < TOLERANCE


def preempted_core():
    """A core of two requests, of which the younger was just preempted; what the younger had then."""
    core = EngineCore(tiny.qwen3(), tight(8, slots=2))
    for name in ("old", "young"):
        assert core.add(request(name, [1, 2, 3, 4], seed=len(name), max_tokens=24)) is None
    while not core.use().preempted:
        core.step()
    (work,) = core._waiting
    assert work.request.request_id == "young"
    return core, work.sampled


def test_a_preempted_request_goes_on_before_younger_ones_with_the_tokens_it_has():
    core, sampled = preempted_core()
    core.add(request("new", [5], max_tokens=1))
    assert core.use().queued_tokens == 2 * 24 - core.use().generated_tokens + 1
    order = []
    while not core.idle:
        order += core.step()
    assert [answer.request_id for answer in order] in (["old", "young", "new"], ["old", "new", "young"])
    young = next(answer for answer in order if answer.request_id == "young")
    assert young.response_ids[: len(sampled.ids)].tolist() == sampled.ids.tolist()
    alone = run(EngineCore(tiny.qwen3(), tiny.settings()), [request("young", [1, 2, 3, 4], seed=5, max_tokens=24)])
    assert young.response_ids.tolist() == alone["young"].response_ids.tolist()


def test_a_preempted_request_that_is_aborted_comes_back_with_its_tokens():
    core, sampled = preempted_core()
    (gone,) = core.abort(["young"])
    assert gone.finish is FinishReason.ABORT
    assert gone.response_ids.tolist() == sampled.ids.tolist()
    assert gone.raw_logprobs.tolist() == sampled.raw_logprobs.tolist()


def test_a_request_that_was_preempted_across_a_swap_is_computed_again_with_the_new_weights():
    core, sampled = preempted_core()
    core.load(Version(7), tiny.qwen3(1).state_dict())
    young = run(core)["young"]
    assert [(past.start, past.version) for past in young.versions] == [(0, 0), (len(sampled.ids), 7)]
    expected = tiny.reference_logprobs(tiny.qwen3(1), np.array([1, 2, 3, 4]), young.response_ids)
    after = slice(len(sampled.ids), None)
    assert np.abs(expected[after] - young.raw_logprobs[after]).max() < TOLERANCE
    before = slice(0, len(sampled.ids))
    assert young.raw_logprobs[before].tolist() == sampled.raw_logprobs.tolist()


def test_what_can_never_fit_is_refused_with_what_would_work():
    core = EngineCore(tiny.qwen3(), tight(5))
    answers = run(core, [request("x", [1] * 10, max_tokens=40), request("y", [1] * 30), request("good", [1] * 10)])
    assert {name: answer.finish.value for name, answer in answers.items()} == {
        "x": "error",
        "y": "error",
        "good": "length",
    }
    assert "engine.kv_gib" in answers["x"].error
    assert "holds 20" in answers["x"].error
    assert "sampling.max_tokens at most 11" in answers["x"].error
    assert "max_tokens at most" not in answers["y"].error, "the prompt alone does not fit"
    assert (
        run(EngineCore(tiny.qwen3(), tight(5)), [request("x", [1] * 10, max_tokens=11)])["x"].finish.value == "length"
    )


def test_the_amount_that_a_refusal_names_works():
    (refused,) = run(EngineCore(tiny.qwen3(), tight(5)), [request("x", [1] * 10, max_tokens=40)]).values()
    gib = float(refused.error.split("set engine.kv_gib to at least ")[1].split(",")[0])
    core = EngineCore(tiny.qwen3(), tiny.settings(kv_block=BLOCK, kv_gib=gib))
    assert run(core, [request("x", [1] * 10, max_tokens=40)])["x"].finish is FinishReason.LENGTH


def test_memory_for_no_block_at_all_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"engine.kv_gib is .*engine.kv_block\) takes .*set at least"):
        EngineCore(tiny.qwen3(), tight(0))
    assert EngineCore(tiny.qwen3(), tight(1)).idle


def test_all_engines_of_a_run_in_one_process_may_take_half_of_what_is_free_together(small_run, tmp_path, monkeypatch):
    free, made, affordable = 200 * BLOCK_BYTES, [], engine_core._affordable_blocks
    monkeypatch.setattr(engine_core, "free_bytes", lambda _: free)
    monkeypatch.setattr(engine_core, "_affordable_blocks", lambda *a, **o: made.append(affordable(*a, **o)) or made[-1])
    chosen = ["policies.one.instances=3", f"policies.one.engine.kv_block={BLOCK}", "steps=1", f"out={tmp_path}"]
    monkeypatch.setattr(EmbeddedSettings, "kv_bytes", lambda *_: KvBytes(BLOCK_BYTES // BLOCK, BLOCK_BYTES))
    settings = load_run(small_run, [*chosen, "evaluate.tasks=0"])
    assemble_run(settings).train(Console(quiet=True))
    assert [number + FIRST for number in made] == [33, 33, 33], "each a third of 100 blocks"
    on_ray = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"backend": "ray"})})
    assert on_ray.engines_of_a_device == 3, "on CPUs, all may be on one node"


def test_a_long_max_len_takes_no_memory_until_it_is_used():
    short, long = (EngineCore(tiny.qwen3(), tiny.settings(max_len=most, kv_block=BLOCK)) for most in (64, 8192))
    for core in (short, long):
        before = core.kv_held_bytes
        run(core, [request(index, [1] * 20, max_tokens=20) for index in range(4)])
        assert before < core.kv_held_bytes <= 2 * (FIRST + 4 * 40 / BLOCK) * BLOCK_BYTES
    assert long.kv_held_bytes == short.kv_held_bytes
