"""The embedded engine's core asleep: what it frees, and that nobody can tell afterwards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as law
from hypothesis import strategies as st

from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.records import FinishReason, Version, VersionRun
from tests.unit.inference import models as tiny
from tests.unit.inference.models import request, run


def requests():
    return [request(i, [i % 50] * (3 + 5 * i), seed=i, max_tokens=6 + 3 * i) for i in range(7)]


def same(one, other):
    return one.response_ids.tolist() == other.response_ids.tolist() and np.array_equal(one.logprobs, other.logprobs)


def steps(core, number):
    return {answer.request_id: answer for _ in range(number) for answer in core.step()}


@given(naps=st.lists(st.integers(0, 8), max_size=5), slots=st.sampled_from([2, 4, 7]))
@law(max_examples=15, deadline=None)
def test_naps_between_steps_change_no_bit_of_what_is_sampled(naps, slots):
    undisturbed = run(EngineCore(tiny.qwen3(), tiny.settings(slots=slots)), requests())
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=slots))
    for one in requests():
        core.add(one)
    answers = {}
    for nap in naps:
        answers |= steps(core, nap)
        core.sleep()
        assert core.idle
        core.wake()
    answers |= run(core, [])
    assert answers.keys() == undisturbed.keys()
    assert all(same(answers[name], undisturbed[name]) for name in answers)


def test_asleep_only_the_keys_and_values_of_running_requests_are_kept():
    settings = tiny.settings(slots=8, max_len=64, kv_block=4)
    core = EngineCore(tiny.qwen3(), settings)
    run(core, [request("kept", [1] * 20, conversation="c")])
    core.sleep()
    assert core.kv_held_bytes == 0
    core.wake()
    for one in requests()[:2]:  # prompts of 3 and of 8 tokens
        core.add(one)
    steps(core, 3)
    awake = core.kv_held_bytes
    core.sleep()
    # 3 + 2 and 8 + 2 positions; 2 layers, keys and values, 2 key heads of 8 numbers.
    assert core.kv_held_bytes == (2 + 3) * settings.kv_bytes(2 * 2 * 2 * 8).block < awake


def test_an_abort_asleep_is_one_between_two_steps():
    def aborted(asleep):
        core = EngineCore(tiny.qwen3(), tiny.settings(slots=7))
        for one in requests():
            core.add(one)
        steps(core, 4)
        if asleep:
            core.sleep()
        (gone,) = core.abort(["2"])
        core.wake()
        assert (gone.finish, len(gone.response_ids)) == (FinishReason.ABORT, 4)
        return run(core, []) | {"2": gone}

    awake, asleep = aborted(False), aborted(True)
    assert all(same(asleep[name], awake[name]) for name in "0123456")


def test_weights_that_are_loaded_asleep_are_those_that_it_wakes_with():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=2))
    core.add(request(0, [1, 2, 3], max_tokens=4))
    steps(core, 2)
    core.sleep()
    core.load(Version(1), tiny.qwen3(1).state_dict())
    core.wake()
    (answer,) = run(core, []).values()
    assert answer.versions == (VersionRun(0, Version(0)), VersionRun(2, Version(1)))


@pytest.mark.parametrize(("nap", "reused"), [(False, 6), (True, 0)])
def test_kept_prefixes_are_gone_after_a_nap(nap, reused):
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=2))
    (first,) = run(core, [request(0, [1, 2, 3], max_tokens=4, conversation="talk")]).values()
    if nap:
        core.sleep()
        core.wake()
    prompt = [1, 2, 3, *first.response_ids.tolist(), 5]
    (second,) = run(core, [request(1, prompt, max_tokens=2, conversation="talk")]).values()
    assert second.reused_tokens == reused
