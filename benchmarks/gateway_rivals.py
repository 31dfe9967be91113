"""Servers that benchmarks/gateway.py measures beside the gateway: vLLM's frontend and LiteLLM's proxy.

    PYTHON_WITH_VLLM benchmarks/gateway_rivals.py vllm MODEL PORT     vLLM's server and its AsyncLLM; no engine
    python benchmarks/gateway_rivals.py answers PORT                  a server that LiteLLM asks; it answers at once

Of vLLM all runs that is in its frontend: HTTP, chat template, tokens, detokenizer. Its engine, usually in another
process, is a queue that gives a whole reply at once. So the messages between both processes are left out, and the
handling of a reply token by token, in vLLM's favour.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

REPLY = "The answer to this question is 7, as far as I can see."


class AnsweringCore:
    """In place of vLLM's client of its engine: each request gets `reply` as its answer."""

    engine_ranks_managed = (0,)

    def __init__(self, reply: list[int]) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._reply = reply
        self._answers: asyncio.Queue[Any] = asyncio.Queue()

    async def add_request_async(self, request: Any) -> None:
        """Answers a request."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        said = EngineCoreOutput(request.request_id, self._reply, finish_reason=FinishReason.STOP)
        self._answers.put_nowait(EngineCoreOutputs(outputs=[said], finished_requests={request.request_id}))

    async def get_output_async(self) -> Any:
        """The next answer."""
        return await self._answers.get()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """It generates."""
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Has no cache."""

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Has answered already."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Has no process."""


def serve_vllm(model: str, port: str) -> None:
    """vLLM's server as `vllm serve` starts it, without a log line per request."""
    import uvloop
    from transformers import AutoTokenizer
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core_client import EngineCoreClient

    asked = [*("--model", model, "--served-model-name", "solver", "--host", "127.0.0.1", "--port", port)]
    asked += [*("--max-model-len", "4096", "--disable-uvicorn-access-log")]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(asked)
    validate_parsed_serve_args(args)
    tokenizer = AutoTokenizer.from_pretrained(model)
    reply = [*tokenizer(REPLY, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    def answering(**_: Any) -> Any:
        return AnsweringCore(reply)

    EngineCoreClient.make_async_mp_client = staticmethod(answering)
    uvloop.run(run_server(args))


def serve_answers(port: str) -> None:
    """An OpenAI server that says the same to everyone."""
    import uvicorn

    choice = {"index": 0, "message": {"role": "assistant", "content": REPLY}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 16, "total_tokens": 116}
    said = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "solver"}
    body = json.dumps({**said, "choices": [choice], "usage": usage}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error", access_log=False, lifespan="off")


if __name__ == "__main__":
    {"vllm": serve_vllm, "answers": serve_answers}[sys.argv[1]](*sys.argv[2:])
