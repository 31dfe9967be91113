"""Mode `colocated` in virtual time: no device is held by an engine and a trainer at any moment, whatever is lost."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as law
from hypothesis import strategies as st

from flexmarl.assemble.simulation import simulate
from flexmarl.assemble.world import Residents
from flexmarl.cluster.allocation import Lease
from flexmarl.config import RunSettings, load_run
from flexmarl.errors import ConfigError
from flexmarl.events.event import Events
from flexmarl.events.journal import read_run
from flexmarl.events.run_events import StepEnded, WorkerLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import InstanceReplaced
from flexmarl.events.training_events import DevicesFreed, Swapped
from flexmarl.records import InstanceId, PolicyName
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.faults.fault_plan import Fault, FaultKind, FaultPlan
from flexmarl.testing.faults.planned import FaultyResidents, PlannedFaults
from flexmarl.training.colocated import ColocatedResidency
from flexmarl.training.settings import ProcessGroupSettings

STEPS = 3
CONFIG = f"""
name: colocated
steps: {STEPS}
mode: colocated
cluster: {{backend: simulated}}
tasks:
  type: generator
  name: workload
  params: {{agents: {{solver: 1.0, verifier: 1.0}}, turns_min: 2, turns_max: 3}}
policies: {{solver: {{model: none, instances: 2}}, verifier: {{model: none, instances: 1}}}}
team:
  workflow: {{type: custom, name: call_graph}}
  agents: {{solver: {{policy: solver}}, verifier: {{policy: verifier}}}}
batch: {{groups: 3, episodes: 2}}
rollout: {{episode_timeout_s: 500, call_timeout_s: 100}}
pool: {{replacements: 9, load_timeout_s: 20, close_timeout_s: 5}}
credit: {{filter: null}}
evaluate: {{tasks: 2, every: 1}}
simulation:
  replies: {{default: {{type: asked}}}}
  costs:
    default:
      engine: {{start_s: 3.0, sleep_s: 2.0, wake_s: 1.5, load_s: 1.0}}
      trainer: {{sample_s: 0.3, update_s: 1.0, publish_s: 0.5, resume_s: 2.0, suspend_s: 1.0}}
"""


class Tenants:
    """Who has the devices: an engine until it sleeps, or has been ended or lost; a trainer until it is set aside."""

    def __init__(self) -> None:
        self.engines = set[InstanceId]()
        self.trainers = set[PolicyName]()
        self.changes = 0
        self.conflicts = list[str]()
        """Not raised where they come: an engine that raises an error is lost, and the run goes on."""

    def changed(self) -> None:
        self.changes += 1
        if self.engines and self.trainers:
            self.conflicts.append(f"{sorted(self.engines)} and {sorted(self.trainers)} have the same devices")


class WatchedSleeper:
    """An engine that notes when it has its device."""

    def __init__(self, inner: Any, name: InstanceId, tenants: Tenants) -> None:
        self._inner, self._name, self._tenants = inner, name, tenants
        self._note(held=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def sleep(self) -> None:
        await self._inner.sleep()
        self._note(held=False)

    async def wake(self) -> None:
        self._note(held=True)
        await self._inner.wake()

    async def close(self) -> None:
        try:
            await self._inner.close()
        finally:
            self._note(held=False)

    def _note(self, *, held: bool) -> None:
        (self._tenants.engines.add if held else self._tenants.engines.discard)(self._name)
        self._tenants.changed()


class WatchedTenant:
    """A process group that notes when it has its devices."""

    def __init__(self, inner: Any, tenants: Tenants) -> None:
        self._inner, self._tenants = inner, tenants

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def resume(self, lease: Lease) -> None:
        self._tenants.trainers.add(self._inner.policy)
        self._tenants.changed()
        await self._inner.resume(lease)

    async def suspend(self) -> None:
        await self._inner.suspend()
        self._tenants.trainers.discard(self._inner.policy)
        self._tenants.changed()


class WatchedTenants(PlannedFaults):
    """Planned faults in a run whose engines and process groups note when they have devices."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(FaultPlan(faults=faults))
        self.tenants = Tenants()

    def begin(self, events: Events, die: Callable[[], None], checkpoints: Path) -> None:
        def lost(worker: WorkerLost) -> None:  # A process that has ended has no device.
            if worker.process.kind == "engine":
                self.tenants.engines.discard(worker.process.instance)

        events.listen(WorkerLost, lost)
        super().begin(events, die, checkpoints)

    def residents(self, residents: Residents) -> Residents:
        tenants, faulty = self.tenants, super().residents(residents)
        assert isinstance(faulty, FaultyResidents)

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(faulty, name)

            def engine(self, policy: PolicyName, instance: InstanceId) -> Any:
                spec: Any = faulty.engine(policy, instance)
                return replace(spec, make=lambda: WatchedSleeper(spec.make(), instance, tenants))

            def process_groups(self, trainers: Mapping[PolicyName, Any]) -> Any:
                return {name: WatchedTenant(one, tenants) for name, one in faulty.process_groups(trainers).items()}

        watched: Any = Watched()
        return watched


def settings_of(folder: Path, *overrides: str) -> RunSettings:
    config = folder / "run.yaml"
    config.write_text(CONFIG)
    return load_run(config, [f"out={folder / 'runs'}", *overrides])


def played(*faults: Fault, at_once: int | None = None) -> tuple[list[Any], Tenants]:
    disturbance = WatchedTenants(*faults)
    with TemporaryDirectory() as name:
        limit = [] if at_once is None else [f"process_groups.at_once={at_once}"]
        path = simulate(settings_of(Path(name), *limit), disturbance=disturbance)
        assert not disturbance.tenants.conflicts
        return list(read_run(RunFolder(path).journal)), disturbance.tenants


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_device_never_holds_an_engine_and_a_trainer(at_once: int) -> None:
    events, tenants = played(at_once=at_once)
    assert sum(isinstance(event, StepEnded) for event in events) == STEPS
    # Three engines begin, sleep and wake in each step; two trainers resume and are suspended, and some twice.
    assert tenants.changes >= 3 + STEPS * (2 * 3 + 2 * 2)
    assert [event.by for event in events if isinstance(event, DevicesFreed)] == ["engines", "trainers"] * STEPS


FAULTS = st.builds(
    lambda kind, target, after, how: Fault(
        kind=kind,
        target=InstanceId.parse(target),
        after=after,
        how=how if kind is FaultKind.LOST_INSTANCE else "",
    ),
    st.sampled_from([FaultKind.LOST_INSTANCE, FaultKind.ENGINE_SILENCE]),
    st.sampled_from(["solver/0", "solver/1", "verifier/0", "solver/2", "verifier/1"]),
    st.floats(0.0, 150.0).map(lambda after: round(after, 2)),
    st.sampled_from(["at_once", "when_called"]),
)


@given(st.lists(FAULTS, min_size=1, max_size=4, unique_by=lambda fault: fault.target), st.sampled_from([1, 2]))
@law(max_examples=40, deadline=None)
def test_it_never_does_when_engines_die_or_hang_at_any_moment(faults: list[Fault], at_once: int) -> None:
    events, _ = played(*faults, at_once=at_once)
    assert sum(isinstance(event, StepEnded) for event in events) == STEPS


def moments(events: list[Any]) -> dict[str, float]:
    """When something is in the middle of its second time, in an undisturbed run."""
    freed = [event for event in events if isinstance(event, DevicesFreed)]
    lent, back = freed[2], freed[3]
    swap = next(event for event in events if isinstance(event, Swapped) and event.began >= lent.ended)
    return {
        "falling asleep": (lent.began + lent.ended) / 2,
        "asleep": (swap.began + swap.ended) / 2,
        "places given back": (back.began + back.ended) / 2,
        "waking": back.ended + 0.5,
    }


@pytest.mark.parametrize("moment", ["falling asleep", "asleep", "places given back", "waking"])
@pytest.mark.parametrize("kind", [FaultKind.LOST_INSTANCE, FaultKind.ENGINE_SILENCE])
def test_the_only_engine_of_a_policy_is_replaced_whenever_it_is_lost(moment: str, kind: FaultKind) -> None:
    undisturbed, _ = played(at_once=1)
    how = "at_once" if kind is FaultKind.LOST_INSTANCE else ""
    lost = Fault(kind=kind, target=InstanceId("verifier", 0), after=moments(undisturbed)[moment], how=how)
    events, _ = played(lost, at_once=1)
    (replaced,) = [event for event in events if isinstance(event, InstanceReplaced)]
    assert replaced.replaces == "verifier/0"
    freed = [event for event in events if isinstance(event, DevicesFreed)]
    lent = [(one.began, other.ended) for one, other in zip(freed[::2], freed[1::2], strict=True)]
    came = replaced.ended
    assert not any(began < came < ended for began, ended in lent), "none is started while trainers have the devices"
    assert sum(isinstance(event, StepEnded) for event in events) == STEPS


class Engines:
    """Engines of which only the order of calls is noted."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    async def sleep(self) -> None:
        await asyncio.sleep(2.0)
        self._said.append("asleep")

    async def wake(self) -> None:
        self._said.append("wake")
        await asyncio.sleep(2.0)


class Group:
    """A process group of which only the order of calls is noted."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.policy, self._said = PolicyName(name), said

    def join(self, devices: Any) -> None: ...

    async def resume(self, lease: Lease) -> None:
        self._said.append(f"{self.policy} comes")
        await asyncio.sleep(1.0)

    async def suspend(self) -> None:
        await asyncio.sleep(1.0)
        self._said.append(f"{self.policy} is set aside")


def test_calls_outside_of_a_step_change_places_once_while_they_overlap() -> None:
    said = list[str]()

    async def main() -> None:
        groups = {PolicyName(name): Group(name, said) for name in ("a", "b")}
        settings = ProcessGroupSettings(at_once=1)
        async with ColocatedResidency(groups, settings, engines=Engines(said)).open() as residency:

            async def visit(name: str) -> None:
                async with residency.visit(PolicyName(name)):
                    said.append(f"{name} visits")

            assert not residency.hold(PolicyName("a"), 1), "engines have the devices"
            residency.leave(PolicyName("a"))
            await asyncio.gather(visit("a"), visit("b"))
            assert said == [
                *("asleep", "a comes", "a visits", "a is set aside"),
                *("b comes", "b visits", "b is set aside", "wake"),
            ]
            with pytest.raises(ConfigError, match="the disk is full"):
                async with residency.training():
                    raise ConfigError("the disk is full")
            assert said[-2:] == ["asleep", "wake"], "after an error, too, engines get their devices back"

    run_virtual(main())


def test_engines_sleep_on_if_a_trainer_cannot_be_set_aside() -> None:
    said = list[str]()

    class Stuck(Group):
        async def suspend(self) -> None:
            raise ConfigError("/dev/shm is full")

    async def main() -> None:
        solver = PolicyName("solver")
        groups = {solver: Stuck(solver, said)}
        async with ColocatedResidency(groups, ProcessGroupSettings(), engines=Engines(said)).open() as residency:
            with pytest.raises(ConfigError, match="/dev/shm is full"):
                async with residency.visit(solver):
                    pass

    run_virtual(main())
    assert said == ["asleep", "solver comes"]
