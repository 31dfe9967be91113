"""Standing training processes of a run: the ranks of its places, which are started anew when one is lost.

place 0     rank/0/0, rank/0/1 ...     they meet in a file of their own, and hold one policy at a time
place 1     rank/1/0, rank/1/1 ...
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flexmarl.cluster.interface import Cluster, Resident, ResidentSpec
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, FlexmarlError, TrainingError, WorkerError, boundary
from flexmarl.events.run_events import ProcessStarted, WorkerLost
from flexmarl.inference.settings import wants_canary
from flexmarl.objects.interface import ObjectStore, canary_key
from flexmarl.records import PolicyName
from flexmarl.training.group import LOSSES_IN_A_ROW, GroupTrainer, HostMemory, Rank, SetAside

if TYPE_CHECKING:
    from flexmarl.assemble.world import Processes

MakeSpecs = Callable[[], Sequence[ResidentSpec[Rank]]]
"""Specifies the ranks of one place; each time they meet anew."""


class StandingPlace:
    """The ranks of one place, on the cluster of a run."""

    def __init__(self, make_specs: MakeSpecs, processes: "Processes") -> None:
        """`processes` loses and gets the processes of ranks that are started anew."""
        self._make_specs, self._processes = make_specs, processes
        self.specs = make_specs()
        """Specs of its first ranks, which the world spawns with all else."""
        self._residents: Sequence[Resident[Rank]] = []
        self._cluster: Cluster | None = None

    def stand(self, cluster: Cluster, spawned: Sequence[Resident[Any]]) -> None:
        """Takes its first ranks from the residents that have been spawned on the cluster."""
        by_name = {resident.name: resident for resident in spawned}
        self._cluster, self._residents = cluster, [by_name[spec.name] for spec in self.specs]

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks that live now."""
        return [resident.remote for resident in self._residents]

    async def renew(self, because: str) -> None:
        """Ends all ranks, and starts others. Those that had not died are lost all the same: their state is gone.

        The others are on the same node, if it is there and has room: the blocks of the last copy are there.
        """
        cluster = self._cluster
        assert cluster is not None, "ranks that are lost have stood"
        for resident in self._residents:
            live = self._processes.places.pop(resident.name, None)
            with suppress(FlexmarlError):
                await resident.stop()
            if live is not None:
                lost = WorkerLost(process=resident.name, pid=live.pid, node=live.node, because=because)
                cluster.events.emit(lost)
        with boundary(TrainingError, f"starting the ranks of a place anew, because {because}"):
            self._residents = await self._started(cluster, node=self._residents[0].place.node)
        for resident in self._residents:
            self._processes.add(resident)
            place = resident.place
            cluster.events.emit(ProcessStarted(process=resident.name, pid=place.pid, node=place.node))

    async def _started(self, cluster: Cluster, *, node: str) -> Sequence[Resident[Rank]]:
        """Starts ranks on the node, else on another one. Raises TrainingError if none has room, or losses go on."""
        failures: list[str] = []
        while len(failures) < LOSSES_IN_A_ROW:
            specs = self._make_specs()
            there = [replace(spec, node=node) for spec in specs]
            stays = not failures and cluster.has_room(there)
            try:
                return await cluster.spawn(there if stays else specs)
            except WorkerError as error:  # A node was lost of which nobody knew yet, or was lost now.
                failures.append(str(error))
            except ConfigError as error:
                failures.append(str(error))
                if not stays:
                    break
        raise TrainingError(f"{failures[-1]}; go on from the last checkpoint with --resume")


def group_trainers(
    settings: RunSettings, trained: Sequence[PolicyName], places: Sequence[StandingPlace], objects: ObjectStore
) -> Mapping[PolicyName, GroupTrainer]:
    """The trainer of each policy that is trained on these places. `objects` is the store of this process's node."""
    groups = settings.process_groups
    memory = HostMemory(groups.host_bytes)
    return {
        policy: GroupTrainer(
            policy,
            places,
            memory,
            world=settings.policies[policy].training.ranks,
            keep=settings.keeps_updated,
            timeout_s=groups.call_timeout_s,
            copy=partial(copy_here, objects, policy, wants_canary(settings.policies[policy].engine))
            if groups.copies == 2
            else None,
        )
        for policy in trained
    }


async def copy_here(objects: ObjectStore, policy: PolicyName, canary: bool, aside: SetAside) -> None:
    """Copies a state that is set aside to this process's node, with what engines need of its version.

    Raises KeyError, ObjectError or WorkerError if that fails, ObjectSpaceError without room.
    """
    for key in [*aside.blocks.values(), *([canary_key(policy, aside.version)] if canary else [])]:
        await objects.get(key)
