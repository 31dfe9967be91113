"""The settings of one run, composed of settings classes that live next to the code they configure."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from flexmarl.agents.remembering import compaction_of
from flexmarl.agents.settings import TeamSettings
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.config.fits import (
    adapter_misfits,
    credit_misfits,
    evaluation_misfits,
    has_key,
    overlap_misfits,
    together_misfits,
    trained_together,
)
from flexmarl.credit.rows import tags_for
from flexmarl.credit.settings import CreditSettings
from flexmarl.events.settings import MetricsSettings
from flexmarl.experience.settings import StoreSettings
from flexmarl.gateway.settings import GatewaySettings
from flexmarl.inference.settings import (
    AnyEngine,
    BalanceSettings,
    EmbeddedSettings,
    PoolSettings,
    VllmSettings,
    computes,
    gives_way,
    is_timed,
    own_python,
)
from flexmarl.objects.settings import ObjectSettings
from flexmarl.orchestrator.settings import (
    AlarmSettings,
    BatchSettings,
    CheckpointSettings,
    EvaluateSettings,
    Mode,
    PipelineSettings,
    StopSettings,
    law_of,
)
from flexmarl.plugins import CodeFiles, load_code
from flexmarl.records import AgentName
from flexmarl.rollout.settings import RolloutSettings
from flexmarl.sandbox.settings import AnySandbox, SandboxSettings
from flexmarl.settings import Settings
from flexmarl.simulator.replies import fitting_replies
from flexmarl.simulator.settings import SimulationSettings
from flexmarl.tasks import TaskSettings
from flexmarl.training.corrections import TruncatedImportanceSampling
from flexmarl.training.settings import ProcessGroupSettings, TrainingSettings


class FromRun(Settings):
    """A policy of another run, whose weights a run begins with. With an adapter there, they are the merged ones."""

    run: Path = Field(description="The other run's folder, relative to the config.")
    policy: str = Field(description="The name of the policy in that run.")
    step: Literal["newest", "best"] | int = Field(
        default="newest", description="Its newest checkpoint, its best one, or that of a step."
    )

    @field_validator("step", mode="before")
    @classmethod
    def _names_a_checkpoint(cls, step: object) -> object:
        if step in ("newest", "best") or (isinstance(step, int) and not isinstance(step, bool) and step >= 0):
            return step
        raise ValueError(f"step must be newest, best, or a number of steps from 0, got {step!r}")


class PolicySettings(Settings):
    """Weights, how they are served, and how they are trained."""

    model: Annotated[
        Annotated[str, Tag("str")] | Annotated[FromRun, Tag("FromRun")],
        Discriminator(lambda model: "FromRun" if isinstance(model, dict | FromRun) else "str"),
    ] = Field(
        description="A Hugging Face folder (relative to the config), the name of a model on the hub, or a policy of "
        "another run: {run: runs/RUN, policy: solver}, whose weights are copied into the new run's folder."
    )
    trainable: bool = Field(default=True, description="False: frozen; served, never updated.")
    instances: int = Field(default=1, ge=1, le=4096, description="Inference replicas.")
    engine: AnyEngine = EmbeddedSettings()
    serves_together: str | None = Field(
        default=None,
        description="Another policy of the same model, whose instances serve this one too, each with its adapter; "
        "needs `engine.adapters` there. `engine` and `instances` are that policy's. null: instances of its own.",
    )
    training: TrainingSettings = TrainingSettings()

    @property
    def needs_weights(self) -> bool:
        """False if the run needs only the config and the tokenizer of the model."""
        return self.trainable or computes(self.engine)

    def corrected(self) -> Self:
        """Adds truncated importance sampling, unless the config chose a correction or none, or the policy is frozen."""
        if "correction" in self.training.model_fields_set or not self.trainable:
            return self
        training = self.training.model_copy(update={"correction": TruncatedImportanceSampling()})
        return self.model_copy(update={"training": training})

    def scheduled(self, updates: int) -> Self:
        """Fills in the length of a decay that has none: the run's number of updates."""
        schedule = self.training.schedule.over(updates)
        if schedule is self.training.schedule:
            return self
        return self.model_copy(update={"training": self.training.model_copy(update={"schedule": schedule})})

    def sharing(self, host: Self | None) -> Self:
        """Fills in what the policy does not say about its engine: it is that of `host`, if it is served with one."""
        if host is None:
            return self
        unsaid = {"engine", "instances"} - self.model_fields_set
        return self.model_copy(update={key: getattr(host, key) for key in unsaid})

    def publishing(self) -> Self:
        """Decides what is published if `training.publish` is auto: the adapter alone where the engine takes it."""
        if self.training.publish != "auto":
            return self
        alone = self.training.lora is not None and getattr(self.engine, "takes_adapters", False)
        training = self.training.model_copy(update={"publish": "adapter" if alone else "merged"})
        return self.model_copy(update={"training": training})

    @model_validator(mode="after")
    def _engine_takes_the_trained_weights(self) -> Self:
        if self.trainable and not getattr(self.engine, "loads_weights", True):
            raise ValueError(
                f"engine.type is '{self.engine.type}', which loads no weights, but trainable is true; use another "
                "engine, or trainable=false"
            )
        served = getattr(self.engine, "dtype", None)
        if self.trainable and served not in (None, self.training.dtype):
            raise ValueError(
                f"engine.dtype is '{served}', but training.dtype is '{self.training.dtype}', and published weights "
                f"are served as they are; set both to the same"
            )
        return self


class RunSettings(Settings):
    """One run, from tasks to checkpoints."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$", description="Names the run folder.")
    seed: int = Field(default=0, ge=0, description="Root of every random stream of the run.")
    steps: int = Field(default=100, ge=0, description="Updates per policy.")
    deterministic: bool = Field(
        default=False, description="Same seed, same weights, bit for bit: fixed batching, ordered consumption; slower."
    )
    out: Path = Field(default=Path("runs"), description="Where run folders go, relative to the working directory.")
    base: Path = Field(
        default=Path("."), description="Folder that other relative paths start from; set to the config's folder."
    )
    code: list[Path] = Field(default_factory=list, description="Python files with workflows, task generators, scorers.")
    mode: Mode = Field(
        default=Mode.MICROBATCH, description="What may happen at the same time; the first three are on-policy."
    )
    pipeline: PipelineSettings = PipelineSettings()
    cluster: ClusterSettings = ClusterSettings()
    tasks: TaskSettings
    policies: dict[str, PolicySettings]
    team: TeamSettings
    batch: BatchSettings = BatchSettings()
    rollout: RolloutSettings = RolloutSettings()
    pool: PoolSettings = PoolSettings()
    balance: BalanceSettings = BalanceSettings()
    process_groups: ProcessGroupSettings = ProcessGroupSettings()
    objects: ObjectSettings = ObjectSettings()
    store: StoreSettings = StoreSettings()
    sandbox: AnySandbox = SandboxSettings()
    credit: CreditSettings = CreditSettings()
    gateway: GatewaySettings | None = Field(
        default=None,
        description="The server at which programs play seats. null: none, unless the workflow is a program; a workflow "
        "of one's own that opens a door needs the section, which may be empty: {}.",
    )
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    alarms: AlarmSettings = AlarmSettings()
    stop: StopSettings | None = Field(default=None, description="Early stopping; null: all steps are made.")
    metrics: MetricsSettings = MetricsSettings()
    simulation: SimulationSettings = SimulationSettings()

    @model_validator(mode="before")
    @classmethod
    def _code_comes_first(cls, given: Any) -> Any:
        """Imports the files of `code`: other settings may choose what they register. Raises ConfigError."""
        files, base = (given.get("code"), given.get("base", ".")) if isinstance(given, Mapping) else ((), ".")
        if isinstance(base, str | Path) and isinstance(files, list | tuple):  # Otherwise they are refused themselves.
            for file in (file for file in files if isinstance(file, str | Path)):
                load_code(Path(base) / Path(file).expanduser())
        return given

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (CodeFiles(self.path(path).absolute() for path in self.code), self.__getstate__())

    @field_validator("out")
    @classmethod
    def _from_home(cls, out: Path) -> Path:
        return out.expanduser()

    @field_validator("policies")
    @classmethod
    def _what_older_versions_sampled_is_corrected(
        cls, policies: dict[str, PolicySettings], given: ValidationInfo
    ) -> dict[str, PolicySettings]:
        """Sets the default of `training.correction` by the mode: off-policy modes need one."""
        mode = given.data.get("mode")
        off_policy = isinstance(mode, Mode) and not mode.synchronous
        return {name: policy.corrected() if off_policy else policy for name, policy in policies.items()}

    @field_validator("policies")
    @classmethod
    def _engines_are_shared(cls, policies: dict[str, PolicySettings]) -> dict[str, PolicySettings]:
        """Gives policies that are served together the engine and the instances of the policy that they name."""
        return {name: policy.sharing(policies.get(policy.serves_together or "")) for name, policy in policies.items()}

    @field_validator("policies")
    @classmethod
    def _adapters_are_published_alone(cls, policies: dict[str, PolicySettings]) -> dict[str, PolicySettings]:
        """Sets the default of `training.publish` by the engine."""
        return {name: policy.publishing() for name, policy in policies.items()}

    @field_validator("policies")
    @classmethod
    def _decays_end_with_the_run(
        cls, policies: dict[str, PolicySettings], given: ValidationInfo
    ) -> dict[str, PolicySettings]:
        """Sets the default of `training.schedule.decay_steps`. config.yaml of a run folder then holds the number, so
        that a run that is resumed with more steps keeps its learning rates."""
        updates = given.data.get("steps")
        return (
            {name: policy.scheduled(updates) for name, policy in policies.items()} if updates is not None else policies
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        training = {name: self.policies[name].training for name in sorted(self.trained)}
        problems = [
            *self._policies_are_used(),
            *self._costs_are_of_policies(),
            *self._timed_agents_have_replies(),
            *self._summaries_fit_engines(),
            *self._something_can_be_learned(),
            *self._critics_are_used(),
            *evaluation_misfits(self.evaluate, self.checkpoint, self.stop, training),
            *credit_misfits(self.credit, self.team, self.trained, pays_divergence=self._pays_divergence),
            *overlap_misfits(self.mode, self.pipeline, self.credit, training, deterministic=self.deterministic),
            *self._engines_can_run_here(),
            *adapter_misfits(self.policies, versions=self.adapter_versions),
            *together_misfits(
                self.policies, self.credit, places=self.shared_places if self.ranks == 1 else 0, in_turns=self.in_turns
            ),
            *self._instances_are_shared(),
            *self._processes_can_share(),
            *self._devices_can_change_hands(),
            *self._instances_can_grow(),
            *self._programs_can_be_heard(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def wanted_gateway(self) -> GatewaySettings | None:
        """The settings of the gateway that the run opens; None if it opens none."""
        return self.gateway or (GatewaySettings() if self.team.workflow.opens_doors else None)

    def _programs_can_be_heard(self) -> Iterator[str]:
        if self.wanted_gateway is None:
            return
        if self.cluster.backend == "simulated" and self.team.workflow.opens_doors:
            yield (
                f"team.workflow.type '{self.team.workflow.type}' runs programs, whose time is real, and "
                "cluster.backend is 'simulated'; use inline or ray"
            )
        if self.rollout.workers:
            yield f"rollout.workers={self.rollout.workers}: the gateway serves episodes of the controller alone; use 0"

    def _policies_are_used(self) -> Iterator[str]:
        used = {seat.policy for seat in self.team.agents.values()}
        names = ", ".join(sorted(self.policies)) or "none"
        for agent, seat in self.team.agents.items():
            if seat.policy not in self.policies:
                yield f"team.agents.{agent}.policy '{seat.policy}' is not one of the policies; there are: {names}"
        for policy in sorted(set(self.policies) - used) if used <= set(self.policies) else ():
            yield (
                f"policies.{policy} is used by no agent (its model: '{self.policies[policy].model}'); "
                f"remove it, or name it in one of team.agents: {', '.join(self.team.agents)}"
            )

    def _costs_are_of_policies(self) -> Iterator[str]:
        names = ", ".join(sorted(self.policies))
        for policy in sorted(set(self.simulation.costs) - set(self.policies) - {"default"}):
            yield f"simulation.costs.{policy} is for none of the policies; there are: {names}, and default for the rest"

    def _timed_agents_have_replies(self) -> Iterator[str]:
        if self.cluster.backend == "simulated":  # `flexmarl simulate` asks for the replies of all agents.
            return
        timed = {name for name, policy in self.policies.items() if is_timed(policy.engine)}
        agents = [name for name, seat in self.team.agents.items() if seat.policy in timed]
        if agents:
            given = self.simulation
            recorded = given.recorded is not None
            yield from fitting_replies(self.team.agents, given.replies, recorded=recorded, modelled=agents)[0]

    def _summaries_fit_engines(self) -> Iterator[str]:
        for agent, seat in self.team.agents.items():
            compact, at = compaction_of(seat.context), f"team.agents.{agent}"
            max_len = (
                getattr(self.policies[seat.policy].engine, "max_len", None) if seat.policy in self.policies else None
            )
            if compact is None or max_len is None:
                continue
            # A reply follows the longest prompt, then `ask`, then the summary.
            most = max_len - 2 * seat.sampling.max_tokens
            if compact.limit_tokens >= most:
                yield (
                    f"{at}.context.compact.limit_tokens must be below {most}, got {compact.limit_tokens}: a reply, ask "
                    f"and a summary come behind so long a prompt, {at}.sampling.max_tokens is "
                    f"{seat.sampling.max_tokens} and policies.{seat.policy}.engine.max_len is {max_len}; lower it, or "
                    f"raise engine.max_len"
                )

    def _something_can_be_learned(self) -> Iterator[str]:
        """Checks `batch.episodes`. One episode per task is enough if it is a tree, or if its own rows are compared."""
        if not self.trained or self.batch.episodes > 1 or getattr(self.team.workflow, "candidates", 1) > 1:
            return
        estimators = {
            agent: self.credit.estimator_of(agent)
            for agent, seat in self.team.agents.items()
            if seat.policy in self.trained and has_key(agent, self.credit.estimator_of(agent).key)
        }
        across = {
            agent: estimator
            for agent, estimator in estimators.items()
            if "episode" not in tags_for(AgentName(agent), estimator.key) and not estimator.needs_branches
        }
        all_dropped = self.credit.filter is not None and not any(
            estimator.learns_from_equal_rewards or agent not in across for agent, estimator in estimators.items()
        )
        for agent, estimator in across.items():
            if estimator.lone_rows is not None:
                yield (
                    f"batch.episodes is 1, but the estimator of agent '{agent}' compares the episodes of a task, and "
                    f"its singleton '{estimator.lone_rows}' ignores a lone one; use batch.episodes=8, or "
                    f"singleton: raw there and credit.filter=null"
                )
            elif all_dropped:
                yield (
                    f"batch.episodes is 1, but credit.filter drops every task whose rewards are equal, as those of one "
                    f"episode are for the estimator of agent '{agent}', {estimator.type}: nothing would be "
                    f"trained; use batch.episodes=8, or credit.filter=null"
                )

    @property
    def _pays_divergence(self) -> frozenset[str]:
        """Trained policies whose rewards include a penalty for diverging from the reference policy."""
        kls = {name: self.policies[name].training.kl for name in self.trained}
        return frozenset(name for name, kl in kls.items() if kl is not None and kl.where == "reward")

    def _critics_are_used(self) -> Iterator[str]:
        compared: set[str] = set()
        for agent, seat in self.team.agents.items():
            estimator = self.credit.estimator_of(agent)
            if "values" not in estimator.uses or seat.policy not in self.trained:
                continue
            compared.add(seat.policy)
            if self.policies[seat.policy].training.critic is None:
                yield (
                    f"credit compares agent '{agent}' with a critic's values, but policies.{seat.policy}.training."
                    f"critic is null; use policies.{seat.policy}.training.critic={{}}, or another estimator"
                )
        for name in sorted(self.trained - compared):
            if self.policies[name].training.critic is not None:
                yield (
                    f"policies.{name}.training.critic is set, but no estimator of its agents reads values; use "
                    f"critic=null, or credit.estimator.type=gae"
                )

    def _devices_can_change_hands(self) -> Iterator[str]:
        if self.cluster.backend == "simulated":
            return
        if self.balance.rule != "none" or self.balance.start != "as_configured":
            yield from self._instances_can_move("rule" if self.balance.rule != "none" else "start")
        at_once, policies = self.process_groups.at_once, len(self.trained)
        yield from self._ranks_have_processes()
        yield from self._states_have_nodes()
        if self.in_turns and self.cluster.address != "local":
            yield (
                f"mode is 'colocated', and cluster.address is '{self.cluster.address}', but engines and training "
                f"processes take turns on one machine only so far; use cluster.address=local, or mode=sync"
            )
        if at_once is not None and at_once < policies and self.cluster.backend == "inline":
            yield (
                f"process_groups.at_once is {at_once} with {policies} trained policies, but cluster.backend=inline has "
                f"one process for all of them; use cluster.backend=ray, or process_groups.at_once=null"
            )
        of_places = {"at_once", "keep_updated", "copies"}  # By the first two alone there are places.
        for key in sorted(self.process_groups.model_fields_set - of_places) if not self.shared_places else ():
            value, default = getattr(self.process_groups, key), type(self.process_groups).model_fields[key].default
            if value != default:
                yield (
                    f"process_groups.{key} is {value!r}, but every trained policy has devices of its own; use "
                    f"cluster.backend=ray with process_groups.at_once below {policies}, or process_groups.{key}="
                    f"{str(default).lower()}"
                )

    def _ranks_have_processes(self) -> Iterator[str]:
        name = max(self.trained, key=lambda name: self.policies[name].training.ranks, default="")
        asked = f"policies.{name}.training.ranks is {self.ranks}"
        if self.ranks > 1 and self.cluster.backend == "inline":
            yield f"{asked}, but cluster.backend=inline has one process; use cluster.backend=ray, or ranks=1"
        if self.process_groups.keep_updated and self.cluster.backend == "inline":
            yield (
                "process_groups.keep_updated is true, but cluster.backend=inline has one process, with which all is "
                "lost; use cluster.backend=ray, or keep_updated=null"
            )

    def _states_have_nodes(self) -> Iterator[str]:
        """Checks where the states of training are while they are set aside."""
        groups, address = self.process_groups, self.cluster.address
        if groups.copies == 2 and (self.cluster.backend == "inline" or address == "local"):
            yield (
                f"process_groups.copies is 2, but cluster.backend={self.cluster.backend} with cluster.address="
                f"{address} has one node; use copies=1, or backend=ray with the address of a Ray that has several"
            )
        elif groups.copies == 2 and not self.keeps_updated:
            yield (
                "process_groups.copies is 2, but no copy is made after an update, so that the loss of a node ends the "
                "run; use keep_updated=true, or copies=1"
            )
        if groups.host_gb is not None and self.shared_places and address != "local":
            yield (
                f"process_groups.host_gb is {groups.host_gb:g}, but on a Ray that others started states are objects, "
                f"which objects.memory_gib bounds; use that, or host_gb=null"
            )

    def _instances_can_move(self, key: str) -> Iterator[str]:
        """Checks the engines of trained policies: no others are moved."""
        asked = f"balance.{key} is '{getattr(self.balance, key)}'"
        instead = f"or balance.{key}={type(self.balance).model_fields[key].default}"
        engines = {name: self.policies[name].engine for name in sorted(self.trained)}
        idle = [name for name, engine in engines.items() if not computes(engine)]
        if idle == [*engines]:
            return
        if self.cluster.backend == "inline":
            yield f"{asked}, but inline all engines share one device; use cluster.backend=ray, {instead}"
        if idle:
            name = idle[0]
            yield (
                f"{asked}, but policies.{name}.engine.type is '{engines[name].type}', which takes no room on a node, "
                f"so that an engine which computes has none in its place; use engine.type=embedded, or "
                f"{engines[name].type} for all trained policies, {instead}"
            )

    def _instances_can_grow(self) -> Iterator[str]:
        if self.balance.grow and self.balance.rule == "none":
            yield (
                "balance.grow is true, but balance.rule is 'none', so that nothing looks at the queues; use "
                "balance.rule=drain_time, or balance.grow=false"
            )

    def _engines_can_run_here(self) -> Iterator[str]:
        if self.cluster.backend == "simulated":
            return
        for name, policy in self.policies.items():
            engine, at = policy.engine, f"policies.{name}.engine"
            if self.deterministic and not getattr(engine, "can_repeat", True):
                yield (
                    f"deterministic is true, but {at}.type is '{engine.type}', in which the last bits of a token "
                    f"depend on the requests of its batch; use engine.type=embedded, or deterministic=false"
                )
            if policy.trainable and self.mode is Mode.COLOCATED and getattr(engine, "gives_way", None) is False:
                yield (
                    f"mode is 'colocated', in which engines of trained policies give their devices up, but {at}.type "
                    f"is '{engine.type}', which does not sleep; use engine.type=embedded, or mode=sync"
                )
            if own_python(engine) is not None and self.cluster.backend != "ray":
                yield (
                    f"{at}.python is set, but with cluster.backend={self.cluster.backend} engines live in this "
                    f"process; use cluster.backend=ray, or {at}.python=null"
                )
            on = self.cluster.device
            if (wanted := getattr(engine, "tensor_parallel", 1)) > 1 and (on, self.cluster.backend) != ("cuda", "ray"):
                yield (
                    f"{at}.tensor_parallel is {wanted}, but cluster.backend={self.cluster.backend} on '{on}' has one "
                    f"device; use cluster.device=cuda with cluster.backend=ray, or tensor_parallel=1"
                )
            if isinstance(engine, VllmSettings) and on.partition(":")[2] not in ("", "0"):
                yield (
                    f"cluster.device is '{on}', but {at} is vLLM, which takes the first device that it sees; use "
                    f"cluster.device=cuda, and hide the others by the environment variable CUDA_VISIBLE_DEVICES"
                )

    def _instances_are_shared(self) -> Iterator[str]:
        together = next((name for name, policy in self.policies.items() if policy.serves_together), None)
        balance = "rule" if self.balance.rule != "none" else "start"
        if together and (value := getattr(self.balance, balance)) not in ("none", "as_configured"):
            yield (
                f"balance.{balance} is '{value}', but policies.{together}.serves_together is set, and an instance of "
                f"several policies cannot move to one of them; use balance.{balance}="
                f"{type(self.balance).model_fields[balance].default}, or serves_together=null"
            )

    def _processes_can_share(self) -> Iterator[str]:
        if self.cluster.backend != "ray":
            return
        if self.store.type == "memory":
            yield (
                "store.type is 'memory', which only one process reaches, and cluster.backend=ray has several; "
                "use store.type=sqlite, or cluster.backend=inline"
            )
        if ":" in self.cluster.device:
            yield (
                f"cluster.device is '{self.cluster.device}', but cluster.backend=ray gives every worker a device of "
                f"its own; use cluster.device=cuda"
            )

    @property
    def adapter_versions(self) -> int:
        """Versions of an adapter that requests may run under: the lag of the mode, and the newest."""
        lag = law_of(self.mode, self.pipeline, groups=self.batch.groups, now=self.pipeline.max_lag).lag
        return lag + 1

    @property
    def engines_of_a_device(self) -> int:
        """The most engines that may share the memory of a device: on Ray's accelerators each has its own."""
        hosts = [policy for name, policy in self.policies.items() if self.together(name)[0] == name]
        own = self.cluster.backend == "ray" and self.cluster.device != "cpu"
        return 1 if own else sum(policy.instances for policy in hosts)

    def together(self, policy: str) -> tuple[str, ...]:
        """The policies on the instances of a policy, in the order of the config. Modelled ones have their own."""
        host = self.policies[policy].serves_together or policy
        if self.cluster.backend == "simulated":
            return (policy,)
        return tuple(name for name, other in self.policies.items() if (other.serves_together or name) == host)

    @property
    def trained_together(self) -> list[tuple[str, ...]]:
        """Policies that are trained in one process on one base, for each base. Modelled ones are not."""
        return [] if self.cluster.backend == "simulated" else trained_together(self.policies)

    def is_modelled(self, policy: str) -> bool:
        """True if section `simulation` says what the policy's engines answer, and when."""
        return self.cluster.backend == "simulated" or is_timed(self.policies[policy].engine)

    @property
    def in_turns(self) -> bool:
        """True if training places have the devices of the engines, in turn with them: mode `colocated` on Ray."""
        return self.mode is Mode.COLOCATED and self.cluster.backend == "ray" and bool(self.trained)

    def takes_turns(self, policy: str) -> bool:
        """True if the devices of a policy's engines are those of training places, too."""
        return self.in_turns and gives_way(self.policies[policy].engine)

    @property
    def shared_places(self) -> int:
        """Number of places on which the policies are trained; 0 if each has a trainer of its own, one process."""
        at_once, policies = self.process_groups.at_once, len(self.trained)
        shared = at_once is not None and at_once < policies
        leaves = shared or self.ranks > 1 or self.process_groups.keep_updated or self.in_turns
        if self.cluster.backend != "ray" or not leaves:
            return 0
        return min(at_once or policies, policies)

    @property
    def ranks(self) -> int:
        """Training processes of each place: as many as the policy with most ranks has."""
        return max((self.policies[name].training.ranks for name in self.trained), default=1)

    @property
    def keeps_updated(self) -> bool:
        """True if a copy of each policy's state is set aside after each update."""
        wanted = self.process_groups.keep_updated
        return self.ranks > 1 if wanted is None else wanted

    @property
    def trained(self) -> frozenset[str]:
        """Policies that are updated."""
        return frozenset(name for name, policy in self.policies.items() if policy.trainable)

    def path(self, relative: Path | str) -> Path:
        """Returns a path of the config, relative to the config's folder unless it is absolute."""
        return self.base / Path(relative).expanduser()


def _received(code: CodeFiles, state: dict[Any, Any]) -> RunSettings:
    """Rebuilds pickled settings in the process that they were sent to."""
    settings = RunSettings.__new__(RunSettings)
    settings.__setstate__(state)
    return settings
