"""Fakes and checks for agents: a model that answers by a script, and the laws that the turns of an episode keep."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from flexmarl.agents.context import Interrupted, OnTokens, context_hash, forget
from flexmarl.records import FinishReason, Generation, GenerationRequest, SampleId, Turn, Version, VersionRun

Script = Callable[[str, GenerationRequest], str]
"""(prompt as text with special tokens, request) -> the model's reply, without its end token."""


class ScriptedModel:
    """Generate function whose replies come from a script. It obeys `max_tokens` and all stops, token by token.

    A reply that begins with `!` stands for an engine's failure: the rest is the reason. Calls wait `delay_s` first.
    """

    def __init__(
        self, tokenizer: Any, script: Script, *, delay_s: Callable[[GenerationRequest], float] = lambda request: 0.0
    ) -> None:
        self.requests: list[GenerationRequest] = []
        """All requests, in order of arrival."""
        self._tokenizer, self._script, self._delay_s = tokenizer, script, delay_s

    async def __call__(
        self, request: GenerationRequest, /, *, interrupted: Interrupted = forget, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Answers one call. If the call is cancelled, nothing is sampled."""
        self.requests.append(request)
        await asyncio.sleep(self._delay_s(request))
        reply = self._script(self._tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False), request)
        if reply.startswith("!"):
            return self._generation(request, [], FinishReason.ERROR, reply[1:])
        wanted = [*self._tokenizer(reply, add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]
        ids: list[int] = []
        for token in wanted[: request.sampling.max_tokens]:
            ids.append(token)
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            if token in request.sampling.stop_ids or any(stop in text for stop in request.sampling.stop):
                return self._generation(request, ids, FinishReason.STOP)
        return self._generation(request, ids, FinishReason.LENGTH)

    def _generation(
        self, request: GenerationRequest, ids: list[int], finish: FinishReason, error: str = ""
    ) -> Generation:
        # Made up from this call's seed alone, so that a mix-up of two responses would show.
        logprobs = -np.random.default_rng(request.seed).random(len(ids)).astype(np.float32)
        return Generation(
            request_id=request.request_id,
            response_ids=np.asarray(ids, dtype=np.int32),
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, Version(0)),),
            finish=finish,
            error=error,
        )


def _in_its_branch(turn: Turn, parent: Turn) -> bool:
    if turn.path:  # A candidate in a tree of turns extends the turns on its own path.
        return turn.path[: len(parent.path)] == parent.path
    return parent.branch == turn.branch


def check_turns(turns: Iterable[Turn]) -> None:
    """Checks the laws that the turns of one episode keep; raises AssertionError naming the one that is broken.

    Hops are distinct. The call numbers of each agent increase. A turn with a parent extends the parent's exact ids. The
    context hash is that of policy and prompt. No failed call is among them.
    """
    turns = sorted(turns, key=lambda turn: turn.hop)
    by_id: dict[SampleId, Turn] = {turn.sample_id: turn for turn in turns}
    assert len(by_id) == len(turns), "two turns have one sample id"
    assert len({turn.hop for turn in turns}) == len(turns), "two turns have one hop"
    for agent in {turn.agent for turn in turns}:
        calls = [turn.call for turn in turns if turn.agent == agent]
        assert calls == sorted(set(calls)), f"calls of {agent} do not count up: {calls}"
    for turn in turns:
        assert turn.finish in (FinishReason.STOP, FinishReason.LENGTH), f"{turn.sample_id} is a failed call"
        assert turn.context_hash == context_hash(turn.policy, turn.prompt_ids), f"{turn.sample_id}: wrong hash"
        if turn.parent is not None:
            parent = by_id[turn.parent]
            history = np.concatenate((parent.prompt_ids, parent.response_ids))
            assert parent.agent == turn.agent, f"{turn.sample_id} extends another agent's turn"
            assert _in_its_branch(turn, parent), f"{turn.sample_id} extends another branch"
            extends = np.array_equal(turn.prompt_ids[: len(history)], history)
            assert extends, f"{turn.sample_id} does not extend the exact ids of its parent"
