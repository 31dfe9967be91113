"""Residents of real runs: engines and trainers in this process, or each in a process of its own on Ray.

engine/{policy}/{n}     one inference instance each; gets weights from the object store
trainer/{policy}        one trainer each; reads its rows from the experience store, sets weights in the object store.
                        Policies that are trained together have one process, by the name of the first
rank/{place}/{n}        in place of them, where policies share places or have several ranks: trains one after another
rollout/{n}             plays episodes, if the run asks for such workers
store/0                 on several nodes: the store's file, for trainers that are not on the controller's node
"""

import gc
import importlib
import pickle
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from uuid import uuid4

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from flexmarl.agents import TeamSpec
from flexmarl.assemble.blueprint import Blueprint, load_renderer, load_tokenizer, model_source, training_of
from flexmarl.assemble.standing import MakeSpecs
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.host import lower_priority
from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.interface import Cluster, ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.spill import Spill
from flexmarl.cluster.torch_device import set_own_threads, with_threads
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, EngineError, RankLost, TrainingError, boundary, described
from flexmarl.events.event import Events
from flexmarl.experience.backends.remote import StoreHost, StoreService, store_on_node
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.interface import EngineParts, InferenceEngine, WeightedEngine, make_engine
from flexmarl.inference.settings import EngineSettings, computes, own_python, wants_canary
from flexmarl.objects.backends.memory import InlineObjectStore, ShmObjectStore
from flexmarl.objects.backends.node import NodeObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import AgentName, InstanceId, PolicyName, WorkerId
from flexmarl.rollout.worker import PlayParts, RolloutHost, RolloutWorker
from flexmarl.training.backends.base_host import BaseHost
from flexmarl.training.backends.causal_lm import architecture_of, load_model
from flexmarl.training.backends.joint import JointPasses
from flexmarl.training.backends.rank import RankHost, Trained
from flexmarl.training.backends.ranks import ALONE, Ranks, meet
from flexmarl.training.backends.single import SavesPretrained, SingleProcessTrainer
from flexmarl.training.backends.state import Base, Skeleton
from flexmarl.training.group import Rank
from flexmarl.training.interface import StoreRows, Trainer
from flexmarl.training.residency import ProcessGroup
from flexmarl.training.together import SharedBase

T = TypeVar("T")
RESUME = "go on from the last checkpoint with --resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """The materials of residents. They can be pickled if residents live in processes of their own."""

    settings: RunSettings
    objects: ObjectStore
    device: str
    """Torch's name of the device in the resident's process."""
    open_store: Callable[[], ExperienceStore]
    """Opens the run's store where a resident lives."""
    folder: Callable[[], Path] = Path
    """Finds a folder of this run and of the resident's node, for the files in which ranks meet."""
    disk: ObjectStore | None = None
    """Files of this run, for states of training that find no room in memory; None if there are none."""
    thread: DeviceThread | None = None
    """The torch thread of this process; None if each resident has a process, and so a thread, of its own."""

    def make_engine_here(self, policy: PolicyName, modelled: Callable[[PolicyName], Any]) -> InferenceEngine:
        """Makes an engine that computes nothing, in the controller's process. `modelled`: see `EngineParts`."""
        with boundary(EngineError, f"policies.{policy}.engine: making an engine"):
            settings, parts = self._engine_of(self.thread or DeviceThread(f"engine-{policy}"), policy)
            return make_engine(settings, replace(parts, modelled=modelled))

    def make_engine(self, policy: PolicyName) -> InferenceEngine:
        """Makes an engine with its model. Raises EngineError, or ConfigError that names the fault of the model."""
        with boundary(EngineError, f"policies.{policy}.engine: making an engine on {self.device}"):
            self._begin()
            thread = self.thread or DeviceThread(f"engine-{policy}")
            engine = make_engine(*self._engine_of(thread, policy))
            self._made()
            return engine

    def _engine_of(self, thread: DeviceThread, policy: PolicyName) -> tuple[EngineSettings, EngineParts]:
        """The settings and the parts of a policy's engine."""
        parts = EngineParts(
            policy=policy,
            make_model=partial(load_model, model_source(self.settings, policy)),
            decode=load_renderer(self.settings, policy).decode,
            renderer=load_renderer(self.settings, policy),
            source=model_source(self.settings, policy),
            store=self.objects,
            thread=thread,
            device=self.device,
            sharing=self.settings.engines_of_a_device,
            deterministic=self.settings.deterministic,
            verify=self.settings.objects.level(self.settings.cluster.device),
            together=tuple(PolicyName(name) for name in self.settings.together(policy) if name != policy),
            versions=self.settings.adapter_versions,
            architecture=architecture_of(model_source(self.settings, policy)),
            other=partial(self._engine_of, thread),
        )
        return self.settings.policies[policy].engine, parts

    def make_trainer(self, policy: PolicyName) -> SingleProcessTrainer:
        """Makes a trainer with its model and a client of the store. Raises TrainingError or ConfigError."""
        settings = self.settings
        with boundary(TrainingError, f"policies.{policy}.training: making a trainer"), training_of(policy):
            self._begin()
            thread, rows = self.thread or DeviceThread(f"trainer-{policy}"), StoreRows(self.open_store())
            model, tokenizer = load_model(model_source(settings, policy)), load_tokenizer(settings, policy)
            trainer = self._trainer_of(policy, model, thread, rows, tokenizer)
            self._made()
            if self.thread is None and self.device == "cpu":
                lower_priority()  # Only now: until it is made, the whole run waits for it.
            return trainer

    def _trainer_of(
        self,
        policy: PolicyName,
        model: PreTrainedModel,
        thread: DeviceThread,
        rows: StoreRows,
        tokenizer: SavesPretrained,
        ranks: Ranks = ALONE,
    ) -> SingleProcessTrainer:
        """The trainer of a policy around a model."""
        settings = self.settings
        return SingleProcessTrainer(
            policy,
            model,
            settings.policies[policy].training,
            self.objects,
            thread=thread,
            tokenizer=tokenizer,
            device=self.device,
            seed=zlib.crc32(f"{settings.seed}/{policy}".encode()),
            deterministic=settings.deterministic,
            rows=rows,
            canary=wants_canary(settings.policies[policy].engine),
            ranks=ranks,
        )

    def make_base(self, policies: Sequence[PolicyName]) -> BaseHost:
        """Makes the trainers of policies that are trained together, on one base."""
        settings, first = self.settings, policies[0]
        with boundary(TrainingError, f"making the trainers of {', '.join(policies)}"):
            self._begin()
            thread, rows = self.thread or DeviceThread(f"trainer-{first}"), StoreRows(self.open_store())
            source, training = model_source(settings, first), settings.policies[first].training
            base = Base(source, training.dtype, self.device, Skeleton(source))
            trainers: dict[PolicyName, SingleProcessTrainer] = {}
            for policy in policies:
                with training_of(policy):
                    tokenizer = load_tokenizer(settings, policy)
                    trainers[policy] = self._trainer_of(policy, base.model(), thread, rows, tokenizer)
            deterministic = settings.deterministic
            passes = JointPasses(base.model(), training, device=self.device, deterministic=deterministic)
            self._made()
            if self.thread is None and self.device == "cpu":
                lower_priority()
            return BaseHost(trainers, passes, rows, thread=thread)

    def make_rank(self, name: WorkerId, meeting: str) -> RankHost:
        """Makes a rank of a place. It holds no policy. Ranks of one place meet at the file `meeting` of their node."""
        settings = self.settings
        with boundary(TrainingError, f"making {name}"):
            self._begin()
            number, world = name.number or 0, settings.ranks
            ranks = meet(self.folder() / meeting, number, world, device=self.device) if world > 1 else None
            thread, rows = DeviceThread(str(name).replace("/", "-")), StoreRows(self.open_store())
            sources = {policy: model_source(settings, policy) for policy in map(PolicyName, settings.trained)}
            policies = {
                policy: Trained(source=source, settings=settings.policies[policy].training)
                for policy, source in sources.items()
            }

            tokenizers = {policy: load_tokenizer(settings, policy) for policy in policies}

            def make(policy: PolicyName, model: PreTrainedModel, ranks: Ranks) -> SingleProcessTrainer:
                with training_of(policy):
                    return self._trainer_of(policy, model, thread, rows, tokenizers[policy], ranks)

            options: Any = {"disk": self.disk, "device": self.device, "thread": thread, "ranks": ranks}
            rank = RankHost(policies, self.objects, make, gives_way=settings.in_turns, **options)
            self._made()
            if self.device == "cpu":
                lower_priority()
            return rank

    def _begin(self) -> None:
        transformers_logging.disable_progress_bar()
        if self.thread is None:
            torch.manual_seed(self.settings.seed)

    def _made(self) -> None:
        if self.thread is None:
            settle_memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class RealResidents:
    """Specifies engines and trainers that compute."""

    materials: Materials
    team: TeamSpec
    open_cluster: Callable[[int, Events], AbstractAsyncContextManager[Cluster]]
    """Opens the cluster for a number of residents."""
    serve_store: Callable[[], StoreService] | None = None
    """Makes the service of the store's file for other nodes; None if there can be none."""
    models: dict[PolicyName, Any] = field(default_factory=dict)
    """The models of policies whose engines compute nothing, as far as they were asked for. Their instances share it."""

    @property
    def objects(self) -> ObjectStore:
        """The object store, which holds the weights."""
        return self.materials.objects

    def cluster(self, residents: int, events: Events) -> AbstractAsyncContextManager[Cluster]:
        """Opens the cluster: Ray, or this process."""
        return self.open_cluster(residents, events)

    def engine(self, policy: PolicyName, instance: InstanceId) -> ResidentSpec[InferenceEngine]:
        """Specifies one inference instance."""
        engine, materials = self.materials.settings.policies[policy].engine, self.materials
        return ResidentSpec(
            name=WorkerId.engine(instance),
            kind=ResidentKind.ENGINE,
            contract=WeightedEngine,  # the widest: `capabilities` says which of its methods may be called
            make=partial(materials.make_engine, policy)
            if computes(engine)
            else partial(materials.make_engine_here, policy, self.modelled),
            error=EngineError,
            devices=self._devices * getattr(engine, "tensor_parallel", 1) if computes(engine) else 0,
            python=self._python(engine),
            threads=getattr(engine, "threads", None) or self._threads,
            takes_turns=self.materials.settings.takes_turns(policy),
            in_controller=not computes(engine),
        )

    def modelled(self, policy: PolicyName) -> Any:
        """Returns the model of a policy's engines in section `simulation`. Raises ConfigError if it lacks replies."""
        if policy not in self.models:
            settings = self.materials.settings
            renderer = load_renderer(settings, policy)
            agents = {AgentName(name): renderer for name, seat in settings.team.agents.items() if seat.policy == policy}
            self.models[policy] = settings.simulation.engine_model(policy, agents, settings.base)
        return self.models[policy]

    def trainer(self, policy: PolicyName) -> ResidentSpec[Trainer]:
        """Specifies the trainer of a policy."""
        return self._trainer(policy, Trainer, partial(self.materials.make_trainer, policy))

    def bases(self) -> list[ResidentSpec[SharedBase]]:
        """Specifies the trainers of policies that are trained together, by `RunSettings.trained_together`."""
        return [
            self._trainer(policies[0], SharedBase, partial(self.materials.make_base, policies))
            for names in self.materials.settings.trained_together
            if (policies := [PolicyName(name) for name in names])
        ]

    def _trainer(self, policy: PolicyName, contract: type[T], make: Callable[[], T]) -> ResidentSpec[T]:
        return ResidentSpec(
            name=WorkerId.trainer(policy),
            kind=ResidentKind.TRAINER,
            contract=contract,
            make=make,
            error=TrainingError,
            advice=RESUME,
            devices=self._devices,
            threads=self._threads,
        )

    def places(self) -> list[MakeSpecs]:
        """Returns what specifies the ranks of each place, where policies share places or have several ranks."""
        return [partial(self.ranks_of, place) for place in range(self.materials.settings.shared_places)]

    def ranks_of(self, place: int) -> list[ResidentSpec[Rank]]:
        """Specifies the ranks of a place, which meet each other only."""
        meeting = f"place-{place}-{uuid4().hex}"
        names = [WorkerId.rank(place, number) for number in range(self.materials.settings.ranks)]
        return [
            ResidentSpec(
                name=name,
                kind=ResidentKind.RANK,
                contract=Rank,
                make=partial(self.materials.make_rank, name, meeting),
                error=RankLost,
                advice=RESUME,
                devices=self._devices,
                threads=self._threads,
                group=f"place {place}",
                takes_turns=self.materials.settings.in_turns,
            )
            for name in names
        ]

    def rollout_workers(self) -> list[ResidentSpec[RolloutWorker]]:
        """Specifies the processes that play episodes: none in a run whose only process is the controller's."""
        settings = self.materials.settings
        number = 0 if settings.cluster.backend == "inline" else settings.rollout.workers
        names = [WorkerId(ResidentKind.ROLLOUT, number=n) for n in range(number)]
        parts = PlayParts(
            team=self.team,
            open_store=self.materials.open_store,
            run_seed=settings.seed,
            timeout_s=settings.rollout.episode_timeout_s,
            grace_s=settings.rollout.cancel_grace_s,
            bounded=settings.rollout.tool_calls_at_once is not None,
        )
        if number:
            require_sendable(parts, number)
        return [
            ResidentSpec(
                name=name, kind=ResidentKind.ROLLOUT, contract=RolloutWorker, make=partial(RolloutHost, name, parts)
            )
            for name in names
        ]

    def services(self, cluster: Cluster) -> Sequence[ResidentSpec[Any]]:
        """Specifies what the others need: the store's service, if the cluster has several nodes."""
        if self.serve_store is None or len(cluster.nodes) == 1:
            return []
        home = cluster.nodes[0].name
        return [
            ResidentSpec(name=STORE, kind=ResidentKind.STORE, contract=StoreService, make=self.serve_store, node=home)
        ]

    def replacement_s(self, policy: PolicyName) -> float:
        """Returns 0: a real start takes the time that it takes."""
        return 0.0

    def process_groups(self, trainers: Mapping[PolicyName, Trainer]) -> Mapping[PolicyName, ProcessGroup]:
        """Returns none: every trainer has its own device."""
        return {}

    def _python(self, engine: EngineSettings) -> Path | None:
        python = own_python(engine)
        return None if python is None else self.materials.settings.path(python).absolute()

    @property
    def _devices(self) -> int:
        return int(self.materials.settings.cluster.device != "cpu")

    @property
    def _threads(self) -> int:
        return self.materials.settings.cluster.threads or 1


@contextmanager
def open_inline(blueprint: Blueprint, store: ExperienceStore) -> Iterator[RealResidents]:
    """Opens residents in this process: for debugging, and for a single device.

    Only the device's thread computes with several threads. OpenMP keeps a team for each thread that does, and with more
    threads in all teams than cores, a team sleeps at the end of every operation, and wakes up late for the next.
    """
    settings, cluster = blueprint.settings, blueprint.settings.cluster
    threads = cluster.threads or torch.get_num_threads()
    torch.manual_seed(settings.seed)
    with closing(DeviceThread(first=lambda: set_own_threads(threads))) as thread, with_threads(1):
        materials = Materials(
            settings=settings,
            objects=InlineObjectStore(thread),
            device=cluster.device,
            open_store=lambda: store,
            thread=thread,
        )
        yield RealResidents(
            materials=materials,
            team=blueprint.team,
            open_cluster=lambda residents, events: inproc_cluster(events=events),
        )


@contextmanager
def open_ray(blueprint: Blueprint, path: Path) -> Iterator[RealResidents]:
    """Opens residents on Ray, each in its own process. `path` is the store's file, in the run's folder.

    On a private Ray, weights cross in the shared memory of this machine. On a Ray that others started, they also cross
    from node to node, and trainers on other nodes read their rows through `store/0`.
    """
    settings = blueprint.settings
    path = path.absolute()  # Other processes may have another working directory.
    backend = ray_or_refuse()
    with RunLeases(f"{settings.name} ({path.parent})") as leases:
        device = "cpu" if settings.cluster.device == "cpu" else "cuda:0"  # Of accelerators, each sees its own.
        opened = partial(backend.ray_cluster, settings.cluster, leases=leases)
        if settings.cluster.address == "local":
            objects = ShmObjectStore(leases.shared_memory())
            objects.create()
            if settings.objects.memory_bytes is not None:
                Spill.allow(leases.shared_memory(), leases.spilled(), settings.objects.memory_bytes)
            disk = ShmObjectStore(leases.folder / "states")
            if settings.shared_places:
                disk.create()
            yield RealResidents(
                materials=Materials(
                    settings=settings,
                    objects=objects,
                    device=device,
                    open_store=partial(DurableStore.join, path),
                    folder=partial(Path, leases.folder),
                    disk=disk,
                ),
                team=blueprint.team,
                open_cluster=lambda residents, events: opened(residents=residents, events=events),
            )
            return
        files, read = backend.RayFiles(), local_paths(settings)
        visible = {"rollout": read, "training": [path.parent, *read]}  # Trainers write checkpoints there.

        @asynccontextmanager
        async def open_cluster(residents: int, events: Events) -> AsyncIterator[Cluster]:
            weights = settings.objects
            crossing = {"deltas": weights.delta == "auto", "memory_bytes": weights.memory_bytes}
            async with opened(residents=residents, events=events, visible=visible, **crossing) as cluster:
                files.home = cluster.nodes[0].id
                yield cluster

        yield RealResidents(
            materials=Materials(
                settings=settings,
                objects=NodeObjectStore(files),
                device=device,
                open_store=partial(store_on_node, path, files, backend.RayAddress(STORE)),
                folder=backend.folder_of_node,
            ),
            team=blueprint.team,
            open_cluster=open_cluster,
            serve_store=partial(StoreHost.join, path),
        )


STORE = WorkerId(ResidentKind.STORE, number=0)


def require_sendable(parts: PlayParts, workers: int) -> None:
    """Raises ConfigError unless processes can be made of the parts: they import what is not built in."""
    asked = f"rollout.workers is {workers}, and its processes cannot get the team"
    remedy = "put workflow, tools and parsers into a file that `code` lists, or use rollout.workers=0"
    try:
        sent = pickle.dumps(parts)
    except Exception as error:  # Whatever a user's own object raises when it is pickled.
        raise ConfigError(f"{asked}: {described(error)}; {remedy}") from error
    if b"__main__" in sent:
        raise ConfigError(f"{asked}: a part of it is defined in a notebook, or in the script that runs; {remedy}")


def local_paths(settings: RunSettings) -> list[Path]:
    """The folders and files of a config that residents read: models that are folders, and code."""
    models = [Path(model_source(settings, policy)) for policy in settings.policies]
    return [*(model.absolute() for model in models if model.exists()), *map(settings.path, settings.code)]


def ray_or_refuse() -> ModuleType:
    """Returns the backend of clusters on Ray, imported here so that other runs work without Ray.

    Raises ConfigError if Ray is not installed.
    """
    try:
        return importlib.import_module("flexmarl.cluster.backends.ray")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cluster.backend is 'ray', which needs the package '{error.name}', and that is not installed: pip "
            f"install {error.name}, or use cluster.backend=inline"
        ) from error


def settle_memory() -> None:
    """Excludes all that has been loaded from later garbage collections.

    A full one would walk all that torch and transformers loaded: 0.1 s in which nothing is dispatched.
    """
    gc.collect()
    gc.freeze()
