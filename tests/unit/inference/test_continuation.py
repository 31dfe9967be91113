"""A request that goes on at another instance is one call with one answer."""

import numpy as np

from flexmarl.inference.calls import joined, rest_of
from flexmarl.records import FinishReason, Generation, Version, VersionRun
from tests.unit.inference.models import request


def generation(ids, *runs, finish=FinishReason.STOP, reused=0):
    logprobs = -np.asarray(ids, np.float32)
    return Generation(
        request_id="r",
        response_ids=np.asarray(ids, np.int32),
        logprobs=logprobs,
        raw_logprobs=2 * logprobs,
        versions=tuple(VersionRun(start, Version(version)) for start, version in runs),
        finish=finish,
        reused_tokens=reused,
    )


def test_the_rest_asks_after_what_was_sampled_for_what_is_left():
    rest = rest_of(request("r", (1, 2), seed=5, max_tokens=8), generation([7, 8, 9], (0, 0)))
    assert (rest.request_id, rest.seed, rest.offset, rest.sampling.max_tokens) == ("r", 5, 3, 5)
    assert rest.prompt_ids.tolist() == [1, 2, 7, 8, 9]
    again = rest_of(rest, generation([4], (0, 0)))
    assert (again.offset, again.sampling.max_tokens, again.prompt_ids.tolist()) == (4, 4, [1, 2, 7, 8, 9, 4])


def test_the_answer_has_the_tokens_of_both_parts_and_says_which_version_sampled_each():
    part = generation([7, 8], (0, 1), (1, 2), finish=FinishReason.ABORT, reused=4)
    whole = joined(part, generation([9, 6], (0, 2), (1, 3), reused=9))
    assert whole.response_ids.tolist() == [7, 8, 9, 6]
    assert whole.logprobs.tolist() == [-7, -8, -9, -6]
    assert whole.raw_logprobs.tolist() == [-14, -16, -18, -12]
    assert [(run.start, run.version) for run in whole.versions] == [(0, 1), (1, 2), (3, 3)]
    assert (whole.finish, whole.reused_tokens) == (FinishReason.STOP, 4)


def test_a_part_without_tokens_changes_nothing():
    one, nothing = request("r"), generation([], (0, 1), finish=FinishReason.ABORT)
    assert rest_of(one, nothing) is one
    rest = generation([9], (0, 2))
    assert joined(nothing, rest) is rest
    ended = joined(generation([9], (0, 1)), generation([], (0, 2), finish=FinishReason.ERROR))
    assert [(run.start, run.version) for run in ended.versions] == [(0, 1)]
    assert (ended.finish, ended.response_ids.tolist()) == (FinishReason.ERROR, [9])
