"""What a policy's training processes can do as one: hold devices with the policy's state on them, or neither."""

from typing import Protocol

from flexmarl.cluster.allocation import Lease
from flexmarl.records import PolicyName


class ProcessGroup(Protocol):
    """The training processes of one policy. Called by `Residency`, one call at a time.

    Between `suspend` and `resume` the policy holds no device memory; what it trained so far, gradient sums included,
    is as it was (law 9).
    """

    @property
    def policy(self) -> PolicyName:
        """Whose they are."""
        ...

    async def resume(self, lease: Lease) -> None:
        """Brings weights, optimiser state and gradient sums onto the devices of the leased place.

        They are the group's own until `suspend` returns. Raises TrainingError.
        """
        ...

    async def suspend(self) -> None:
        """Sets them aside in host memory and frees the leased devices. Raises TrainingError."""
        ...
