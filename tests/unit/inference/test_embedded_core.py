"""The embedded engine's core against an independent forward of the same model (laws 6 and 7)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as law
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flexmarl.errors import ConfigError, EngineError
from flexmarl.inference.backends.embedded.core import EngineCore
from flexmarl.inference.backends.embedded.kv_cache import row_groups
from flexmarl.inference.calls import joined, rest_of
from flexmarl.objects.interface import checksum
from flexmarl.records import FinishReason, Version, VersionRun
from flexmarl.training.backends.causal_lm import use_onednn
from tests.unit.inference import models as tiny
from tests.unit.inference.models import request, run

TOLERANCE = 1e-4


def ragged(count, *, seed=0, longest=60, **sampling):
    rng = np.random.default_rng(seed)
    return [
        request(
            index,
            rng.integers(0, tiny.VOCABULARY, rng.integers(1, 30)),
            seed=seed * 1000 + index,
            max_tokens=int(rng.integers(1, longest)),
            **sampling,
        )
        for index in range(count)
    ]


def worst(model, requests, answers):
    """(largest logprob difference from the plain forward, tokens compared)."""
    worst_one, tokens = 0.0, 0
    for one in requests:
        answer = answers[one.request_id]
        if len(answer.response_ids):
            expected = tiny.reference_logprobs(model, one.prompt_ids, answer.response_ids)
            worst_one = max(worst_one, float(np.abs(expected - answer.raw_logprobs).max()))
            tokens += len(answer.response_ids)
    return worst_one, tokens


def qwen3_on_onednn():
    model = tiny.qwen3()
    use_onednn(model)
    return model


@pytest.mark.parametrize(
    ("make_served", "make_plain"),
    [(tiny.qwen3, tiny.qwen3), (tiny.llama, tiny.llama), (qwen3_on_onednn, tiny.qwen3)],
)
def test_logprobs_of_ragged_batches_are_those_of_a_plain_forward(make_served, make_plain):
    requests = ragged(40)
    answers = run(EngineCore(make_served(), tiny.settings(slots=20)), requests)
    difference, tokens = worst(make_plain(), requests, answers)
    assert tokens > 1000
    assert difference < TOLERANCE
    assert all(len(answers[one.request_id].response_ids) == one.sampling.max_tokens for one in requests)


def test_rows_read_in_groups_give_the_same_logprobs():
    requests = [request(i, [i % 50] * (90 if i == 3 else 4), seed=i, max_tokens=30) for i in range(40)]
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=40, max_len=160))
    answers = run(core, requests)
    lengths = np.sort([len(one.prompt_ids) for one in requests])[::-1]
    assert len(row_groups(lengths, core._settings.kv_block, 1 << 20)) == 2
    assert worst(tiny.qwen3(), requests, answers)[0] < TOLERANCE


@law(deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=70), st.integers(1, 64), st.integers(1, 50_000))
def test_row_groups_cover_every_row_up_to_its_new_position_within_the_bound(lengths, block, most):
    lengths = np.sort(lengths)[::-1]
    groups = row_groups(lengths, block, most)
    assert [row for rows, _ in groups for row in range(rows.start, rows.stop)] == list(range(len(lengths)))
    for rows, top in groups:
        assert top % block == 0
        assert lengths[rows.start] < top <= lengths[rows.start] + block, "no block more than the longest row needs"
        assert rows.stop - rows.start == 1 or (rows.stop - rows.start) * top <= most


def test_logprobs_are_exact_with_stop_strings_aborts_and_joiners_in_between():
    requests = ragged(30, seed=3, stop=("ab", "xy"), stop_ids=(17,))
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=5), decode=tiny.letters)
    done, aborted = [], []
    for index, one in enumerate(requests):
        assert core.add(one) is None
        done += core.step()
        if index % 4 == 3:
            aborted += core.abort([requests[index - 2].request_id])
    answers = run(core) | {answer.request_id: answer for answer in done + aborted}
    assert answers.keys() == {one.request_id for one in requests}
    difference, tokens = worst(tiny.qwen3(), requests, answers)
    assert difference < TOLERANCE
    assert tokens > 200
    assert any(answer.finish is FinishReason.ABORT for answer in aborted)
    stopped = [answer for answer in answers.values() if answer.finish is FinishReason.STOP]
    assert stopped
    for answer in stopped:
        text, before = tiny.letters(answer.response_ids), tiny.letters(answer.response_ids[:-1])
        assert answer.response_ids[-1] == 17 or any(stop in text for stop in ("ab", "xy"))
        assert 17 not in answer.response_ids[:-1]
        assert not any(stop in before for stop in ("ab", "xy"))


def test_logprobs_are_exact_after_prefix_reuse():
    core = EngineCore(tiny.qwen3(), tiny.settings())
    first = request("first", range(20), seed=1, max_tokens=10, conversation="c")
    answer = run(core, [first])["first"]
    longer = np.concatenate([first.prompt_ids, answer.response_ids, [3, 4, 5]])
    second = request("second", longer, seed=2, max_tokens=12, conversation="c")
    branch = request("branch", [*range(15), 60, 60], seed=3, max_tokens=12, conversation="c")
    other = request("other", longer, seed=2, max_tokens=12)
    answers = run(core, [second, branch, other])
    # The last sampled token was never fed, so 20 + 9 positions were kept. The other one has the prompt of the second.
    assert {name: answers[name].reused_tokens for name in answers} == {"second": 29, "branch": 15, "other": 32}
    assert worst(tiny.qwen3(), [second, branch, other], answers)[0] < TOLERANCE
    assert answers["second"].response_ids.tolist() == answers["other"].response_ids.tolist()


@law(max_examples=25, deadline=None)
@given(
    head=st.integers(0, 20),
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    copies=st.integers(2, 6),
    block=st.sampled_from([1, 4, 16]),
    slots=st.integers(2, 12),
    budget=st.integers(0, 40),
    later=st.integers(0, 5),
)
def test_requests_share_prompts_and_what_they_begin_with_and_their_logprobs_are_exact(
    head, prompts, copies, block, slots, budget, later
):
    # A few blocks more than the longest request takes, so that some are preempted.
    gib = (2 + -(-60 // block) + budget) * block * 2 * 2 * 2 * 8 * 4 / (1 << 30)
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=slots, kv_block=block, kv_gib=gib, kept_prefixes=0))
    requests = [
        request(
            f"{index}/{copy}",
            [*range(head), index * 3 + 1, *range(length)],
            seed=10 * index + copy,
            max_tokens=2 + 3 * copy,
        )
        for index, length in enumerate(prompts)
        for copy in range(copies)
    ]
    done = []
    for number, one in enumerate(requests):
        assert core.add(one) is None
        if number % (later + 1) == later:
            done += core.step()
    answers = {answer.request_id: answer for answer in done} | run(core)
    assert worst(tiny.qwen3(), requests, answers)[0] < TOLERANCE
    assert all(len(answers[one.request_id].response_ids) == one.sampling.max_tokens for one in requests)
    assert core._ledger.free == core.kv_blocks, "no block is lost"
    assert not core._ledger._shared


def test_a_group_joins_a_step_after_its_first_request_and_computes_one_token_each():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=9))
    group = [request(index, range(20), seed=index, max_tokens=5) for index in range(8)]
    for one in [*group[:7], request("other", [3, 4], max_tokens=5), group[7]]:
        core.add(one)
    core.step()
    assert core.use().running == 2, "the first of the group, and another prompt that overtakes the rest"
    core.step()
    assert core.use().running == 9
    answers = run(core)
    assert [answers[one.request_id].reused_tokens for one in group] == [0] + [19] * 7
    late = run(core, [request("late", range(20))])["late"]
    assert late.reused_tokens == 0, "nobody has the prompt any more"


def test_prompts_that_begin_alike_wait_for_who_computes_that_and_groups_wait_once_more():
    """Four prompts behind one system prompt, twice each."""
    core, system = EngineCore(tiny.qwen3(), tiny.settings(slots=9, kv_block=16)), range(20)
    asked = [
        request(f"{task}/{copy}", [*system, 10 + task, *range(10)], seed=copy, conversation=f"{task}/{copy}")
        for task in range(4)
        for copy in range(2)
    ]
    for one in asked:
        core.add(one)
    running = [(core.step(), core.use().running)[1] for _ in range(3)]
    assert running == [1, 5, 8], "the first; its copy and the other three; their copies"
    answers = run(core)
    assert [answers[one.request_id].reused_tokens for one in asked] == [0, 30, 16, 30, 16, 30, 16, 30]
    late = request("late", [*system, 9, 9], conversation="new")
    assert run(core, [late])["late"].reused_tokens == 16, "the conversations keep it"
    assert worst(tiny.qwen3(), asked, answers)[0] < TOLERANCE


def test_prompts_of_requests_that_end_at_once_wait_for_one_step_only():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=8))
    for index in range(8):
        core.add(request(index, range(20), max_tokens=1))
    assert [len(core.step()) for _ in range(2)] == [1, 7]


def test_a_request_that_waits_for_its_prompt_keeps_its_place_in_the_line_and_a_slot():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=2))
    for name, prompt, tokens in (("first", 7, 9), ("same", 7, 2), ("long", 8, 9), ("last", 9, 9)):
        core.add(request(name, [prompt] * 20, max_tokens=tokens))
    core.step()
    assert core.use().running == 1
    assert [answer.request_id for _ in range(2) for answer in core.step()] == ["same"]
    core.step()
    assert {answer.request_id: len(answer.response_ids) for answer in core.abort()} == {
        "first": 4,
        "long": 1,
        "last": 0,
    }


def test_prompts_that_go_on_from_one_another_wait_for_two_steps_at_most():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=20))
    for index in range(1, 10):
        core.add(request(index, [3] * (4 * index + 1), max_tokens=9))
    running = [(core.step(), core.use().running)[1] for _ in range(3)]
    assert running[0] < 9
    assert running[-1] == 9


def test_prompts_are_the_same_by_their_numbers_whatever_holds_them():
    wide = np.array([5, 6, 7, 8, 3])
    core = EngineCore(tiny.qwen3(), tiny.settings())
    core.add(request("narrow", wide.view(np.int32), max_tokens=9))
    core.step()
    asked = replace(request("wide", [0]), prompt_ids=wide)
    answers = run(core, [asked])
    assert answers["wide"].reused_tokens == 0
    assert worst(tiny.qwen3(), [asked], {"wide": answers["wide"]})[0] < TOLERANCE


@pytest.mark.parametrize("end", ["load", "sleep", "reuse", "deterministic"])
def test_a_prompt_is_not_shared_across_weights_and_not_without_reuse(end):
    settings = tiny.settings(slots=4, prefix_reuse=end != "reuse")
    core = EngineCore(tiny.qwen3(0), settings, deterministic=end == "deterministic")
    core.add(request("first", range(20), max_tokens=9))
    core.step()
    if end == "load":
        core.load(Version(1), tiny.qwen3(1).state_dict())
    elif end == "sleep":
        core.sleep()
        core.wake()
    second = request("second", range(20), max_tokens=3)
    answer = run(core, [second])["second"]
    assert answer.reused_tokens == 0
    assert worst(tiny.qwen3(1 if end == "load" else 0), [second], {"second": answer})[0] < TOLERANCE


def test_conversations_beyond_the_kept_rows_are_computed_anew_and_right():
    core = EngineCore(tiny.qwen3(), tiny.settings(kept_prefixes=2))
    firsts = [request(f"{name}1", [index] * 9, max_tokens=4, conversation=name) for index, name in enumerate("abcd")]
    answers = run(core, firsts)
    seconds = [
        request(
            f"{one.conversation}2",
            [*one.prompt_ids, *answers[one.request_id].response_ids, 5],
            max_tokens=6,
            conversation=one.conversation,
        )
        for one in firsts
    ]
    answers = run(core, seconds)
    assert [answers[f"{name}2"].reused_tokens > 0 for name in "abcd"] == [False, False, True, True]
    assert worst(tiny.qwen3(), seconds, answers)[0] < TOLERANCE


@torch.no_grad()
def swapped_reference(old, new, prompt, response, swap_at):
    """Raw logprobs if tokens from `swap_at` on see new weights over the keys and values that the old ones left."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    fed_before = len(prompt) + swap_at - 1
    first = old(input_ids=ids[:, :fed_before], use_cache=True)
    second = new(input_ids=ids[:, fed_before:-1], past_key_values=first.past_key_values, use_cache=True)
    logits = torch.cat([first.logits[0, len(prompt) - 1 :], second.logits[0]])
    return torch.log_softmax(logits.double(), -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_a_weight_swap_in_the_middle_serves_each_token_from_its_recorded_version():
    old, new = tiny.qwen3(0), tiny.qwen3(1)
    core = EngineCore(tiny.qwen3(0), tiny.settings(), version=Version(4))
    requests = ragged(8, seed=5)
    for one in requests:
        core.add(one)
    early = [answer for _ in range(9) for answer in core.step()]
    assert core.load(Version(5), new.state_dict()) == checksum(new.state_dict())
    answers = run(core) | {answer.request_id: answer for answer in early}
    swaps = 0
    for one in requests:
        answer = answers[one.request_id]
        runs = answer.versions
        if len(runs) == 2:
            swaps += 1
            assert [step.version for step in runs] == [4, 5]
            expected = swapped_reference(old, new, one.prompt_ids, answer.response_ids, runs[1].start)
        else:
            assert runs[0].start == 0
            expected = tiny.reference_logprobs({4: old, 5: new}[runs[0].version], one.prompt_ids, answer.response_ids)
        assert np.abs(expected - answer.raw_logprobs).max() < TOLERANCE
    assert swaps >= 2
    assert {runs.version for answer in answers.values() for runs in answer.versions} == {4, 5}


def test_a_weight_load_drops_kept_prefixes_and_keeps_none_of_mixed_versions():
    core = EngineCore(tiny.qwen3(0), tiny.settings())
    run(core, [request("before", range(10), conversation="a")])
    core.add(request("across", range(11, 21), conversation="b", max_tokens=6))
    core.step()
    core.load(Version(0), tiny.qwen3(2).state_dict())
    core.step()
    core.load(Version(0), tiny.qwen3(1).state_dict())
    run(core)
    seconds = [
        request(f"{name}2", [*prompt, 9], conversation=name)
        for name, prompt in (("a", range(10)), ("b", range(11, 21)))
    ]
    answers = run(core, seconds)
    assert [answers[f"{name}2"].reused_tokens for name in "ab"] == [0, 0]
    assert worst(tiny.qwen3(1), seconds, answers)[0] < TOLERANCE


def test_logprobs_under_the_sampling_distribution_renormalise_the_raw_ones():
    one = request("r", [5, 6], seed=9, max_tokens=25, temperature=0.7, top_k=5)
    answer = run(EngineCore(tiny.qwen3(), tiny.settings()), [one])["r"]
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, answer.response_ids])).long()[None]
    with torch.no_grad():
        scaled = tiny.qwen3()(input_ids=ids).logits[0, 1:-1].double() / 0.7
    best = scaled.topk(5)
    expected = torch.log_softmax(scaled.masked_fill(scaled < best.values[:, -1:], -torch.inf), -1)
    picked = expected.gather(1, ids[0, 2:, None])[:, 0].numpy()
    assert np.abs(picked - answer.logprobs).max() < TOLERANCE
    assert (answer.logprobs > answer.raw_logprobs).any()


def test_greedy_rows_follow_the_likeliest_path():
    one = request("r", [5, 6], max_tokens=15, temperature=0.0)
    answer = run(EngineCore(tiny.qwen3(), tiny.settings()), [one, *ragged(6)])["r"]
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, answer.response_ids])).long()[None]
    with torch.no_grad():
        assert tiny.qwen3()(input_ids=ids).logits[0, 1:-1].argmax(-1).tolist() == answer.response_ids.tolist()
    assert answer.logprobs.tolist() == [0.0] * 15


requests_in_company = st.lists(
    st.tuples(
        st.integers(1, 25),  # prompt length
        st.integers(1, 12),  # tokens
        st.sampled_from([{}, {"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}]),
        st.integers(0, 3),  # steps until it arrives
    ),
    min_size=1,
    max_size=10,
)
CORE, ONEDNN_CORE = (
    EngineCore(make_model(), tiny.settings(slots=5, max_len=64), deterministic=True)
    for make_model in (tiny.qwen3, qwen3_on_onednn)
)


@law(max_examples=40, deadline=None)
@given(st.sampled_from([CORE, ONEDNN_CORE]), requests_in_company, st.integers(0, 100))
@example(CORE, [(1, 5, {}, 0)] * 4, 0)  # the subject in the fifth row
@example(ONEDNN_CORE, [(1, 5, {}, 0)] * 4, 0)
def test_deterministic_mode_gives_the_same_bits_in_any_company(core, company, seed):
    """Law 6: neither who else is in the batch nor when requests arrive changes one bit."""
    subject = request("subject", [7, 8, 9, 10, 11], seed=77, max_tokens=14, top_p=0.95)
    alone = run(core, [subject])["subject"]
    rng = np.random.default_rng(seed)
    place = int(rng.integers(0, len(company) + 1))
    done = []
    for index in range(len(company) + 1):
        if index == place:
            core.add(subject)
        if index < len(company):
            size, tokens, sampling, wait = company[index]
            core.add(request(index, rng.integers(0, tiny.VOCABULARY, size), seed=index, max_tokens=tokens, **sampling))
            for _ in range(wait):
                done += core.step()
    answers = run(core) | {answer.request_id: answer for answer in done}
    same = answers["subject"]
    assert same.response_ids.tobytes() == alone.response_ids.tobytes()
    assert same.logprobs.tobytes() == alone.logprobs.tobytes()
    assert same.raw_logprobs.tobytes() == alone.raw_logprobs.tobytes()


def test_deterministic_mode_fills_a_slot_to_its_end_without_touching_the_next():
    requests = [request(i, [i] * (64 if i == 2 else 50), max_tokens=40, seed=i) for i in range(5)]
    answers = run(CORE, requests)
    assert [len(answers[str(i)].response_ids) for i in range(5)] == [15, 15, 1, 15, 15]
    assert worst(tiny.qwen3(), requests, answers)[0] < TOLERANCE


def test_the_seed_alone_decides_in_normal_mode_too():
    one = request("r", [4, 5, 6], seed=11, max_tokens=20)
    alone = run(EngineCore(tiny.qwen3(), tiny.settings()), [one])["r"]
    company = run(EngineCore(tiny.qwen3(), tiny.settings(slots=9)), [*ragged(8), one])["r"]
    other = run(EngineCore(tiny.qwen3(), tiny.settings()), [request("r", [4, 5, 6], seed=12, max_tokens=20)])["r"]
    assert company.response_ids.tolist() == alone.response_ids.tolist()
    assert other.response_ids.tolist() != alone.response_ids.tolist()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request("x", np.zeros(97)), "engine.max_len), got 97"),
        (request("x", []), "(policies.solver.engine.max_len), got 0"),
        (request("x", [1, 61]), "0 to 60"),
        (request("x", [-1]), "got -1"),
        (request("x", max_tokens=0), "max_tokens must be at least 1, got 0"),
        (request("x", temperature=-1.0), "temperature >= 0"),
        (request("x", top_p=0.0), "top_p > 0"),
        (request("x", stop=("a",)), "tokenizer"),
        (replace(request("x"), offset=3), "offset must be 0 to 2"),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone_and_says_why(bad, words):
    answers = run(EngineCore(tiny.qwen3(), tiny.settings()), [bad, request("good")])
    assert answers["x"].finish is FinishReason.ERROR
    assert words in answers["x"].error
    assert answers["x"].response_ids.size == 0
    assert answers["good"].finish is FinishReason.LENGTH


def test_a_prompt_that_fills_its_slot_gets_one_token():
    answer = run(EngineCore(tiny.qwen3(), tiny.settings()), [request("r", np.ones(96), max_tokens=9)])["r"]
    assert (len(answer.response_ids), answer.finish) == (1, FinishReason.LENGTH)


def test_logits_that_are_not_finite_end_the_request_and_poison_nobody_after_it():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=2))
    good = {name: tensor.clone() for name, tensor in tiny.qwen3().state_dict().items()}
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    core.load(Version(1), broken)
    answers = run(core, [request(i, [1] * 30, conversation="c") for i in range(3)])
    assert {answer.finish for answer in answers.values()} == {FinishReason.ERROR}
    assert "not finite" in answers["0"].error
    assert answers["0"].response_ids.size == 0
    core.load(Version(2), good)
    requests = ragged(6)
    assert worst(tiny.qwen3(), requests, run(core, requests))[0] < TOLERANCE


def test_aborted_requests_come_back_with_what_they_have_wherever_they_are():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=2))
    for name in "abc":
        core.add(request(name, max_tokens=20))
    for _ in range(5):
        core.step()
    ended = {answer.request_id: answer for answer in core.abort(["a", "c", "nobody"])}
    assert {name: len(answer.response_ids) for name, answer in ended.items()} == {"a": 5, "c": 0}
    assert {answer.finish for answer in ended.values()} == {FinishReason.ABORT}
    assert run(core)["b"].finish is FinishReason.LENGTH
    assert core.abort(["a"]) == []


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_that_goes_on_at_another_instance_gets_the_tokens_of_an_uninterrupted_one(deterministic):
    def core():
        return EngineCore(tiny.qwen3(), tiny.settings(), deterministic=deterministic, decode=tiny.letters)

    asked = [request(i, (1, 2, 3 + i), seed=i, max_tokens=40, top_k=20, stop=("mno",)) for i in range(4)]
    whole = run(core(), asked)
    first, second = core(), core()
    for one in asked:
        first.add(one)
    parts = {answer.request_id: answer for _ in range(11) for answer in first.step()}
    aborted = {answer.request_id: answer for answer in first.abort()}
    assert {len(part.response_ids) for part in aborted.values()} == {11}, "the witness: they were interrupted"
    rests = run(second, [rest_of(asked[int(name)], part) for name, part in aborted.items()])
    parts |= {name: joined(aborted[name], rest) for name, rest in rests.items()}
    for name, answer in whole.items():
        assert parts[name].response_ids.tolist() == answer.response_ids.tolist()
        assert parts[name].finish is answer.finish
        assert np.allclose(parts[name].raw_logprobs, answer.raw_logprobs, atol=TOLERANCE)
        if deterministic:
            assert parts[name].logprobs.tobytes() == answer.logprobs.tobytes()
            assert parts[name].raw_logprobs.tobytes() == answer.raw_logprobs.tobytes()
    assert second.use().generated_tokens == sum(len(rest.response_ids) for rest in rests.values())


def test_a_deterministic_request_goes_on_with_the_tokens_that_it_has_whatever_newer_weights_would_draw():
    def core(version):
        return EngineCore(tiny.qwen3(version), tiny.settings(), deterministic=True, version=Version(version))

    asked = request("r", (1, 2, 3), seed=5, max_tokens=20)
    first, second = core(0), core(1)
    first.add(asked)
    for _ in range(8):
        first.step()
    (part,) = first.abort()
    second.add(rest_of(asked, part))
    for _ in range(3):
        second.step()
    (nothing,) = second.abort()
    assert (nothing.finish, len(nothing.response_ids)) == (FinishReason.ABORT, 0), "its tokens are not sampled twice"
    rest = run(second, [rest_of(asked, part)])["r"]
    other = run(core(1), [asked])["r"]
    assert other.response_ids[:8].tolist() != part.response_ids.tolist(), "the witness: other weights, other tokens"
    assert (len(rest.response_ids), rest.versions, rest.finish) == (
        12,
        (VersionRun(0, Version(1)),),
        FinishReason.LENGTH,
    )
    whole = np.concatenate([part.response_ids, rest.response_ids])
    expected = tiny.reference_logprobs(tiny.qwen3(1), asked.prompt_ids, whole)[8:]
    assert np.abs(expected - rest.raw_logprobs).max() < TOLERANCE


def test_a_stop_string_that_began_at_another_instance_ends_the_response():
    core = EngineCore(tiny.qwen3(), tiny.settings(), decode=tiny.letters)
    ids = run(core, [request("free", seed=3, max_tokens=12)])["free"].response_ids
    stop = tiny.letters(ids[3:6].tolist())
    end = next(n for n in range(1, 13) if stop in tiny.letters(ids[:n].tolist()))
    asked = request("cut", seed=3, max_tokens=12, stop=(stop,))
    core.add(asked)
    while core.use().generated_tokens < 12 + end - 1:
        core.step()
    (part,) = core.abort()
    answer = run(core, [rest_of(asked, part)])["cut"]
    assert (answer.finish, answer.response_ids.tolist()) == (FinishReason.STOP, ids[end - 1 : end].tolist())


def test_the_load_counts_slots_queue_and_tokens_to_come():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=2), version=Version(3))
    for index, name in enumerate("abc"):
        core.add(request(name, [index, 1, 2], max_tokens=10))
    core.step()
    use = core.use()
    assert (use.running, use.queued, use.queued_tokens, use.generated_tokens, use.version) == (2, 1, 28, 2, 3)
    assert use.kv_use == pytest.approx(2 / ((2 + 3) * 3)), "a block for each of two rows; 3 of 32 hold 96 tokens"
    run(core)
    assert core.use().queued_tokens == 0


@pytest.mark.parametrize("tied", [True, False])
def test_weights_load_under_one_or_all_names_of_tied_tensors(tied):
    new = tiny.qwen3(1, tied=tied).state_dict()
    core = EngineCore(tiny.qwen3(0, tied=tied), tiny.settings())
    assert core.load(Version(1), new) == checksum(new)
    if tied:
        fewer = {name: tensor for name, tensor in new.items() if name != "lm_head.weight"}
        assert core.load(Version(2), fewer) == checksum(fewer)
    one = request("r", max_tokens=20)
    assert worst(tiny.qwen3(1, tied=tied), [one], run(core, [one]))[0] < TOLERANCE


def test_weights_that_do_not_fit_are_refused_whole():
    core, good = EngineCore(tiny.qwen3(0), tiny.settings()), dict(tiny.qwen3(1).state_dict())
    name = "model.norm.weight"
    for broken, words in [
        ({**good, "extra": good[name]}, "no weight 'extra'"),
        ({key: tensor for key, tensor in good.items() if key != name}, "no weight 'model.norm.weight'"),
        ({**good, name: torch.ones(5)}, "got (5,)"),
        ({**good, name: good[name].double()}, "got (32,) torch.float64"),
        ({**good, "lm_head.weight": good["lm_head.weight"] + 1}, "values differ"),
    ]:
        with pytest.raises(EngineError) as caught:
            core.load(Version(9), broken)
        assert words in str(caught.value)
    one = request("r", max_tokens=20)
    assert core.version == 0
    assert worst(tiny.qwen3(0), [one], run(core, [one]))[0] < TOLERANCE


@pytest.mark.parametrize(
    "model",
    [
        lambda: Qwen3ForCausalLM(
            Qwen3Config(**tiny.SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
        ),
        lambda: Gemma2ForCausalLM(Gemma2Config(**tiny.SHAPE)),
    ],
)
def test_a_model_with_sliding_windows_is_refused_with_what_works(model):
    with pytest.raises(ConfigError, match=r"full attention in every layer.*Qwen3"):
        EngineCore(model(), tiny.settings())


def test_deterministic_mode_reuses_no_prefix():
    core = EngineCore(tiny.qwen3(), tiny.settings(), deterministic=True)
    first = run(core, [request("a", conversation="c")])["a"]
    longer = np.concatenate([[1, 2, 3], first.response_ids, [5]])
    assert run(core, [request("b", longer, conversation="c")])["b"].reused_tokens == 0


def test_version_runs_start_at_zero_even_when_weights_change_before_the_first_token():
    core = EngineCore(tiny.qwen3(), tiny.settings(slots=1))
    core.add(request("a", max_tokens=3))
    core.add(request("b", max_tokens=3))
    core.step()
    core.load(Version(1), tiny.qwen3(1).state_dict())
    core.load(Version(2), tiny.qwen3(2).state_dict())
    answers = run(core)
    assert answers["a"].versions == (VersionRun(0, Version(0)), VersionRun(1, Version(2)))
    assert answers["b"].versions == (VersionRun(0, Version(2)),)
