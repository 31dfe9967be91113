"""Decides how a request goes on at another instance, and what its caller gets of the parts."""

from dataclasses import replace

import numpy as np

from flexmarl.records import Generation, GenerationRequest, VersionRun


def rest_of(request: GenerationRequest, part: Generation) -> GenerationRequest:
    """What is left to ask after `part`: the same call, its prompt longer by what was sampled, its budget smaller.

    >>> rest_of(request, part).prompt_ids      # request asked after [1, 2], part answered [7]
    array([1, 2, 7], dtype=int32)
    """
    sampled = len(part.response_ids)
    if not sampled:
        return request
    return replace(
        request,
        prompt_ids=np.concatenate([request.prompt_ids, part.response_ids]),
        offset=request.offset + sampled,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - sampled),
    )


def joined(part: Generation, rest: Generation) -> Generation:
    """One answer of two: the tokens of both, the end of the second, and the versions that sampled each."""
    sampled = len(part.response_ids)
    if not sampled:
        return rest
    runs = list(part.versions)
    for run in rest.versions if len(rest.response_ids) else ():
        if run.version != runs[-1].version:
            runs.append(VersionRun(sampled + run.start, run.version))
    return replace(
        rest,
        response_ids=np.concatenate([part.response_ids, rest.response_ids]),
        logprobs=np.concatenate([part.logprobs, rest.logprobs]),
        raw_logprobs=np.concatenate([part.raw_logprobs, rest.raw_logprobs]),
        versions=tuple(runs),
        reused_tokens=part.reused_tokens,
    )
