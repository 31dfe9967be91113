"""Memory and time of log-probabilities with a vocabulary of 152 000: lean, against all logits at once.

    python benchmarks/logprob_memory.py --json

`peak_vs_naive`: memory that loss and backward take beyond their inputs, the head's gradient included, each way in a
process of its own; `head_time_vs_naive`: the head alone, forward and backward; `time_vs_naive`: a whole forward and
backward pass of a model with the shape of Qwen2.5-0.5B and random weights. Naive: `log_softmax` of [N, V], as a trainer
needs it for log-probability and entropy.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from common import interleaved, median_ratio, parser, report
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from flexmarl.training.backends import forward
from flexmarl.training.backends.causal_lm import OneDnnLinear, use_onednn
from flexmarl.training.backends.forward import predict
from flexmarl.training.backends.logprobs import HeadForm, lean_logprobs, whole_logprobs
from flexmarl.training.batching import PaddedRows

VOCABULARY, WIDTH = 151_936, 896
WAYS = ("lean", "naive")
MIB = 1 << 20


class Head:
    """The head of a model alone, with hidden states [N, H] as if from the layers below."""

    def __init__(self, way: str, tokens: int) -> None:
        torch.manual_seed(0)
        self._way = way
        self._head = OneDnnLinear(WIDTH, VOCABULARY, bias=False)
        self._hidden = torch.randn(tokens, WIDTH, requires_grad=True)
        self._targets = torch.randint(VOCABULARY, (tokens,))

    def __call__(self) -> int:
        """Forward and backward; returns the number of tokens."""
        self._head.zero_grad()
        logprobs, _ = self._outputs()
        (-logprobs.exp()).sum().backward()
        return len(self._targets)

    def _outputs(self) -> tuple[Tensor, Tensor]:
        if self._way == "lean":
            return lean_logprobs(self._hidden, self._head, self._targets, HeadForm())
        return whole_logprobs(self._head(self._hidden), self._targets)


class Step:
    """A pass of a whole model over rows of one length, all of whose second halves are trained."""

    def __init__(self, model: nn.Module, way: str, tokens: int) -> None:
        self._model, self._way = model, way
        rows, length = 2, tokens // 2
        ids = torch.randint(VOCABULARY, (rows, length)).numpy()
        trained = [row * length + at for row in range(rows) for at in range(length // 2, length - 1)]
        targets = ids.reshape(-1)[[at + 1 for at in trained]]
        self._rows = PaddedRows(ids, torch.tensor(trained).numpy(), targets)
        self._tokens = tokens

    def __call__(self) -> int:
        """Forward and backward; returns the number of tokens."""
        form = HeadForm() if self._way == "lean" else None
        found = predict(self._model, self._rows, form=form)  # type: ignore[arg-type]
        (-found.logprobs.exp()).sum().backward()
        self._model.zero_grad()
        return self._tokens


def whole_model() -> nn.Module:
    """A model with the shape of Qwen2.5-0.5B."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).train()
    use_onednn(model)
    return model


class PeakMemory:
    """Largest resident memory of this process inside the block, in bytes beyond that at its beginning."""

    def __enter__(self) -> "PeakMemory":
        self._before, self._stop, self.num_bytes = _resident(), threading.Event(), 0
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._watching.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.num_bytes = max(self.num_bytes, _resident() - self._before)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def peak(way: str, tokens: int) -> int:
    """Bytes at the peak of one pass of the head, in a process of its own."""
    command = [sys.executable, __file__, "--measure", way, "--tokens", str(tokens)]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))


def measure(way: str, tokens: int) -> None:
    """Prints the bytes at the peak of a pass; the first block's work has made the libraries' own buffers before."""
    Head("lean", 16)()
    head = Head(way, tokens)
    with PeakMemory() as seen:
        head()
        time.sleep(0.01)
    print(json.dumps(seen.num_bytes))


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--tokens", type=int, default=2048, help="trained tokens of the head's pass (default 2048)")
    options.add_argument("--step-tokens", type=int, default=1024, help="tokens of the whole model's pass")
    options.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    if chosen.measure:
        measure(chosen.measure, chosen.tokens)
        return
    forward.LEAN_FROM = 0
    peaks = {way: peak(way, chosen.tokens) for way in WAYS}
    heads = interleaved({way: Head(way, chosen.tokens) for way in WAYS}, chosen.repeats)
    model = whole_model()
    steps = interleaved({way: Step(model, way, chosen.step_tokens) for way in WAYS}, chosen.repeats)
    report(
        f"Log-probabilities of {chosen.tokens} tokens, V = {VOCABULARY}",
        ("way", "peak MiB", "head tokens/s", "model tokens/s"),
        [(way, f"{peaks[way] / MIB:.0f}", f"{max(heads[way]):.0f}", f"{max(steps[way]):.0f}") for way in WAYS],
        {
            "peak_vs_naive": peaks["lean"] / peaks["naive"],
            "head_time_vs_naive": median_ratio(heads, "naive", "lean"),
            "time_vs_naive": median_ratio(steps, "naive", "lean"),
        },
        as_json=chosen.json,
        wanted_at_most={"peak_vs_naive": 0.15, "head_time_vs_naive": 1.45, "time_vs_naive": 1.15},
    )


if __name__ == "__main__":
    main()
