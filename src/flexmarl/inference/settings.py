"""Settings of the engines, one class per engine `type`, and of the pool in front of them."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field, field_validator

from flexmarl.plugins import SettingsTable
from flexmarl.settings import Settings


class EngineSettings(Protocol):
    """Common part of the settings classes in ENGINES."""

    factory: ClassVar[Any]
    """The factory `(settings, EngineParts) -> engine`: a method, or the path `module:function` of a function, which is
    imported only when an engine is made."""

    @property
    def type(self) -> str:
        """The engine's name in configs."""
        ...


ENGINES: SettingsTable[EngineSettings] = SettingsTable(
    "engine",
    setting="policies.NAME.engine.type",
    group="engines",
    interface=[EngineSettings],
    built_in={
        "embedded": "flexmarl.inference.settings:EmbeddedSettings",
        "openai": "flexmarl.inference.settings:OpenAISettings",
        "scripted": "flexmarl.simulator.timed_engine:ScriptedSettings",
        "timed": "flexmarl.simulator.timed_engine:TimedSettings",
        "vllm": "flexmarl.inference.settings:VllmSettings",
    },
)
"""Settings of engines by `type` (docs/howto/engine.md)."""
engine = ENGINES.register
"""Decorator that makes a settings class that of the engine of its `type`: `@engine`."""

AnyEngine = Annotated[EngineSettings, ENGINES]
"""Settings field of any engine in the table, chosen by its `type`."""


def computes(engine: EngineSettings) -> bool:
    """False for engines that compute nothing on this cluster, as their class states with `computes = False`.

    They need no device, and live in the controller's process in every cluster: many fit into one.
    """
    return getattr(engine, "computes", True)


def is_timed(engine: EngineSettings) -> bool:
    """True for engines whose answers and times are those of section `simulation`: `is_timed = True` in their class."""
    return getattr(engine, "is_timed", False)


def kind_of(engine: EngineSettings, policy: str, model: str = "") -> str:
    """The kind of a policy's engine: engines of one kind become each other's policy by loading its weights.

    The settings class of such a type states `takes_over = True`; or "same", if an engine becomes that of a policy with
    the same engine settings and the same model alone. Any other engine is of its policy's own kind.

    >>> engine = VllmSettings()
    >>> [kind_of(engine, "solver", "a") == kind_of(engine, "judge", model) for model in ("a", "b")]
    [True, False]
    """
    takes_over = getattr(engine, "takes_over", False)
    if takes_over == "same":
        return f"{engine!r} of {model}"
    return engine.type if takes_over else f"{engine.type} of {policy}"


def gives_way(engine: EngineSettings) -> bool:
    """True for engines that give their devices up while they sleep, as their class states with `gives_way = True`."""
    return computes(engine) and getattr(engine, "gives_way", False)


def own_python(engine: EngineSettings) -> Path | None:
    """The interpreter that such engines ask for, in its own environment; None for the controller's."""
    return getattr(engine, "python", None)


def wants_canary(engine: EngineSettings) -> bool:
    """True if trainers publish a canary with each version for such engines: `wants_canary = True` in their class."""
    return getattr(engine, "wants_canary", False)


KV_SHARE = 0.5
"""Share of the free memory that keys and values of a device's engines may take by default; trainers need some too."""
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvBytes(NamedTuple):
    """Bytes of keys and values."""

    token: int
    block: int


class EmbeddedSettings(Settings):
    """Our own continuous batching over a Hugging Face causal LM: the choice on a CPU and for tiny models."""

    factory: ClassVar[str] = "flexmarl.inference.backends.embedded.engine:make_engine"
    takes_adapters: ClassVar[bool] = True
    """Its engines' capabilities have `adapters`. A class without this attribute says that they have not."""
    gives_way: ClassVar[bool] = True
    """Its engines sleep (capability `sleeps`), so that training places have their devices in mode `colocated`. Those of
    a class without this attribute have devices of their own."""
    takes_over: ClassVar[bool] = True
    """Its engines serve another policy with such an engine once they have loaded its weights. A class without this
    attribute says that they cannot: an instance moves by ending, and another one starts in its place."""

    type: Literal["embedded"] = "embedded"
    slots: int = Field(default=64, ge=1, description="Requests that decode together; more wait in the queue.")
    max_len: int = Field(
        default=2048,
        ge=2,
        description="Most tokens of a request, prompt and response; they take memory when they come.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights, keys and values; published weights must have the same."
    )
    kv_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB that keys and values of running requests and kept conversations may take; when it is full, "
        "the youngest request waits and is computed again. null: half of what is free when the engine starts, divided "
        "by the engines of its device.",
    )
    kv_block: int = Field(
        default=32, ge=1, description="Tokens per block of keys and values, the unit in which memory is taken."
    )
    prefill_tokens: int = Field(
        default=4096, ge=1, description="Prompt tokens computed in one step; a longer prompt has a step of its own."
    )
    prefix_reuse: bool = Field(
        default=True,
        description="Keep a finished call's keys and values for its conversation, and compute once what prompts of "
        "running calls and kept conversations begin with alike, as a system prompt; never in deterministic runs.",
    )
    kept_prefixes: int = Field(
        default=64, ge=0, description="Conversations whose prefix is kept, longest unused out first."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of a decode step, e.g. 1 for a tiny model; null: those of the process.",
    )
    steps_per_turn: int = Field(
        default=4, ge=1, description="Decode steps per turn on the device thread, which a trainer may share."
    )

    def num_kept(self, *, deterministic: bool) -> int:
        """Most conversations that are kept. 0 if deterministic: a prefix from another batch has other bits."""
        return self.kept_prefixes if self.prefix_reuse and not deterministic else 0

    def kv_bytes(self, cached_numbers: int) -> KvBytes:
        """Memory of keys and values of a model that has `cached_numbers` of them per token, in all layers."""
        token = cached_numbers * NUMBER_BYTES[self.dtype]
        return KvBytes(token, token * self.kv_block)

    def kv_blocks(self, length: int | None = None, calls: int | None = None, *, deterministic: bool) -> int:
        """Blocks of all slots and kept conversations with `length` tokens; without it, at `max_len`: the most ever.
        `calls` is the number of requests that may run at once, if it may be below that of slots."""
        tokens = self.max_len if length is None else min(length, self.max_len)
        running = self.slots if calls is None else min(calls, self.slots)
        return (running + self.num_kept(deterministic=deterministic)) * -(-tokens // self.kv_block)


class AdapterRoom(Settings):
    """Room for LoRA adapters in an instance, each with the last versions of it that requests may run under."""

    slots: int = Field(
        default=1, ge=1, description="Adapters in an instance: one for each policy with `training.lora` that it serves."
    )
    max_rank: int = Field(
        default=16, ge=1, le=512, description="Largest `training.lora.rank`; the next one that vLLM has takes memory."
    )


class VllmSettings(Settings):
    """vLLM, the engine for GPUs: `AsyncLLM` in the engine's process, its workers in processes of their own."""

    factory: ClassVar[str] = "flexmarl.inference.backends.vllm.vllm_start:make_engine"
    can_repeat: ClassVar[bool] = False
    """Its batches decide the last bits of a token, so `deterministic: true` is refused. A class without this attribute
    leaves that to the capabilities of its engines."""
    gives_way: ClassVar[bool] = True
    wants_canary: ClassVar[bool] = True

    @property
    def takes_over(self) -> Literal["same", False]:
        """See `kind_of`: vLLM takes other weights of the model that it began with. Adapters stay where they are."""
        return False if self.adapters else "same"

    @property
    def takes_adapters(self) -> bool:
        """True if its engines take adapters alone, and no whole weights then."""
        return self.adapters is not None

    type: Literal["vllm"] = "vllm"
    max_len: int = Field(default=2048, ge=2, description="Most tokens of a request, prompt and response.")
    slots: int = Field(
        default=256, ge=1, description="Requests that decode together (vLLM's `max_num_seqs`); more wait in vLLM."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights, keys and values; published weights must have the same."
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="Accelerators of an instance, all on one node. More than 1 needs cluster.device=cuda.",
    )
    kv_gib: float | None = Field(
        default=None,
        gt=0,
        description="GiB of keys and values, for each accelerator. null: 1 on a CPU; else what vLLM finds free within "
        "its `gpu_memory_utilization` (see `options`).",
    )
    prefix_caching: bool = Field(
        default=True,
        description="Reuse the keys and values of prompts that begin alike, at one version of the weights.",
    )
    adapters: AdapterRoom | None = Field(
        default=None,
        description="Room for adapters that are published alone; {slots: 1, max_rank: 16}. Versions of one are loaded "
        "while requests run, and these end under that with which they began. null: whole weights.",
    )
    python: Path | None = Field(
        default=None,
        description="ray: Python interpreter of the environment that has vLLM, with the same Python, Ray and flexmarl "
        "as the controller's; null: the controller's own.",
    )
    options: dict[str, Any] = Field(
        default={}, description="Further arguments of vLLM's `AsyncEngineArgs`, by vLLM's names."
    )

    @field_validator("python")
    @classmethod
    def _from_home(cls, python: Path | None) -> Path | None:
        return python.expanduser() if python else None

    @field_validator("options")
    @classmethod
    def _are_not_ours(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key in options:
            if key in VLLM_ARGUMENTS:
                raise ValueError(f"options.{key} is set by flexmarl; {VLLM_ARGUMENTS[key]}")
        if not isinstance(share := options.get("gpu_memory_utilization", 1), float | int) or not 0 < share <= 1:
            raise ValueError(f"options.gpu_memory_utilization is {share!r}; use a share of the device, e.g. 0.4")
        return options


VLLM_CPU_KV_GIB = 1.0
"""GiB of keys and values of a vLLM engine on a CPU by default. vLLM's own default is most of the machine's memory."""
VLLM_SHARE = 0.92
"""Share of an accelerator's memory that vLLM takes by default: its `gpu_memory_utilization`."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for whose adapters vLLM has room."""
VLLM_CPU_HEAD = 32
"""vLLM's attention on a CPU takes heads whose size is a multiple of this."""
VLLM_ARGUMENTS = {
    "model": "use policies.NAME.model",
    "dtype": "use engine.dtype",
    "max_model_len": "use engine.max_len",
    "max_num_seqs": "use engine.slots",
    "tensor_parallel_size": "use engine.tensor_parallel",
    "pipeline_parallel_size": "use engine.tensor_parallel",
    "data_parallel_size": "use policies.NAME.instances",
    "distributed_executor_backend": "an instance's workers are on one machine",
    "hf_token": "set the environment variable HF_TOKEN",
    "kv_cache_memory_bytes": "use engine.kv_gib",
    "enable_prefix_caching": "use engine.prefix_caching",
    "enable_lora": "use engine.adapters",
    "max_loras": "use engine.adapters.slots",
    "max_cpu_loras": "use engine.adapters.slots",
    "max_lora_rank": "use engine.adapters.max_rank",
    "logprobs_mode": "training compares with the model's own log-probabilities",
    "skip_tokenizer_init": "the engine gets and returns token ids",
    "weight_transfer_config": "weights come from the trainer",
    "worker_extension_cls": "its workers report what they loaded",
    "scheduling_policy": "proofs of weights go before requests",
    "disable_log_stats": "the pool asks for the load itself",
    "enable_sleep_mode": "engines sleep in mode colocated",
}
"""Arguments of `AsyncEngineArgs` that are not free, and what to do instead."""


class OpenAISettings(Settings):
    """A frozen policy on a server whose `/v1/completions` takes token ids and returns them, such as vLLM's.

    The policy's `model` is still needed for its tokenizer and chat template, without weights.
    """

    factory: ClassVar[str] = "flexmarl.inference.backends.completions_server:make_engine"
    computes: ClassVar[bool] = False
    loads_weights: ClassVar[bool] = False
    """Its engines serve frozen policies alone. A class without this attribute may serve trained ones."""

    type: Literal["openai"] = "openai"
    url: str = Field(
        pattern=r"^https?://[^@\s]+$",
        description="Where the API begins, e.g. http://gpu-box:8000/v1. A key or password does not belong here.",
    )
    model: str = Field(min_length=1, description="The model's name at the server, as its `/v1/models` lists it.")
    key_env: str = Field(
        default="",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="Environment variable that holds the server's key; empty: the server wants none.",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds without a token from the server, after which a call has failed."
    )
    retries: int = Field(
        default=5,
        ge=0,
        description="How often a call is sent again that met status 408, 409, 429 or 5xx, or no connection, each time "
        "after a longer wait.",
    )


class PoolSettings(Settings):
    """Which instance serves a request, and the time limits of the pool for its instances."""

    routing: Literal["least_tokens", "conversations", "least_requests", "round_robin"] = Field(
        default="least_tokens",
        description="least_tokens: the instance with the least tokens of work. conversations: the one that has the "
        "conversation's prefix, unless it has far more work than another. least_requests: the one with the fewest "
        "requests. round_robin: the next one.",
    )
    max_running: int | None = Field(
        default=None,
        ge=1,
        description="Requests that one instance has at a time; more wait in the pool, also for instances that start or "
        "move to the policy later. null: all go to an instance at once.",
    )
    on_move: Literal["continue", "drain"] = Field(
        default="continue",
        description="Running requests of an instance that is moved: another instance continues them, or they end "
        "before the move.",
    )

    load_timeout_s: float = Field(default=120.0, gt=0, description="An instance that loads for longer is dropped.")
    abort_grace_s: float = Field(
        default=30.0,
        gt=0,
        description="An instance that does not answer an abort in this time is dropped. One that computes answers when "
        "its pass has ended, or that of a trainer on the same thread: on CPUs, that may take some time.",
    )
    replacements: int = Field(
        default=3, ge=0, description="Instances that a run may start in place of lost ones, per policy; 0: none."
    )
    start_timeout_s: float = Field(default=300.0, gt=0, description="A replacement that starts for longer is dropped.")
    close_timeout_s: float = Field(
        default=30.0, gt=0, description="How long a lost instance may take to close before its replacement starts."
    )


class BalanceSettings(Settings):
    """Moving instances between policies while a step plays (FlexMARL section 5.2)."""

    rule: Literal["none", "queue_gap", "queue_gap_literal", "drain_time"] = Field(
        default="none",
        description="queue_gap: FlexMARL's, one instance per poll, by waiting requests; queue_gap_literal: as "
        "the paper words it, which thrashes; drain_time: ours, by the time that the queues take to drain.",
    )
    poll_s: float = Field(default=5.0, gt=0, description="Seconds between two checks of the queues.")
    gap: int = Field(
        default=5, ge=1, description="queue_gap: an instance moves if two policies differ by more waiting requests."
    )
    move_s: float = Field(
        default=2.5, ge=0, description="drain_time: assumed seconds of a move until one has been measured."
    )
    start_s: float = Field(
        default=30.0,
        ge=0,
        description="Assumed seconds until a new instance serves, for `grow` and for moves between unlike engines, "
        "until one has been measured.",
    )
    grow: bool = Field(
        default=False,
        description="Start further instances of the policy that drains last, where the nodes of the pool `rollout` "
        "have free CPUs and accelerators and it pays within the drain time. On a private Ray the room is that of this "
        "machine: its accelerators, or its cores beyond the threads of all configured engines and trainers; for "
        "modelled engines it is `simulation.room`. They end first when a lost instance finds no room.",
    )
    start: Literal["as_configured", "by_share"] = Field(
        default="as_configured",
        description="by_share: each step begins with instances in proportion to the policies' work in the last steps.",
    )
