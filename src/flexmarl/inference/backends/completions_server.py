"""Engine of frozen policies on a server with OpenAI's completions API that takes and returns token ids, such as vLLM's.

consumes:     requests; each is one streamed HTTP call
waits for:    the server; its client sends a call again that meets status 408, 409, 429 or 5xx, or no connection
produces:     generations, in the order in which the server ends them
unblocked by: tokens, or `timeout_s` without any
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexmarl.errors import ConfigError, EngineError, MissingExtra
from flexmarl.inference.interface import EngineCapabilities, EngineParts
from flexmarl.inference.settings import OpenAISettings
from flexmarl.records import EngineUse, FinishReason, Generation, GenerationRequest, VersionRun

try:
    import httpx2  # pyright: ignore[reportMissingImports]
    from openai import (  # pyright: ignore[reportMissingImports] - the extra
        APIConnectionError,
        APIError,
        APIStatusError,
        AsyncOpenAI,
        AuthenticationError,
        NotFoundError,
        PermissionDeniedError,
    )
except ImportError as error:
    raise MissingExtra("openai", "policies.NAME.engine.type openai") from error

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_NO_KEY = "none"
"""Sent where no key is set: the client wants one, and servers without keys ignore it."""


@dataclass(slots=True, eq=False)
class _Answer:
    """An answer as far as it has come."""

    request: GenerationRequest
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""

    def take(self, choice: Any) -> None:
        """Takes the tokens of one chunk. Raises ValueError if it lacks their ids or log-probabilities."""
        found = choice.logprobs.token_logprobs if choice.logprobs else []
        ids = (choice.model_extra or {}).get("token_ids") or []
        if len(ids) != len(found) or None in found:
            raise ValueError(
                f"the server sent {len(ids)} token ids and {len(found)} log-probabilities; it must know "
                "`return_token_ids` and `logprobs`, as vLLM's does"
            )
        self.ids += ids
        self.logprobs += found
        if choice.finish_reason is not None:
            self.finish = _FINISHES.get(choice.finish_reason, FinishReason.ERROR)
            self.error = "" if choice.finish_reason in _FINISHES else f"the server ended it: {choice.finish_reason}"

    def fail(self, reason: str) -> None:
        """Ends the answer with an error."""
        self.finish, self.error = FinishReason.ERROR, reason


class _Server:
    """The server of one policy."""

    def __init__(self, settings: OpenAISettings, policy: str) -> None:
        """Raises ConfigError if the variable that should hold the server's key is not set."""
        key = os.environ.get(settings.key_env) if settings.key_env else _NO_KEY
        self._settings, self._at = settings, f"policies.{policy}.engine"
        if not key:
            raise ConfigError(
                f"{self._at}.key_env is '{settings.key_env}', but that environment variable is not set here; set it "
                "where flexmarl starts, or leave key_env out for a server without keys"
            )
        self.client = AsyncOpenAI(
            base_url=settings.url,
            api_key=key,
            timeout=httpx2.Timeout(settings.timeout_s, connect=min(10.0, settings.timeout_s)),
            max_retries=settings.retries,
        )

    async def look_for_the_model(self) -> None:
        try:
            found = [model.id async for model in self.client.models.list()]
        except (AuthenticationError, PermissionDeniedError) as error:
            raise ConfigError(self.key_refused(error)) from None
        except NotFoundError:  # A server without this path may still serve the model.
            return
        except (APIError, httpx2.HTTPError) as error:
            raise EngineError(self.no_answer(error)) from error
        if self._settings.model not in found:
            raise ConfigError(
                f"{self._at}.model is '{self._settings.model}', which {self._settings.url} does not serve; it serves: "
                f"{', '.join(found) or 'nothing'}"
            )

    def key_refused(self, error: APIStatusError) -> str:
        """The server's own words may hold the key."""
        key = f"the key in ${self._settings.key_env}" if self._settings.key_env else "a request without a key"
        return (
            f"{self._at}.url: {self._settings.url} refused {key} (status {error.status_code}); check {self._at}.key_env"
        )

    def no_answer(self, error: Exception) -> str:
        return (
            f"{self._at}.url: {self._settings.url} does not answer, after {self._settings.retries} retries "
            f"({type(error).__name__}: {error}); check that the server is up, or raise {self._at}.timeout_s"
        )


class CompletionsServerEngine:
    """`InferenceEngine` in front of a server. It serves the one model of its settings, and loads no weights."""

    def __init__(self, settings: OpenAISettings, parts: EngineParts) -> None:
        """Raises ConfigError if the variable that should hold the server's key is not set."""
        self._server = _Server(settings, parts.policy)
        self._client = self._server.client
        self._settings, self._policy, self._version = settings, parts.policy, parts.version
        self._running: dict[str, tuple[_Answer, asyncio.Task[None]]] = {}
        self._generated = 0
        self._is_known = self._is_closed = False

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, in completion order."""
        if self._is_closed:
            raise EngineError(f"the engine of '{self._policy}' is closed")
        refused: list[_Answer] = []
        mine = dict[asyncio.Task[None], _Answer]()
        for answer in map(_Answer, requests):
            if problem := self._problem(answer.request):
                answer.fail(problem)
                refused.append(answer)
                continue
            name = answer.request.request_id
            task = asyncio.create_task(self._read(answer), name=f"completion {name}")
            self._running[name], mine[task] = (answer, task), answer
        try:
            for answer in refused:
                yield self._generation(answer)
            while mine:
                done, _ = await asyncio.wait(mine, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: len(mine[task].ids)):
                    answer = mine.pop(task)
                    del self._running[answer.request.request_id]
                    if task.cancelled():
                        answer.finish = FinishReason.ABORT
                    else:
                        task.result()
                    self._generated += len(answer.ids)
                    yield self._generation(answer)
        finally:
            for task, answer in mine.items():
                del self._running[answer.request.request_id]
                task.cancel()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Hangs up; the server drops such requests. The tokens that have come are the answer."""
        for _, task in (self._running[name] for name in request_ids if name in self._running):
            task.cancel()

    async def usage(self) -> EngineUse:
        """The load that this engine puts on the server; others' is not known."""
        left = sum(one.request.sampling.max_tokens - len(one.ids) for one, _ in self._running.values())
        return EngineUse(
            running=len(self._running), queued_tokens=left, generated_tokens=self._generated, version=self._version
        )

    async def capabilities(self) -> EngineCapabilities:
        """It only generates.

        The first call looks for the model on the server. Raises ConfigError if the server refuses the key or lacks the
        model, and EngineError if it does not answer.
        """
        if not self._is_known:
            await self._server.look_for_the_model()
            self._is_known = True
        return EngineCapabilities()

    async def close(self) -> None:
        """Hangs up. A second call does nothing."""
        self._is_closed = True
        await self.abort(list(self._running))
        await self._client.close()

    async def _read(self, answer: _Answer) -> None:
        """Reads one answer to its end; cancelled, it hangs up. Raises EngineError if the server is lost."""
        try:
            stream = await self._client.completions.create(**_asked(self._settings.model, answer.request))
            async with stream as chunks:
                async for chunk in chunks:
                    for choice in chunk.choices:
                        answer.take(choice)
            if answer.finish is None:
                raise APIConnectionError(message="it hung up", request=stream.response.request)
        except (AuthenticationError, PermissionDeniedError) as error:
            raise EngineError(self._server.key_refused(error)) from None
        except APIStatusError as error:
            answer.fail(f"{self._settings.url} answered {error.status_code}: {error.message}")
        except ValueError as error:
            answer.fail(f"{self._settings.url}: {error}")
        except (APIConnectionError, httpx2.HTTPError) as error:
            raise EngineError(self._server.no_answer(error)) from error

    def _problem(self, request: GenerationRequest) -> str:
        if request.policy != self._policy:
            return f"this engine serves policy '{self._policy}', not '{request.policy}'"
        if request.request_id in self._running:
            return f"request id '{request.request_id}' is in use; ids must be unique among running requests"
        return "" if len(request.prompt_ids) else "the prompt is empty"

    def _generation(self, answer: _Answer) -> Generation:
        logprobs = np.asarray(answer.logprobs, np.float32)
        assert answer.finish is not None
        return Generation(
            request_id=answer.request.request_id,
            response_ids=np.asarray(answer.ids, np.int32),
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, self._version),),
            finish=answer.finish,
            error=answer.error,
        )


def _asked(model: str, request: GenerationRequest) -> dict[str, Any]:
    """The body of a call. Filters that are off are left out, because not every server knows them."""
    sampling = request.sampling
    filters = {name: value for name, value in (("top_k", sampling.top_k), ("min_p", sampling.min_p)) if value}
    return {
        "model": model,
        "prompt": request.prompt_ids.tolist(),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop) or None,
        "seed": (request.seed + request.offset) % (1 << 63),
        "logprobs": 0,
        "stream": True,
        "extra_body": {
            "return_token_ids": True,
            "stop_token_ids": list(sampling.stop_ids),
            "include_stop_str_in_output": True,
            "ignore_eos": True,  # What ends a response is in `stop_ids`.
            "skip_special_tokens": False,
            **filters,
        },
    }


async def check_server(settings: OpenAISettings, policy: str) -> None:
    """Asks the server once for the model. Raises ConfigError or EngineError as `capabilities` does."""
    server = _Server(settings, policy)
    async with server.client:
        await server.look_for_the_model()


def make_engine(settings: OpenAISettings, parts: EngineParts) -> CompletionsServerEngine:
    """The factory that `OpenAISettings.factory` names."""
    return CompletionsServerEngine(settings, parts)
